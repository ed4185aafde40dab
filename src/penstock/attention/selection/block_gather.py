"""Gathering of the blocks that a row selected from its segments, in MLX's operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import mlx.core as mx
import numpy as np

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.selection import FIRST_TOKENS, Selection, pieces
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import TOKEN_AXIS, Coded
from penstock.kv.codecs.spilled import Spilled
from penstock.kv.columns import Side
from penstock.kv.segment import KVSpan


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """Blocks selected by a row, and the positions of their tokens."""

    blocks: mx.array
    """Block numbers counted from `FIRST_BLOCKS`, (kv_heads, count) uint32."""
    tokens: mx.array
    """Positions, (kv_heads, count * BLOCK_TOKENS) uint32."""

    @classmethod
    def of(cls, blocks: mx.array, positions: mx.array) -> BlockTokens:
        return cls(blocks, mx.take(positions, blocks, axis=0).flatten(1))

    def within(self, span: KVSpan, *, alone: bool) -> tuple[mx.array, mx.array | None]:
        """Return the tokens' columns in a span, and a mask of the tokens that it holds.

        The mask is None if it holds all. The columns of other tokens are arbitrary but valid.
        """
        columns = self.tokens - span.start if span.start else self.tokens  # may wrap around
        if alone:
            return columns, None
        return mx.minimum(columns, span.columns - 1), columns < span.columns


def block_positions(stop: int) -> mx.array:
    """Return the positions from `FIRST_TOKENS` to `stop - 1`, (blocks, BLOCK_TOKENS) uint32."""
    positions = mx.arange(FIRST_TOKENS, stop, dtype=mx.uint32)
    return mx.unflatten(positions, 0, (-1, BLOCK_TOKENS))


def selected_kv(
    selection: Selection,
    row: DecodeRow,
    read: BlockTokens,
    layer: int,
    tail: tuple[mx.array, mx.array],
    ops: CodeOps,
) -> tuple[mx.array, mx.array]:
    """Copy the KV that a row reads in one layer: first tokens, blocks, recent tokens, and the tail.

    Args:
        read: blocks selected by each KV head.
        tail: keys and values of the tail, (1, kv_heads, tokens, dim) each.

    Returns:
        Keys and values, (1, kv_heads, tokens, dim) each, not evaluated if no KV is spilled.
    """
    stop = selection.recent_start(row.position)
    first = pieces(row.parts, 0, FIRST_TOKENS)
    recent = pieces(row.parts, stop, row.position - row.tail)
    spans = [span for span in row.parts if span.start < stop and span.end > FIRST_TOKENS]
    places = [read.within(span, alone=len(spans) == 1) for span in spans]
    sides = []
    for number, own in enumerate(tail):

        def column(segment: object, number: int = number) -> Side:
            return segment.layers[layer][number]  # type: ignore[attr-defined, no-any-return]

        gathered: mx.array | None = None
        for span, (columns, inside) in zip(spans, places, strict=True):
            of_span = _gathered(column(span.segment), span, columns, read, ops)
            if gathered is None or inside is None:
                gathered = of_span
            else:
                gathered = mx.where(mx.expand_dims(inside, (0, -1)), of_span, gathered)
        assert gathered is not None
        parts = [
            *(_columns(column(segment), a, b, ops) for segment, a, b in first),
            gathered,
            *(_columns(column(segment), a, b, ops) for segment, a, b in recent),
        ]
        cast = (part if part.dtype == own.dtype else part.astype(own.dtype) for part in parts)
        sides.append(mx.concatenate([*cast, own], axis=TOKEN_AXIS))
    return sides[0], sides[1]


def _columns(side: Side, start: int, stop: int, ops: CodeOps) -> mx.array:
    """Return columns `start..stop - 1`, (1, kv_heads, columns, dim)."""
    if not isinstance(side, Coded):
        assert isinstance(side, mx.array)
        return side if stop - start == side.shape[TOKEN_AXIS] else side[:, :, start:stop]
    span = side.codec.span
    first, last = start // span * span, -(-stop // span) * span
    return side.take(first, last).dequantize(ops)[:, :, start - first : stop - first]


def _gathered(
    side: Side, span: KVSpan, columns: mx.array, read: BlockTokens, ops: CodeOps
) -> mx.array:
    """Copy the tokens at these columns of each head, (1, kv_heads, tokens, dim)."""
    if not isinstance(side, Coded):
        assert isinstance(side, mx.array)
        return _taken(side, columns)
    if isinstance(side.codec, Spilled):
        return _fetched(side, side.codec, span, read)
    if side.codec.span == 1:
        return _of_parts(side, lambda part: _taken(part, columns)).dequantize(ops)
    return _from_runs(side, span, columns, read, ops)


def _taken(part: mx.array, columns: mx.array) -> mx.array:
    """Take columns (kv_heads, n) of (1, kv_heads, columns, ...): (1, kv_heads, n, ...)."""
    axes = (0, *range(3, part.ndim))
    return mx.take_along_axis(part, mx.expand_dims(columns, axes), axis=TOKEN_AXIS)


def _of_parts(side: Coded, take: Callable[[mx.array], mx.array]) -> Coded:
    return Coded(side.codec, tuple(map(take, side.parts)), side.dim)


def _from_runs(
    side: Coded, span: KVSpan, columns: mx.array, read: BlockTokens, ops: CodeOps
) -> mx.array:
    """Dequantize the selected blocks for a codec that encodes runs of several tokens together."""
    size, count = side.codec.span, read.blocks.shape[1]
    apart = gcd(BLOCK_TOKENS, span.start, size)
    runs_each = max(-(-(begin + BLOCK_TOKENS) // size) for begin in range(0, size, apart))
    by_block = mx.unflatten(columns, 1, (count, BLOCK_TOKENS)).astype(mx.int32)
    begins = by_block[..., :1] // size
    runs = mx.minimum(begins + mx.arange(runs_each), side.parts[0].shape[TOKEN_AXIS] - 1).flatten(1)
    wide = _of_parts(side, lambda part: _taken(part, runs)).dequantize(ops)
    offsets = mx.arange(count)[:, None] * (runs_each * size)
    return _taken(wide, (by_block - begins * size + offsets).flatten(1))


def _fetched(side: Coded, codec: Spilled, span: KVSpan, read: BlockTokens) -> mx.array:
    """Copy blocks read from a tier; zeros for blocks of other spans."""
    blocks = np.asarray(read.blocks).astype(np.int64) + FIRST_BLOCKS - span.start // BLOCK_TOKENS
    heads, numbers = np.nonzero((blocks >= 0) & (blocks < span.columns // BLOCK_TOKENS))
    columns = blocks[heads, numbers].astype(np.int32)
    (raw,) = codec.reader.fetch([codec.blocks(side, heads.astype(np.int32), columns)])
    held = np.zeros((*blocks.shape, BLOCK_TOKENS * side.dim * codec.dtype.size), np.uint8)
    held[heads, numbers] = raw
    return mx.array(held).view(codec.dtype).reshape(1, len(blocks), -1, side.dim)
