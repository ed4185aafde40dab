"""Comparison of sides: interleaved runs, memory tracking, and goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from penstock.plurals import counted
from penstock_bench.engine_runs import Driving, Run, RunMoment, Task, clean, run_side
from penstock_bench.engine_sides import OURS, RIVAL, MakeSide, Side
from penstock_bench.report import Line

BLOCK_STEPS = 8
"""Steps timed at a time when sides decode in turn."""
STRAY_BYTES = 1 << 20
"""Bytes that a closed side may leave behind; more would be attributed to the next side."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of one task, by side."""

    task: Task
    timed: Mapping[str, Sequence[Run]]
    watched: Mapping[str, Sequence[Run]]
    """Runs with memory tracking, on separate engines; one per repeat of the task."""

    def median(self, side: str, name: str) -> float:
        """Return the median of a figure of `Run` over the timed runs."""
        return float(statistics.median(getattr(run, name) for run in self.timed[side]))

    def as_object(self) -> dict[str, Any]:
        return {
            side: {
                "timed": [_recorded(run) for run in runs],
                "watched": [_recorded(run) for run in self.watched[side]],
            }
            for side, runs in self.timed.items()
        }


def _recorded(run: Run) -> dict[str, Any]:
    stored = asdict(run)
    stored["step_seconds"] = [round(seconds, 6) for seconds in run.step_seconds]
    columns = list(RunMoment.__dataclass_fields__)
    stored["moments"] = [[getattr(moment, name) for name in columns] for moment in run.moments]
    return {**stored, "moment_columns": columns}


def compare(
    makers: Mapping[str, MakeSide], task: Task, rounds: int, *, alike: bool = True
) -> Comparison:
    """Run each side once with memory tracking, as a warm-up, then time them in turn.

    During memory tracking MLX keeps no freed buffers and evaluates almost nothing ahead, so only
    needed bytes are counted, even on a busy machine.

    Args:
        makers: constructors of the sides.
        task: the task of all sides.
        rounds: number of timed rounds.
        alike: whether all sides generate the same tokens; otherwise each only repeats its own.

    Raises:
        AssertionError: generated tokens differ, or a side leaked bytes that would be attributed to
            another.
    """
    base_bytes = clean()
    watched = _watched(makers, task, base_bytes)
    timed: dict[str, list[Run]] = {side: [] for side in makers}
    for turn in range(rounds):
        for side in list(makers) if turn % 2 == 0 else list(makers)[::-1]:
            timed[side] += run_side(makers[side], task)
            _check_base(side, base_bytes)
    return _found(task, timed, watched, alike=alike)


