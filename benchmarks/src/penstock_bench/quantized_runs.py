"""`penstock bench quantized`: peak memory and decode speed with quantized KV.

Every ratio is quantized over full precision, on the same engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.plurals import counted
from penstock_bench.comparison import Comparison, compare_in_turn, figures, in_turn, size, speed
from penstock_bench.engine_runs import Task
from penstock_bench.engine_sides import RIVAL, EngineShape, MakeSide, Ours
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import Solo

CLAIM = "Held in fewer bits, a run takes less memory at its peak too, and decodes as fast"
RAW = "raw"
RIVAL_BITS = 4
RIVAL_CODED = f"{RIVAL_BITS} bits"
"""Name of mlx-lm's quantized cache."""
DECODE_SPEED = 0.9
"""Goal: decode speed over full precision, at `DECODE_TOKENS` tokens."""
DECODE_TOKENS = 4_096
PEAK_MEMORY = 1.03
"""Goal: peak memory of full precision over quantized, at every length.

In full precision two runs have equal peaks; quantized ones differ by the buffers of about ten
operations, which is visible only for the smallest models.
"""


@dataclass(frozen=True, slots=True)
class QuantizedLoad:
    """Sizes in tokens."""

    codec: str
    model: ModelChoice = ModelChoice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    """Prompt lengths, in tokens."""
    decode_tokens: int = 32
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5

    def makers(self, model: BenchModel) -> dict[str, MakeSide]:
        """Return the constructors of all sides: ours and mlx-lm's, raw and quantized."""
        coded = replace(self.engine, kv_cache_quantization=self.codec)
        return {
            RAW: lambda: Ours(model, 1, self.engine),
            self.codec: lambda: Ours(model, 1, coded, kv_cache_quantize_when="active"),
            RIVAL: lambda: Solo(model.model),
            f"{RIVAL} {RIVAL_CODED}": lambda: Solo(model.model, kv_bits=RIVAL_BITS),
        }


def measure(load: QuantizedLoad) -> Report:
    """Run every length on all sides, decoding in turn."""
    model = bench_model(load.model, load.llama)
    comparisons = {}
    for tokens in load.lengths:
        task = Task([model.prompt(tokens, seed=0)], load.decode_tokens)
        comparisons[tokens] = compare_in_turn(load.makers(model), task, load.rounds, alike=False)
    return report(load, model, comparisons)


def report(load: QuantizedLoad, model: BenchModel, comparisons: Mapping[int, Comparison]) -> Report:
    """Compare quantized with full precision, ours and mlx-lm's."""
    ours = {tokens: _pair(of, RAW, load.codec) for tokens, of in comparisons.items()}
    coded = f"{RIVAL} {RIVAL_CODED}"
    theirs = {tokens: _pair(of, RIVAL, coded) for tokens, of in comparisons.items()}
    lines = [line for tokens in ours for line in _lines(tokens, ours[tokens], theirs[tokens])]
    ratio: dict[str, float | None] = {}
    for tokens, pair in ours.items():
        for name, times in _ratios(pair).items():
            ratio[f"{tokens}: {name}"] = times
    for name in ("decode_speed", "held_memory", "peak_memory"):
        ratio[name] = min(_ratios(pair)[name] for pair in ours.values())
    return Report(
        name="quantized",
        claim=f"{CLAIM}: raw > {load.codec}; {RIVAL}: raw > {RIVAL_CODED}",
        rival=RIVAL,
        penstock={str(tokens): pair for tokens, pair in ours.items()},
        rival_figures={str(tokens): pair for tokens, pair in theirs.items()},
        ratio=ratio,
        goal={"peak_memory": PEAK_MEMORY, f"{DECODE_TOKENS}: decode_speed": DECODE_SPEED},
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "model": model.as_object(),
            "runs": {str(tokens): of.as_object() for tokens, of in comparisons.items()},
        },
        dtype=model.dtype,
    )


Pair = dict[str, dict[str, Any]]
"""Figures of raw and quantized, in this order."""


def _pair(comparison: Comparison, raw: str, coded: str) -> Pair:
    """Return the figures of both, with the quantized speed relative to steps in turn with raw.

    Whole runs are not comparable in speed if the machine was disturbed. Peaks are of whole runs.
    """
    pair = {
        side: {**figures(comparison, side), "peak_bytes": _peak(comparison, side)}
        for side in (raw, coded)
    }
    pair[coded]["decode_speed"] = round(in_turn(comparison, coded, raw), 3)
    return pair


def _peak(comparison: Comparison, side: str) -> int:
    return max(run.peak_bytes for run in comparison.watched[side])


def _ratios(pair: Pair) -> dict[str, float]:
    """Return how many times better quantized is than full precision."""
    raw, coded = pair.values()

    def times(better: float, worse: float) -> float:
        return round(better / worse, 3)

    return {
        "decode_speed": coded["decode_speed"],
        "held_memory": times(raw["held_bytes"], coded["held_bytes"]),
        "peak_memory": times(raw["peak_bytes"], coded["peak_bytes"]),
    }


def _lines(tokens: int, ours: Pair, theirs: Pair) -> list[Line]:
    def text(pair: Pair, key: str, name: str) -> str:
        write = size if key.endswith("bytes") else speed
        raw, coded = (write(form[key]) for form in pair.values())
        return f"{raw} > {coded} ({_ratios(pair)[name]:.2f}x)"

    def line(figure: str, key: str, name: str, goal: str = "", met: bool | None = None) -> Line:
        heading = f"{counted(tokens, 'token')}: {figure}"
        return Line(heading, text(ours, key, name), text(theirs, key, name), goal, met)

    ratio = _ratios(ours)
    goal, met = "", None
    if tokens == DECODE_TOKENS:
        goal, met = f">= {DECODE_SPEED:g}x", ratio["decode_speed"] >= DECODE_SPEED
    less = ratio["peak_memory"] >= PEAK_MEMORY
    return [
        line("peak", "peak_bytes", "peak_memory", f">= {PEAK_MEMORY:g}x", less),
        line("held", "held_bytes", "held_memory"),
        line("decode, tokens/s", "decode_tokens_per_second", "decode_speed", goal, met),
    ]
