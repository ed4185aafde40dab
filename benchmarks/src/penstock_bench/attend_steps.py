"""`penstock bench attend`: decode steps with selected tokens against full attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.span_attention import AttentionWindow
from penstock.plugins.cpu import packed_reads
from penstock.plugins.cpu.ordered_attention import chunk_plan
from penstock.plurals import counted
from penstock_bench.engine_sides import EngineShape, Ours
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model, packed_model
from penstock_bench.report import Line, Notify, Report

CLAIM = "A step that reads a choice of a long sequence is quicker than one that reads all of it"
CHOICE, ALL = "a choice", "all tokens"
GOALS = {(1, 8_192): 2.0, (1, 32_768): 5.0, (8, 8_192): 1.0}
"""Goals: speedup over full attention, by (sequences, shared tokens)."""
STEPS = 8
"""Timed consecutive tokens of one side before the other side runs."""
NEAR_TOKENS = 64
"""Number of tokens that a prompt's positions attend to in packed layers."""
OWN_TOKENS = 8
"""Tokens at the end of each prompt that are not shared."""


@dataclass(frozen=True, slots=True)
class AttendLoad:
    """Workload: sequences, and sizes in tokens."""

    shapes: tuple[tuple[int, int], ...] = tuple(GOALS)
    attend_tokens: int = 1_024
    attend_rest: bool = False
    rounds: int = 5
    packed: bool = False
    """Whether the llama has 4 bits, multiplied by its codes, in place of float32."""
    llama: LlamaShape = field(default_factory=LlamaShape)


def measure(load: AttendLoad, notify: Notify = lambda *_: None) -> Report:
    """Time the steps of every shape, both sides interleaved."""
    model = packed_model(load.llama) if load.packed else bench_model(ModelChoice.RANDOM, load.llama)
    steps = {}
    for number, shape in enumerate(load.shapes):
        sequences, tokens = shape
        notify(f"{sequences} x {counted(tokens, 'token')}", number, len(load.shapes))
        steps[shape] = _measure_one(load, model, sequences, tokens)
    return report(load, model, steps)


def _measure_one(
    load: AttendLoad, model: BenchModel, sequences: int, tokens: int
) -> dict[str, list[float]]:
    choice = {"attend_tokens": load.attend_tokens, "attend_rest": load.attend_rest}
    sides = {
        ALL: Ours(model, sequences, EngineShape()),
        CHOICE: Ours(model, sequences, EngineShape(), **choice),
    }
    try:
        for side in sides.values():
            _read(side, model, sequences, tokens, 2 * (load.rounds + 1) * STEPS)
        step_ms: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(load.rounds):
            for name, side in sides.items():
                stop = len(step_ms[name]) + STEPS
                while len(step_ms[name]) < stop:
                    started = time.perf_counter()
                    by_row = max(1, len(side.step()) // sequences)
                    seconds = time.perf_counter() - started
                    step_ms[name] += [1e3 * seconds / by_row] * by_row
                del step_ms[name][stop:]  # as many of both sides
    finally:
        for side in sides.values():
            side.cancel()
            side.close()
    return step_ms


def _read(side: Ours, model: BenchModel, sequences: int, tokens: int, steps: int) -> None:
    """Prefill a shared prompt, and step until every sequence has decoded a few tokens."""
    shared = model.prompt(tokens - OWN_TOKENS, seed=0)
    with prompts_unattended():
        side.learn(shared)
        suffixes = [model.prompt(OWN_TOKENS, seed=number + 1) for number in range(sequences)]
        side.submit([[*shared, *suffix] for suffix in suffixes], 2 * steps)
        decoded: dict[int, int] = {}
        while len(decoded) < sequences or min(decoded.values()) < 3:
            for place, _ in side.step():
                decoded[place] = decoded.get(place, 0) + 1


@contextmanager
def prompts_unattended() -> Iterator[None]:
    """Replace the attention of prefill chunks by their own values; packed layers' by near tokens.

    Keys and values differ, but have the same size. Decode steps take as long, and a prompt of
    32,768 tokens takes seconds instead of minutes.
    """

    def own_values(
        self: ChunkReads, queries: mx.array, keys: mx.array, values: mx.array, *_: Any, **__: Any
    ) -> mx.array:
        return mx.repeat(values, queries.shape[1] // values.shape[1], axis=1)

    def near_tokens(reads: ChunkReads, tokens: int, _: AttentionWindow) -> Any:
        return chunk_plan(reads, tokens, AttentionWindow(NEAR_TOKENS))

    with (
        patch.object(ChunkReads, "attend", own_values),
        patch.object(packed_reads, "chunk_plan", near_tokens),
    ):
        yield


def report(
    load: AttendLoad, model: BenchModel, steps: dict[tuple[int, int], dict[str, list[float]]]
) -> Report:
    """Compare the medians."""
    lines, ours, theirs, ratios = [], {}, {}, {}
    for (sequences, tokens), step_ms in steps.items():
        name = f"{sequences} x {counted(tokens, 'token')}"
        ours[name], theirs[name] = (statistics.median(step_ms[side]) for side in (CHOICE, ALL))
        ratios[name], goal = theirs[name] / ours[name], GOALS.get((sequences, tokens))
        lines.append(Line(f"{name}: a step", f"{ours[name]:.1f} ms", f"{theirs[name]:.1f} ms"))
        met = None if goal is None else ratios[name] >= goal
        goal_text = "" if goal is None else f">= {goal:g}x"
        lines.append(Line(f"{name}: times as fast", f"{ratios[name]:.2f}x", "", goal_text, met))
    goals = {f"{b} x {counted(tokens, 'token')}": goal for (b, tokens), goal in GOALS.items()}
    return Report(
        name="attend",
        claim=CLAIM,
        rival=ALL,
        penstock={
            "step_ms": ours,
            "attend_tokens": load.attend_tokens,
            "attend_rest": load.attend_rest,
        },
        rival_figures={"step_ms": theirs},
        ratio=dict(ratios),
        goal=goals,
        met=all(ratio >= goals.get(name, 0) for name, ratio in ratios.items()),
        lines=lines,
        raw={
            "load": asdict(load),
            "model": model.as_object(),
            "step_ms": [
                {"sequences": b, "tokens": tokens, **step_ms}
                for (b, tokens), step_ms in steps.items()
            ],
        },
        dtype=model.dtype,
    )
