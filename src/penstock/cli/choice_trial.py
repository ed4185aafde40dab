"""Timing of decode steps of long sequences, with full and with selective attention.

All layers of a shape read the same random keys and values, so that they fit into memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.engine.model.runner import Runner
from penstock.engine.settings import kernels_off
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails

LENGTHS = 8_192, 32_768
STEPS = 5
"""Number of timed steps of each kind, alternating, after one untimed step."""
MOST_BYTES = 2**29
"""Maximum bytes of keys and values; lengths that need more are skipped."""


@dataclass(frozen=True, slots=True)
class ChoiceTiming:
    """Minimum times of a decode step of one sequence of `tokens` tokens, in milliseconds."""

    tokens: int
    all_ms: float
    choice_ms: float

    @property
    def pays(self) -> bool:
        return self.choice_ms < self.all_ms


def choice_timings(
    runner: Runner, attend_tokens: int, lengths: Sequence[int] = LENGTHS
) -> tuple[ChoiceTiming, ...]:
    """Time decode steps after `lengths` tokens; empty if selective attention is not supported."""
    if runner.fitness.way != "shared" or runner.is_recurrent or not runner.selectable_layers:
        return ()
    choice = Selection(
        attend_tokens, KeyIndex(runner.selectable_layers), compiled=not kernels_off()
    )
    before = runner.selection
    try:
        return tuple(
            _timing(runner, choice, tokens)
            for tokens in lengths
            if sum(shape.nbytes for shape in set(runner.shapes)) * tokens <= MOST_BYTES
        )
    finally:
        runner.selection = before


def _timing(runner: Runner, choice: Selection, tokens: int) -> ChoiceTiming:
    row = DecodeRow((KVSpan(_segment(runner, choice, tokens), 0, tokens),), tokens, 0, 0)
    tails, times = Tails(1, 2, runner.shapes), dict[int, list[float]]()
    for _ in range(1 + STEPS):
        for number, read in enumerate((READ_ALL, choice)):
            runner.selection = read
            began = time.perf_counter()
            mx.eval(runner.decode([[1]], [row], tails).logits, tails.buffers())
            times.setdefault(number, []).append(1e3 * (time.perf_counter() - began))
    return ChoiceTiming(tokens, *(min(of[1:]) for of in times.values()))


def _segment(runner: Runner, choice: Selection, tokens: int) -> Segment:
    sides = {shape: _random(shape, tokens) for shape in set(runner.shapes)}
    first = {runner.shapes[layer]: layer for layer in choice.layers}
    index = {
        shape: choice.index.of(*sides[shape], layer, 0, runner.device)
        for shape, layer in first.items()
    }
    layers = tuple(sides[shape] for shape in runner.shapes)
    chosen = (
        index[shape] if layer in choice.layers else None
        for layer, shape in enumerate(runner.shapes)
    )
    return replace(Segment(layers, length=tokens), index=tuple(chosen))


def _random(shape: LayerShape, tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((1, shape.kv_heads, tokens, dim)).astype(shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    mx.eval(keys, values)
    return keys, values
