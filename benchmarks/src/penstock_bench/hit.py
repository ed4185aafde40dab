"""`penstock bench hit`: a prefix hit costs one decode step, without copies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock_bench.comparison import Comparison, compare, figures, ratios, size
from penstock_bench.engine_runs import Run, Task
from penstock_bench.engine_sides import OURS, RIVAL, EngineShape, MakeSide, Ours
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import Solo

CLAIM = "A known prompt is read where it lies: its first token costs one decode step"

FIRST_OVER_STEP = 1.10
"""Goal: time to first token over the time of a decode step at that length."""
RESOLUTION = 0.01
"""Bytes below this share of the cached KV do not count as a copy."""


@dataclass(frozen=True, slots=True)
class HitLoad:
    """Sizes in tokens."""

    model: str = ModelChoice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    known_tokens: int = 8_192
    decode_tokens: int = 12
    """Steps that the first token is compared with; few enough that no tail fills up."""
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5
    hits: int = 5
    """Hits per engine and round, since caching the prompt costs more than all of them."""

    def task(self, model: BenchModel) -> Task:
        """Return a prompt of the cached tokens and one more, whose logits have to be computed."""
        prompt = model.prompt(self.known_tokens + 1, seed=0)
        return Task(
            [prompt],
            self.decode_tokens,
            known=prompt[:-1],
            repeats=self.hits,
            prefill_chunk=self.engine.prefill_chunk,
        )


def measure(load: HitLoad) -> Report:
    """Cache the prompt and submit it again, on both sides in turn."""
    model = bench_model(load.model, load.llama)
    makers: dict[str, MakeSide] = {
        OURS: lambda: Ours(model, 1, load.engine),
        RIVAL: lambda: Solo(model.model),
    }
    comparison = compare(
        makers, load.task(model), load.rounds, alike=load.engine.exact and model.exact
    )
    return report(load, model, comparison)


def first_over_step(runs: Sequence[Run]) -> float:
    """Return the median first token of hits over the median of their own steps."""
    return statistics.median(
        run.first_seconds / statistics.median(run.step_seconds) for run in runs
    )


def bytes_copied(runs: Sequence[Run], known_bytes: int, layers: int) -> int:
    """Return the bytes of cached KV that a hit copies, permanently or for a step.

    The step of the first token may take as many bytes as any decode step at this length. A decode
    step may take buffers, but no keys or values: half of one layer's keys is far more than its
    scores. The number of buffers alive at once varies with thread scheduling, so less than
    `RESOLUTION` beyond a normal step is ignored. Every hit would copy, so the minimum over all hits
    counts.

    Args:
        runs: runs with memory tracking, each a hit.
        known_bytes: bytes of the cached KV.
        layers: number of layers with KV.
    """
    half_a_side = known_bytes / layers / 4
    return min(_copied(run, RESOLUTION * known_bytes, half_a_side) for run in runs)


def _copied(run: Run, noise_bytes: float, most_bytes: float) -> int:
    held_bytes = [run.before_bytes, *(moment.held_bytes for moment in run.moments)]
    first, *later = [moment.peak_bytes - held_bytes[i] for i, moment in enumerate(run.moments)]
    if first > most_bytes:
        return first
    beyond = first - round(statistics.median(later))
    return beyond if beyond > noise_bytes else 0


def report(load: HitLoad, model: BenchModel, comparison: Comparison) -> Report:
    """Compare the first token with a normal step, and the copied bytes with zero."""
    known_bytes = load.known_tokens * model.kv_bytes_per_token
    sides = {side: _figures(comparison, side, known_bytes, model.layers) for side in (OURS, RIVAL)}
    ours, theirs = sides[OURS], sides[RIVAL]
    common = ratios(comparison)
    first = round(theirs["first_token_ms"] / ours["first_token_ms"], 3)
    goal = {"bytes_copied": 0, "first_over_step": FIRST_OVER_STEP}
    lines = [
        Line(
            "KV bytes copied",
            size(ours["bytes_copied"]),
            size(theirs["bytes_copied"]),
            "0",
            ours["bytes_copied"] == 0,
        ),
        Line(
            f"first token, ms ({first:.2f}x)",
            f"{ours['first_token_ms']:.2f}",
            f"{theirs['first_token_ms']:.2f}",
        ),
        Line(
            "a plain step at that length, ms",
            f"{ours['step_ms']:.2f}",
            f"{theirs['step_ms']:.2f}",
        ),
        Line(
            "first token / plain step",
            f"{ours['first_over_step']:.2f}",
            f"{theirs['first_over_step']:.2f}",
            f"<= {FIRST_OVER_STEP:.2f}",
            ours["first_over_step"] <= FIRST_OVER_STEP,
        ),
        Line("KV held", size(ours["held_bytes"]), size(theirs["held_bytes"])),
        Line("peak", size(ours["peak_bytes"]), size(theirs["peak_bytes"])),
    ]
    return Report(
        name="hit",
        claim=CLAIM,
        rival=RIVAL,
        penstock=ours,
        rival_figures=theirs,
        ratio={
            "first_token": first,
            "decode_speed": common["decode_speed"],
            "peak_memory": common["peak_memory"],
            "held_memory": common["held_memory"],
        },
        goal=goal,
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(replace(load, model=model.name)),
            "model": model.as_object(),
            "runs": comparison.as_object(),
        },
        dtype=model.dtype,
    )


def _figures(comparison: Comparison, side: str, known_bytes: int, layers: int) -> dict[str, Any]:
    timed = comparison.timed[side]
    common = figures(comparison, side)
    return {
        "bytes_copied": bytes_copied(comparison.watched[side], known_bytes, layers),
        "first_token_ms": round(1e3 * comparison.median(side, "first_seconds"), 3),
        "step_ms": common["median_step_ms"],
        "first_over_step": round(first_over_step(timed), 3),
        **{name: common[name] for name in ("held_bytes", "peak_bytes", "cached_tokens")},
    }
