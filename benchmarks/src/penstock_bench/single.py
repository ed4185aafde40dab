"""`penstock bench single`: speed of sequences that share nothing, and the cost of a step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.errors import SettingError
from penstock.plurals import counted
from penstock_bench.comparison import (
    Comparison,
    check_same_tokens,
    compare,
    figures,
    least,
    ratio_line,
    ratios,
    size,
    speed,
)
from penstock_bench.engine_runs import Task, drive
from penstock_bench.engine_sides import OURS, RIVAL, EngineShape, MakeSide, Ours, Side
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import Batched, Solo

CLAIM = "Where nothing is shared the engine is no slower, and a step's cost is linear"

Shape = tuple[int, int]
"""Sequences, and prompt tokens of each."""

GOALS: dict[Shape, dict[str, float]] = {
    (1, 512): {"decode_speed": 1.05, "prefill_speed": 1.0},
    (1, 2_048): {"decode_speed": 1.3, "prefill_speed": 1.0},
    (1, 8_192): {"decode_speed": 1.3, "prefill_speed": 1.0},
    (8, 512): {"decode_speed": 1.1},
    (4, 2_048): {"decode_speed": 1.5},
}
"""Goals: speed over mlx-lm's."""
MACHINERY = 0.01
"""Goal: share of the time spent outside the model."""
STRAIGHT = 0.98
"""Goal: share of the variance of step times explained by a linear fit."""
CURVE_PREFILL_TOKENS = 512
"""Prefill chunk of mlx-lm for the curve, in tokens; not timed.

With chunks of 2,048 its scores at 32,768 tokens take 8 GB.
"""


@dataclass(frozen=True, slots=True)
class SingleLoad:
    """Sizes in tokens and sequences."""

    model: str = ModelChoice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    shapes: tuple[Shape, ...] = tuple(GOALS)
    decode_tokens: int = 32
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5
    curve_tokens: tuple[int, ...] = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 24_576, 32_768)
    """Context lengths of the curve, in tokens, ascending."""
    curve_steps: int = 16

    def curve_to(self, longest: int) -> tuple[int, ...]:
        """Return the lengths of a curve up to `longest` tokens; empty for 0.

        Raises:
            SettingError: only one length would be left.
        """
        lengths = sorted({count for count in self.curve_tokens if count < longest} | {longest})
        if longest and len(lengths) < 2:
            least = self.curve_tokens[0]
            raise SettingError(f"--longest {longest}: a curve ends above {least} tokens; 0 is none")
        return tuple(lengths) if longest else ()

    def task(self, model: BenchModel, shape: Shape) -> Task:
        """Return prompts without a shared prefix."""
        sequences, tokens = shape
        prompts = [model.prompt(tokens, seed=i) for i in range(sequences)]
        return Task(prompts, self.decode_tokens, prefill_chunk=self.engine.prefill_chunk)

    def ours(self, model: BenchModel, batch_size: int) -> Ours:
        """Construct our side."""
        return Ours(model, batch_size, self.engine)


@dataclass(frozen=True, slots=True)
class Curve:
    """Median milliseconds of a decode step, by context length."""

    tokens: Sequence[int]
    step_ms: Mapping[str, Sequence[float]]

    def straightness(self, side: str) -> float:
        """Return the share of the variance explained by a linear fit; 1 is a line."""
        return statistics.correlation(self.tokens, self.step_ms[side]) ** 2

    def figures(self, side: str) -> dict[str, Any]:
        """Return the figures of one side."""
        steps = zip(self.tokens, self.step_ms[side], strict=True)
        return {
            "step_ms": {str(tokens): round(ms, 3) for tokens, ms in steps},
            "straightness": round(self.straightness(side), 4),
        }


def measure(load: SingleLoad) -> Report:
    """Run every shape on both sides in turn, then the curve."""
    model = bench_model(load.model, load.llama)
    comparisons = {shape: _measure_one(load, model, shape) for shape in load.shapes}
    curve = measure_curve(load, model) if load.curve_tokens else None
    return report(load, model, comparisons, curve)


def _measure_one(load: SingleLoad, model: BenchModel, shape: Shape) -> Comparison:
    batch_size = shape[0]
    makers: dict[str, MakeSide] = {
        OURS: lambda: Ours(model, batch_size, load.engine),
        # One sequence needs no batch; mlx-lm's generate_step is its fastest way.
        RIVAL: lambda: Solo(model.model) if batch_size == 1 else Batched(model.model, batch_size),
    }
    return compare(
        makers, load.task(model, shape), load.rounds, alike=load.engine.exact and model.exact
    )


