"""Reads of decode steps in layers that attend to a window, and to rows pooled from older tokens.

The inputs of the pools are cached, and read where they lie: a part of them is pooled at a time, or
what a few rows need is copied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.choosing_reads import ChoosingReads
from penstock.attention.chosen_tokens import (
    gathered,
    read_with_tail,
    seen_columns,
    visible_pieces,
    whole_blocks,
)

Pool: TypeAlias = Callable[[mx.array, mx.array, "mx.array | int"], mx.array]
"""Function of a model that pools keys and gates, (b, n, dim), to rows, (b, n / block, row_dim).

The third argument is the position of the first token, or an array of one for each of b sequences.
"""


@dataclass(frozen=True, slots=True)
class SeenInputs:
    """Inputs of the pools of a layer, or of its index, that one new token sees."""

    reads: ChoosingReads
    row: DecodeRow
    """Row of the new token; see `DecodeStep.new_tokens`."""

    def make_mask(self, n: int = 1, offset: object = 0) -> None:
        """Return None: the token sees all rows."""

    def pooled(self, pool: Pool, block: int, *, overlaps: bool) -> mx.array | None:
        """Return the rows of all whole blocks, (1, n, row_dim); None without any.

        Args:
            pool: pools consecutive inputs, the first as if no block were before it.
            block: number of tokens that make a row.
            overlaps: whether a row also depends on the block before.
        """
        rows, start = list[mx.array](), 0
        before: tuple[mx.array, mx.array] | None = None
        for keys, gates in whole_blocks(zip(*self._sides(), strict=True), block):
            if rows:  # what the last one computed is then freed
                keys, gates = mx.depends([keys, gates], rows[-1:])
            new = pool(keys, gates, start)
            if overlaps and before is not None:
                first_keys, first_gates = (
                    mx.concatenate([old, side[:, :block]], axis=1)
                    for old, side in zip(before, (keys, gates), strict=True)
                )
                first = pool(first_keys, first_gates, start - block)
                new = mx.concatenate([first[:, 1:], new[:, 1:]], axis=1)
            before = keys[:, -block:], gates[:, -block:]
            rows.append(new)
            start += keys.shape[1]
        if not rows:
            return None
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    def chosen(self, pool: Pool, block: int, numbers: mx.array) -> mx.array:
        """Return the rows of ascending blocks, (1, k, row_dim), which overlap; see `pooled`.

        Only their inputs, and those of the blocks before them, are read.
        """
        first = numbers.astype(mx.int32)[:, None] * block
        columns = first + mx.arange(block, dtype=mx.int32)
        before = mx.maximum(columns - block, 0)
        starts = (first == 0)[:, :, None]
        pairs = []
        for side in self._sides():
            chosen, earlier = (
                mx.unflatten(gathered(side, places.flatten()).squeeze(0), 0, places.shape)
                for places in (columns, before)
            )
            pairs.append(mx.concatenate([mx.where(starts, chosen, earlier), chosen], axis=1))
        rows = pool(pairs[0], pairs[1], before[:, 0])
        return mx.where(starts[:, 0], rows[:, 0], rows[:, 1])[None]

    def _sides(self) -> tuple[list[mx.array], list[mx.array]]:
        reads = self.reads
        pieces = visible_pieces(self.row, reads.attention_window)
        return read_with_tail(reads.step, reads.layer, self.row, pieces)


def attend_with_rows(
    reads: ChoosingReads,
    queries: mx.array,
    scale: float,
    rows: Sequence[mx.array | None],
    sinks: mx.array,
) -> mx.array:
    """Attend to a layer's window and to pooled rows: (b, heads, n, dim) -> (b, heads, n, dim).

    Args:
        reads: cache of the window, with keys that are also its values.
        queries: queries of the new tokens.
        scale: factor of the scores.
        rows: rows that each new token reads, (1, k, dim), or None.
        sinks: attention sinks of the model, (heads,).
    """
    step, heads = reads.step, queries.shape[1]
    in_base_2 = span_attention.in_base_2(queries, scale)
    sunk = (sinks.astype(mx.float32) * span_attention.LOG2_E)[:, None]
    outputs = []
    for number, (row, pooled) in enumerate(zip(step.new_tokens, rows, strict=True)):
        index, token = divmod(number, step.width)
        stacked = span_attention.grouped(in_base_2[index : index + 1, :, token : token + 1], 1)
        parts, seen = _window(reads, step, row)
        if pooled is not None:
            parts.append(pooled.astype(parts[0].dtype))
            if seen is not None:
                seen = mx.concatenate([seen, mx.ones(pooled.shape[1], mx.bool_)])
        part = step.device.attend_decode(stacked, parts, parts, seen)
        outputs.append(span_attention.ungrouped(span_attention.merged([part], sunk), 1, heads))
    result = mx.concatenate(outputs)
    if step.width > 1:
        result = mx.unflatten(result.squeeze(2), 0, (-1, step.width)).swapaxes(1, 2)
    return result.astype(queries.dtype)


def _window(
    reads: ChoosingReads, step: DecodeStep, row: DecodeRow
) -> tuple[list[mx.array], mx.array | None]:
    """Return the keys that a new token may see, and which of them it does; None if all."""
    window = reads.attention_window
    pieces = visible_pieces(row, window)
    parts, _ = read_with_tail(step, reads.layer, row, pieces)
    return parts, seen_columns(row, sum(part.shape[1] for part in parts), window)
