"""Contiguous KV for models whose attention cannot read spans in place.

A model whose attention does not call `Reads.attend` gets a concatenated copy of the visible
columns, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import mlx.core as mx

from penstock.attention.attention_plan import visible_ranges
from penstock.attention.span_attention import AttentionWindow
from penstock.kv import columns as col
from penstock.kv.code_pieces import dequantized
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Coded
from penstock.kv.columns import Side
from penstock.kv.segment import ColumnRange, KVSpan, Segment
from penstock.kv.tails import Tails

SideData: TypeAlias = mx.array | Coded
"""Keys or values of consecutive columns of one sequence: (kv_heads, n, dim), or coded."""


def read_sides(
    pieces: Sequence[ColumnRange], layer: int, ops: CodeOps
) -> tuple[list[SideData], list[SideData]]:
    """Return the keys and values of column ranges, (kv_heads, columns, dim) each, or coded."""
    sides: tuple[list[SideData], list[SideData]] = ([], [])
    for segment, start, stop in pieces:
        if segment.missing:
            start, stop = segment.columns(layer, start, stop)
        keys, values = segment.layers[layer]
        sides[0].append(_held(keys, start, stop, ops))
        sides[1].append(_held(values, start, stop, ops))
    return sides


def _held(side: Side, start: int, stop: int, ops: CodeOps) -> SideData:
    """Return columns of a segment's side in the form that attention reads."""
    if isinstance(side, Coded):
        if start == 0 and stop == side.tokens:
            return side
        span = side.codec.span
        if start % span == 0 and stop % span == 0:
            return side.take(start, stop)
        first, last = start // span * span, -(-stop // span) * span
        return side.take(first, last).dequantize(ops).squeeze(0)[:, start - first : stop - first]
    assert isinstance(side, mx.array)
    # squeeze makes a view where an index of 0 would copy
    whole = start == 0 and stop == side.shape[2]
    return (side if whole else side[:, :, start:stop]).squeeze(0)


def _as_arrays(sides: Sequence[SideData], dtype: mx.Dtype, ops: CodeOps) -> list[mx.array]:
    """Return sides as arrays (1, kv_heads, columns, dim)."""
    return [
        (side.dequantize(ops) if isinstance(side, Coded) else side[None]).astype(dtype)
        for side in sides
    ]