def compare_in_turn(
    makers: Mapping[str, MakeSide], task: Task, rounds: int, *, alike: bool = True
) -> Comparison:
    """Track memory as `compare` does, then let all sides decode in turn, a few steps at a time.

    A short disturbance of the machine slows all sides.

    The single timed run of a side has the steps of all rounds. Its peak and its seconds are
    measured on its prompts. MLX's limit of freed buffers is the engine's while an engine works,
    else the default.

    Args:
        makers: constructors of the sides.
        task: without `known` tokens, and without repeats.
        rounds: number of rounds.
        alike: whether all sides generate the same tokens.
    """
    base_bytes = clean()
    watched = _watched(makers, task, base_bytes)
    blocks = rounds * max(1, task.decode_tokens // BLOCK_STEPS)
    more = replace(task, decode_tokens=blocks * (BLOCK_STEPS + 1))
    sides: dict[str, Side] = {}
    driven: dict[str, Driving] = {}
    timed = {}
    usual = shared = _cache_limit()
    sharing = set()
    try:
        for side, make in makers.items():
            before_bytes, before = clean(), _cache_limit()
            sides[side] = make()
            if _cache_limit() != before:
                shared = _cache_limit()
                sharing.add(side)
            mx.set_cache_limit(shared if side in sharing else usual)
            driven[side] = Driving(sides[side], more, before_bytes)
            driven[side].read()
            sides[side].settle()
            timed[side] = [driven[side].end()]
        for block in range(blocks):
            for side in list(makers) if block % 2 == 0 else list(makers)[::-1]:
                mx.set_cache_limit(shared if side in sharing else usual)
                driven[side].resume()
                driven[side].decode(BLOCK_STEPS)
                sides[side].settle()
    finally:
        for engine in sides.values():
            engine.close()
        mx.set_cache_limit(usual)
    sides.clear()
    driven.clear()
    del engine
    _check_base("all together", base_bytes)
    return _found(task, timed, watched, alike=alike)


def _cache_limit() -> int:
    """Return MLX's cache limit; it can only be read by setting another one."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


def in_turn(comparison: Comparison, side: str, other: str) -> float:
    """Return the decode speed of a side over another's that decoded in turn with it.

    The ratio is the median over adjacent blocks of steps.
    """

    def blocks(name: str) -> list[float]:
        return [
            sum(run.step_seconds[first : first + BLOCK_STEPS])
            for run in comparison.timed[name]
            for first in range(0, len(run.step_seconds), BLOCK_STEPS)
        ]

    pairs = zip(blocks(side), blocks(other), strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


def _watched(makers: Mapping[str, MakeSide], task: Task, base_bytes: int) -> dict[str, list[Run]]:
    """Run each side with memory tracking."""
    watched = {}
    for side, make in makers.items():
        with nothing_ahead():
            watched[side] = run_side(partial(_waiting, make), task, watch=True)
        _check_base(side, base_bytes)
    return watched


def _waiting(make: MakeSide) -> Side:
    """Construct a side under `nothing_ahead`, whose limits an engine would replace."""
    side = make()
    _limit_to_nothing()
    return side


def _limit_to_nothing() -> tuple[int, int]:
    return mx.set_cache_limit(0), mx.set_memory_limit(0)


@contextmanager
def nothing_ahead() -> Iterator[None]:
    """Make MLX keep no freed buffers, and evaluate at most about ten operations ahead.

    By default it starts up to a hundred, each with its buffers, depending on the machine's load:
    peaks of the same step differed by a factor of 1.2. Beyond its memory limit MLX waits.
    """
    cache_limit, memory_limit = _limit_to_nothing()
    try:
        yield
    finally:
        mx.set_memory_limit(memory_limit)
        mx.set_cache_limit(cache_limit)


def _found(
    task: Task, timed: Mapping[str, list[Run]], watched: Mapping[str, list[Run]], *, alike: bool
) -> Comparison:
    """Collect runs, and check their tokens."""
    everything = {side: [*watched[side], *runs] for side, runs in timed.items()}
    for together in [everything] if alike else [{side: of} for side, of in everything.items()]:
        check_same_tokens(together)
    return Comparison(task, timed, watched)


def _check_base(side: str, base_bytes: int) -> None:
    stray = clean() - base_bytes
    if stray > STRAY_BYTES:
        raise AssertionError(f"{side} left {counted(stray, 'byte')} behind")


def check_same_tokens(runs: Mapping[str, Iterable[Run]]) -> None:
    """Raise AssertionError unless all runs generated the same tokens, up to the shortest."""
    flat = [(side, run) for side, of in runs.items() for run in of]
    (first_side, first), *others = flat
    for side, run in others:
        for place, (expected, got) in enumerate(zip(first.tokens, run.tokens, strict=True)):
            same = min(len(expected), len(got))
            if expected[:same] != got[:same]:
                index = next(i for i in range(same) if expected[i] != got[i])
                raise AssertionError(
                    f"sequence {place}, token {index}: {first_side} generated {expected[index]}, "
                    f"{side} {got[index]}"
                )


# ---------------------------------------------------------------- figures


def figures(comparison: Comparison, side: str) -> dict[str, Any]:
    """Return the medians of one side by name; bytes without the weights."""
    timed, watched = comparison.timed[side], comparison.watched[side][0]
    steps = [1e3 * seconds for run in timed for seconds in run.step_seconds]
    return {
        "prefill_seconds": round(comparison.median(side, "first_seconds"), 4),
        "prefill_tokens_per_second": round(comparison.median(side, "prefill_tokens_per_second"), 1),
        "decode_tokens_per_second": round(comparison.median(side, "decode_tokens_per_second"), 2),
        "median_step_ms": round(statistics.median(steps), 3),
        "worst_step_ms": round(max(steps), 3),
        "held_bytes": watched.held_bytes,
        "peak_bytes": round(comparison.median(side, "peak_bytes")),
        "cached_tokens": watched.cached_tokens,
    }


def ratios(comparison: Comparison) -> dict[str, float]:
    """Return how many times better penstock is, by the common names of ratios."""
    ours, theirs = figures(comparison, OURS), figures(comparison, RIVAL)

    def times(name: str, *, more_is_better: bool) -> float:
        better, worse = (ours, theirs) if more_is_better else (theirs, ours)
        return round(float(better[name] / worse[name]), 3)

    return {
        "decode_speed": times("decode_tokens_per_second", more_is_better=True),
        "prefill_speed": times("prefill_tokens_per_second", more_is_better=True),
        "peak_memory": times("peak_bytes", more_is_better=False),
        "held_memory": times("held_bytes", more_is_better=False),
    }


def least(of_shapes: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Return the smallest value of every ratio over all shapes, followed by all of them."""
    names = list(dict.fromkeys(name for of in of_shapes.values() for name in of))
    return {
        **{name: min(of[name] for of in of_shapes.values() if name in of) for name in names},
        **{f"{shape}: {name}": x for shape, of in of_shapes.items() for name, x in of.items()},
    }


def ratio_line(figure: str, texts: tuple[str, str], ratio: float, goal: float | None) -> Line:
    """Format both sides' figures, the ratio and its goal."""
    ours, theirs = texts
    figure = f"{figure} ({ratio:.2f}x)"
    if goal is None:
        return Line(figure, ours, theirs)
    return Line(figure, ours, theirs, f">= {goal:g}x", ratio >= goal)


def size(nbytes: float) -> str:
    """Format bytes as decimal megabytes."""
    return f"{nbytes / 1e6:,.1f} MB"


def speed(per_second: float) -> str:
    """Format tokens per second."""
    return f"{per_second:,.1f}"
