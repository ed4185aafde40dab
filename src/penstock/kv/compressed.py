"""Compressed layers, which pool every few tokens into one row, stored in columns of tokens.

DeepSeek 4.1 pools `ratio` tokens into one row, besides a short window. A row is split into `ratio`
parts, one per token, so that segments, blocks, files and the ledger only handle tokens:

    tokens    0    1    2    3  |  4    5    6    7  |  8    9
    columns  [   the first row ] [  the second row  ] [ nothing  ]      segments
    states                                              8, 9            an open group

Rows pooled during decode are kept in the states ("loose rows") until the block is full, because the
columns of their first tokens were stored before the row was complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import LayerState, RecurrentState
from penstock.kv.tails import LayerShape

POINTS = ("window", "pending_kv", "pending_gate")
"""State arrays of a compressed layer, by the model's names: its window, and keys and gates of the
incomplete group. In a layer's state the loose rows follow them."""
ROWS = ("compress_kv", "index_k")
"""Arrays that grow by one row per complete group, by the model's names."""


@dataclass(frozen=True, slots=True)
class Rows:
    name: str
    ratio: int
    width: int
    dtype: mx.Dtype
    state: int
    place: int
    """Index of the loose rows in the layer's state."""

    @property
    def shape(self) -> LayerShape:
        """Shape of one token's columns: keys and values each have a part of one half of the row."""
        share = -(-self.width // (2 * self.ratio))
        return LayerShape(1, share, share, self.dtype)

    def columns(self, rows: mx.array | None, tokens: int) -> tuple[mx.array, mx.array]:
        share = self.shape.key_dim
        if rows is None:
            nothing = mx.zeros((1, 1, tokens, share), self.dtype)
            return nothing, nothing
        half, width_tokens = share * self.ratio, rows.shape[1] * self.ratio
        rows = mx.pad(rows, [(0, 0), (0, 0), (0, 2 * half - self.width)])

        def side(numbers: mx.array) -> mx.array:
            columns = numbers.reshape(1, 1, width_tokens, share)
            return mx.pad(columns, [(0, 0), (0, 0), (0, tokens - width_tokens), (0, 0)])

        return side(rows[..., :half]), side(rows[..., half:])

    def rows(self, keys: mx.array, values: mx.array) -> mx.array:
        count = keys.shape[2] // self.ratio
        halves = [side.reshape(1, count, -1) for side in (keys, values)]
        return mx.concatenate(halves, axis=2)[..., : self.width]


class RowReads:
    """Rows of one layer in one step of a sequence: those of its spans, and new ones."""

    def __init__(
        self, rows: Rows, layer: int, parts: Sequence[KVSpan], position: int, *, chunk: bool
    ) -> None:
        """Initialize for a step; the new rows of a `chunk` are stored in the chunk's columns."""
        self.rows = rows
        self.layer = layer
        self._parts = parts
        self._count = position // rows.ratio
        self._chunk = chunk and position % rows.ratio == 0
        self._made: mx.array | None = None

    def every(self, loose: mx.array | None) -> mx.array | None:
        """Return all rows, (1, n, width): those in columns, then the loose ones; None if none.

        Args:
            loose: rows pooled during decode, from the layer's state, (1, m, width).
        """
        stop = (self._count - _length(loose)) * self.rows.ratio
        sides: tuple[list[mx.array], list[mx.array]] = ([], [])
        for part in self._parts:
            end = min(part.columns, stop - part.start)
            if end > 0:
                for pieces, side in zip(sides, part.segment.layers[self.layer], strict=True):
                    assert isinstance(side, mx.array)
                    pieces.append(side[:, :, :end])
        if not sides[0]:
            return loose
        keys, values = (mx.concatenate(pieces, axis=2) for pieces in sides)
        joined = self.rows.rows(keys, values)
        return joined if loose is None else mx.concatenate([joined, loose], axis=1)

    def leave(self, every: mx.array | None, loose: mx.array | None) -> mx.array | None:
        """Return the rows to keep as loose rows after the step, or None.

        Args:
            every: all rows after the step, (1, n, width).
            loose: loose rows before it.
        """
        if every is None:
            return None
        new = every[:, self._count - _length(loose) :]
        if not new.shape[1]:
            return None
        if self._chunk and loose is None:
            self._made = new
            return None
        return new

    def columns(self, tokens: int) -> tuple[mx.array, mx.array]:
        keys, values = self.rows.columns(self._made, tokens)
        return mx.contiguous(keys), mx.contiguous(values)


class CompressedReads:
    """Cache of one layer for one step of a sequence, with the interface of DeepSeek 4.1's cache."""

    def __init__(self, window_tokens: int, *inner: Any) -> None:
        *self._reads, kept = inner
        self.window_size = window_tokens
        self.offset = 0
        self.window, self.pending_kv, self.pending_gate, *self._loose = kept.cache
        self.compress_kv: mx.array | None = None
        self.index_k: mx.array | None = None
        for reads, loose in zip(self._reads, self._loose, strict=True):
            setattr(self, reads.rows.name, reads.every(loose))

    def update_window(self, kv: mx.array) -> mx.array:
        """Append the new tokens, (1, n, width), to the window; return both together."""
        window = kv if self.window is None else mx.concatenate([self.window, kv], axis=1)
        self.window = window[:, -self.window_size :]
        self.offset += kv.shape[1]
        mx.eval(window)  # as in ChunkReads: one layer at a time
        return window

    def leave(self) -> LayerState:
        loose = [
            reads.leave(getattr(self, reads.rows.name), before)
            for reads, before in zip(self._reads, self._loose, strict=True)
        ]
        points = (self.window, self.pending_kv, self.pending_gate)
        return (*(point if _length(point) else None for point in points), *loose)


@dataclass(frozen=True, slots=True)
class Compressed:
    window_tokens: int
    caches: tuple[Any, ...]

    def rebuild(self, *inner: Any) -> CompressedReads:
        return CompressedReads(self.window_tokens, *inner)


def completed(
    segment: Segment, state: RecurrentState, rows: Mapping[int, Rows]
) -> tuple[Segment, RecurrentState]:
    """Move the loose rows of a state into the last columns of its segment; evaluated."""
    layers, states = list(segment.layers), [list(layer_state) for layer_state in state.row_states()]
    for layer, layer_rows in rows.items():
        loose = states[layer_rows.state][layer_rows.place]
        if loose is None:
            continue
        states[layer_rows.state][layer_rows.place] = None
        count = loose.shape[1] * layer_rows.ratio
        behind = segment.tokens - count
        if behind < 0:
            raise AssertionError(f"{loose.shape[1]} loose rows of {segment.tokens} tokens")
        new_keys, new_values = layer_rows.columns(loose, count)
        keys, values = (col.take(side, 0, behind) for side in segment.layers[layer])
        layers[layer] = col.join(keys, new_keys), col.join(values, new_values)
    mx.eval([col.arrays(*layer) for layer in layers])
    return replace(segment, layers=tuple(layers)), RecurrentState(
        tuple(map(tuple, states)), exclusive=state.exclusive
    )


def _length(rows: mx.array | None) -> int:
    return 0 if rows is None else rows.shape[1]