def _figures(comparison: Comparison, side: str) -> dict[str, Any]:
    """Return the figures of one side; for ours, with the engine's overhead."""
    medians = figures(comparison, side)
    if side == OURS:
        medians["machinery_share"] = round(comparison.median(OURS, "machinery_share"), 5)
    return medians


def measure_curve(load: SingleLoad, model: BenchModel) -> Curve:
    """Time steps at every length, both sides interleaved.

    Each length is cached first, starting from the previous one, so nothing is prefilled twice.
    """
    prompt = model.prompt(load.curve_tokens[-1], seed=0)
    sides: dict[str, Side] = {
        OURS: Ours(model, 1, load.engine),
        RIVAL: Solo(model.model, prefill_step_tokens=CURVE_PREFILL_TOKENS),
    }
    step_ms: dict[str, list[float]] = {side: [] for side in sides}
    for turn, tokens in enumerate(load.curve_tokens):
        read = prompt[: tokens - load.curve_steps // 2]  # half of the steps are beyond `tokens`
        task = Task([read], load.curve_steps, prefill_chunk=load.engine.prefill_chunk)
        runs = {}
        for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            sides[side].learn(read[:-1])
            runs[side] = drive(sides[side], task)
            step_ms[side].append(1e3 * statistics.median(runs[side].step_seconds))
        if load.engine.exact and model.exact:
            check_same_tokens({side: [run] for side, run in runs.items()})
    for engine in sides.values():
        engine.close()
    return Curve(load.curve_tokens, step_ms)


def report(
    load: SingleLoad,
    model: BenchModel,
    comparisons: Mapping[Shape, Comparison],
    curve: Curve | None,
) -> Report:
    """Compare both sides with each other and with the goals."""
    ratio = {name(shape): ratios(of) for shape, of in comparisons.items()}
    lines = [line for shape, of in comparisons.items() for line in _lines(shape, of)]
    sides: dict[str, dict[str, Any]] = {
        side: {name(shape): _figures(of, side) for shape, of in comparisons.items()}
        for side in (OURS, RIVAL)
    }
    if curve is not None:
        lines.append(_curve_line(curve))
        for side, of in sides.items():
            of["curve"] = curve.figures(side)
    return Report(
        name="single",
        claim=CLAIM,
        rival=RIVAL,
        penstock=sides[OURS],
        rival_figures=sides[RIVAL],
        ratio=least(ratio),
        goal={
            **{name(shape): goal for shape, goal in GOALS.items()},
            "machinery_share": MACHINERY,
            "straightness": STRAIGHT,
        },
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(replace(load, model=model.name)),
            "model": model.as_object(),
            "runs": {name(shape): of.as_object() for shape, of in comparisons.items()},
            "curve": None if curve is None else asdict(curve),
        },
        dtype=model.dtype,
    )


def name(shape: Shape) -> str:
    """Format a shape: `8 x 512`."""
    return f"{shape[0]} x {shape[1]:,}"


def _lines(shape: Shape, comparison: Comparison) -> list[Line]:
    ours, theirs = _figures(comparison, OURS), _figures(comparison, RIVAL)
    ratio = ratios(comparison)
    goal = GOALS.get(shape, {})

    def line(figure: str, key: str, times: str) -> Line:
        write = size if key.endswith("bytes") else speed
        texts = write(ours[key]), write(theirs[key])
        return ratio_line(f"{name(shape)}: {figure}", texts, ratio[times], goal.get(times))

    share = ours["machinery_share"]
    return [
        line("decode, tokens/s", "decode_tokens_per_second", "decode_speed"),
        line("prefill, tokens/s", "prefill_tokens_per_second", "prefill_speed"),
        line("peak", "peak_bytes", "peak_memory"),
        Line(
            f"{name(shape)}: machinery, of all time",
            f"{100 * share:.2f} %",
            "",
            f"< {100 * MACHINERY:g} %",
            share < MACHINERY,
        ),
    ]


def _curve_line(curve: Curve) -> Line:
    straight = {side: curve.straightness(side) for side in (OURS, RIVAL)}
    return Line(
        f"a step's cost explained by a line, {curve.tokens[0]:,} to "
        f"{counted(curve.tokens[-1], 'token')}",
        f"{100 * straight[OURS]:.1f} %",
        f"{100 * straight[RIVAL]:.1f} %",
        f">= {100 * STRAIGHT:g} %",
        straight[OURS] >= STRAIGHT,
    )