def join_parts(
    parts: Sequence[KVSpan],
    layer: int,
    attention_window: AttentionWindow,
    position: int,
    new: tuple[mx.array, mx.array],
    ops: CodeOps,
    *,
    lazily: bool = False,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Concatenate the visible cached columns with the new ones; return keys, values and positions.

    The positions are None if they are 0 .. m - 1. Codes are dequantized and evaluated piece by
    piece to limit working memory; with `lazily` nothing is evaluated, which costs nothing if the
    result is not used.
    """
    nearest = attention_window.starts_at(position)
    pieces: list[ColumnRange] = []
    spans: list[tuple[int, int]] = []
    for part in parts:
        for start, stop in visible_ranges(part, nearest, attention_window.keep):
            pieces += _aligned(part.segment, layer, start - part.start, stop - part.start)
            spans.append((start, stop))
    keys, values = new
    if not pieces:
        begins = parts[-1].end if parts else position
        return keys, values, _positions([(begins, begins + keys.shape[2])])
    behind = parts[-1].end
    spans.append((behind, behind + keys.shape[2]))
    before = read_sides(pieces, layer, ops)
    joined = [_join(*sides, ops, lazily=lazily) for sides in zip(before, new, strict=True)]
    return joined[0], joined[1], _positions(spans)


def _aligned(segment: Segment, layer: int, start: int, stop: int) -> list[ColumnRange]:
    """Split columns so that all but the ends are aligned to the codecs' spans."""
    coded = (side for side in segment.layers[layer] if isinstance(side, Coded))
    span = max((side.codec.span for side in coded), default=1)
    first = min(stop, -(-start // span) * span)
    last = max(first, stop // span * span)
    cuts = ((start, first), (first, last), (last, stop))
    return [(segment, begin, end) for begin, end in cuts if begin < end]


def _join(before: Sequence[SideData], new: mx.array, ops: CodeOps, *, lazily: bool) -> mx.array:
    """Concatenate the cached columns with `new`, (1, kv_heads, columns, dim)."""
    if lazily or not any(isinstance(side, Coded) for side in before):
        return mx.concatenate([*_as_arrays(before, new.dtype, ops), new], axis=2)
    cached = (s if isinstance(s, Coded) else s[None].astype(new.dtype) for s in before)
    sides = [*cached, new]
    placed = [(0, start, side) for start, side in col.spread(0, sides)]
    return dequantized(placed, 1, sum(map(col.columns, sides)), new.dtype, ops)


def _positions(spans: Sequence[tuple[int, int]]) -> mx.array | None:
    """Return the positions of the spans' columns; None if they are 0 .. m - 1."""
    if spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans)):
        return None
    return mx.concatenate([mx.arange(start, stop) for start, stop in spans])


class JoinedReads:
    """Cache of one layer and sequence that returns contiguous KV.

    Implements the protocol of mlx-lm's plain cache; masks are arrays or "causal". Models with
    sparse attention also read and replace `keys` and `values`, here those of the new tokens only,
    so that they are evaluated.
    """

    def __init__(
        self,
        layer: int,
        attention_window: AttentionWindow,
        parts: Sequence[KVSpan],
        position: int,
        ops: CodeOps,
        tail: tuple[Tails, int, int] | None = None,
    ) -> None:
        """Initialize the cache; `tail` is (tails, slot, tokens) for decode, None for prefill."""
        self.layer = layer
        self.attention_window = attention_window
        self.parts = parts
        self.offset = position
        self.ops = ops
        self.tail = tail
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the KV of the new tokens, and return that of all visible tokens."""
        if self.tail is None:
            self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)
            mx.eval(self.keys, self.values)  # as in ChunkReads: one layer at a time
        else:
            tails, slot, used = self.tail
            tails.write_block(self.layer, slot, used, keys, values)
            self.keys, self.values = keys, values
        return self.keys_and_values()

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to what `update_and_fetch` returned, as `Reads.attend`."""
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    @property
    def start_position(self) -> int:
        """Position of the first column, as chunked attention expects it."""
        used = 0 if self.tail is None else self.tail[2]
        return min(
            self.attention_window.starts_at(self.offset), self.offset - used
        )  # a tail is read in full

    def maybe_trim_front(self) -> None:
        """Do nothing: invisible columns are never joined."""

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the last result of `update_and_fetch`, which later layers of some models reuse."""
        if self.tail is not None:
            (tails, slot, used), count = self.tail, 1 if self.keys is None else self.keys.shape[2]
            new = tails.read_block(self.layer, slot, 1, used + count)
        else:
            assert self.keys is not None and self.values is not None
            new = self.keys, self.values
        # Lazily, so that unused layers are never computed, and rows are computed together.
        return join_parts(
            self.parts, self.layer, self.attention_window, self.offset, new, self.ops, lazily=True
        )[:2]

    @property
    def state(self) -> tuple[mx.array, mx.array, int]:
        """Keys, values and offset, like mlx-lm's plain cache."""
        return (*self.keys_and_values(), self.offset)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of the new tokens over the columns returned by `update_and_fetch`."""
        attention_window = self.attention_window.within(window_size)
        used = 0 if self.tail is None else self.tail[2]
        begins = self.offset - used
        as_array = return_array and (n > 1 or window_size is not None)  # as mlx-lm's caches do
        if not as_array and attention_window.sees_all(self.offset + n - 1):
            return None if n == 1 else "causal"
        tail_seen = attention_window.starts_at(self.offset) <= max(begins, attention_window.keep)
        if not as_array and n == 1 and attention_window == self.attention_window and tail_seen:
            return None  # only visible columns were concatenated
        nearest = self.attention_window.starts_at(self.offset)
        spans = [
            s
            for part in self.parts
            for s in visible_ranges(part, nearest, self.attention_window.keep)
        ]
        spans.append((begins, self.offset + n))
        positions = mx.concatenate([mx.arange(start, stop) for start, stop in spans])
        return attention_window.mask(mx.arange(self.offset, self.offset + n), positions)

    def empty(self) -> bool:
        """Return whether there are no tokens before the new ones."""
        return self.offset == 0
