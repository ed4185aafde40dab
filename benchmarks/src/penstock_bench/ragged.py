"""`penstock bench ragged`: batches of unequal lengths without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock_bench.comparison import (
    Comparison,
    compare,
    figures,
    least,
    ratio_line,
    ratios,
    size,
    speed,
)
from penstock_bench.engine_runs import Task
from penstock_bench.engine_sides import OURS, RIVAL, EngineShape, MakeSide, Ours
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import Batched

CLAIM = "A batch of unequal lengths holds what its tokens need, and reads no padding"

HELD_OVER_IDEAL = 1.1
"""Goal: allocated bytes over the bytes of the KV needed."""
GOALS = {(2_048, 64, 7): 4.0, (3_000, 100, 7): 5.0}
"""Goals: decode speed over mlx-lm's, by `Shape`."""

Shape = tuple[int, int, int]
"""Tokens of the long prompt, tokens of the short ones, and their number."""


@dataclass(frozen=True, slots=True)
class RaggedLoad:
    """Sizes in tokens and sequences."""

    model: ModelChoice = ModelChoice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    shapes: tuple[Shape, ...] = tuple(GOALS)
    decode_tokens: int = 32
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5

    def task(self, model: BenchModel, shape: Shape) -> Task:
        """Return one long prompt and several short ones, without a shared prefix."""
        long_tokens, short_tokens, count = shape
        short = [model.prompt(short_tokens, seed=1 + i) for i in range(count)]
        return Task(
            [model.prompt(long_tokens, seed=0), *short],
            self.decode_tokens,
            prefill_chunk=self.engine.prefill_chunk,
        )


def measure(load: RaggedLoad) -> Report:
    """Run every shape on both sides in turn."""
    model = bench_model(load.model, load.llama)
    comparisons = {shape: _measure_one(load, model, shape) for shape in load.shapes}
    return report(load, model, comparisons)


def _measure_one(load: RaggedLoad, model: BenchModel, shape: Shape) -> Comparison:
    batch_size = 1 + shape[2]
    makers: dict[str, MakeSide] = {
        OURS: lambda: Ours(model, batch_size, load.engine),
        RIVAL: lambda: Batched(model.model, batch_size),
    }
    return compare(makers, load.task(model, shape), load.rounds, alike=load.engine.exact)


def held_over_ideal(comparison: Comparison, side: str, token_bytes: int) -> tuple[float, float]:
    """Return the worst ratio of allocated to needed KV bytes: while all decode, and overall.

    Needed are `token_bytes` for each token so far.
    """
    moments = [m for m in comparison.watched[side][0].moments if m.needed_tokens]
    ratio = [moment.held_bytes / (token_bytes * moment.needed_tokens) for moment in moments]
    return (
        max(x for x, moment in zip(ratio, moments, strict=True) if moment.decoding),
        max(ratio),
    )


def _figures(comparison: Comparison, side: str, token_bytes: int) -> dict[str, Any]:
    decoding, ever = held_over_ideal(comparison, side, token_bytes)
    return {
        **figures(comparison, side),
        "held_over_ideal_decoding": round(decoding, 3),
        "held_over_ideal_ever": round(ever, 3),
    }


def report(load: RaggedLoad, model: BenchModel, comparisons: Mapping[Shape, Comparison]) -> Report:
    """Compare both sides, and the allocated bytes with those needed."""
    token_bytes = model.kv_bytes_per_token
    sides = {
        side: {name(shape): _figures(of, side, token_bytes) for shape, of in comparisons.items()}
        for side in (OURS, RIVAL)
    }
    ratio = {name(shape): ratios(of) for shape, of in comparisons.items()}
    lines = [
        line
        for shape in comparisons
        for line in _lines(
            name(shape),
            sides[OURS][name(shape)],
            sides[RIVAL][name(shape)],
            ratio[name(shape)],
            GOALS.get(shape),
        )
    ]
    return Report(
        name="ragged",
        claim=CLAIM,
        rival=RIVAL,
        penstock=sides[OURS],
        rival_figures=sides[RIVAL],
        ratio=least(ratio),
        goal={
            "held_over_ideal": HELD_OVER_IDEAL,
            "decode_speed": {name(shape): goal for shape, goal in GOALS.items()},
        },
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "model": model.as_object(),
            "runs": {name(shape): of.as_object() for shape, of in comparisons.items()},
        },
        dtype=model.dtype,
    )


def name(shape: Shape) -> str:
    """Format a shape: `2,048 + 7 x 64`."""
    long_tokens, short_tokens, count = shape
    return f"{long_tokens:,} + {count} x {short_tokens:,}"


def _lines(
    shape: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    ratio: Mapping[str, float],
    goal: float | None,
) -> list[Line]:
    key = "decode_tokens_per_second"
    lines = [
        ratio_line(
            f"{shape}: decode, tokens/s",
            (speed(ours[key]), speed(theirs[key])),
            ratio["decode_speed"],
            goal,
        )
    ]
    for text, key in (
        ("held / needed, generating", "held_over_ideal_decoding"),
        ("held / needed, at every moment", "held_over_ideal_ever"),
    ):
        lines.append(
            Line(
                f"{shape}: {text}",
                f"{ours[key]:.2f}",
                f"{theirs[key]:.2f}",
                f"<= {HELD_OVER_IDEAL:g}",
                ours[key] <= HELD_OVER_IDEAL,
            )
        )
    for text, key, times in (
        ("KV held", "held_bytes", "held_memory"),
        ("peak", "peak_bytes", "peak_memory"),
    ):
        texts = size(ours[key]), size(theirs[key])
        lines.append(ratio_line(f"{shape}: {text}", texts, ratio[times], None))
    return lines
