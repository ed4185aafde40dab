"""Encode and dequantize KV piece by piece, in parallel lanes.

The working memory is that of one piece per lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded, Cut
from penstock.kv.columns import Side

_Part = TypeVar("_Part")
PIECE_TOKENS = 128
"""Tokens per piece for the codec that needs most memory; others have larger pieces accordingly."""
PIECE_STEP = 64
"""Divisor of piece sizes, which is a multiple of every codec's span."""


def placed(parts: Sequence[Side], count: int, dtype: mx.Dtype, ops: CodeOps) -> Side:
    """Copy consecutive parts, dequantized to `dtype`, into `count` new columns; evaluated."""
    if not any(isinstance(part, Coded) for part in parts):
        return col.laid([(0, column, part) for column, part in col.spread(0, parts)], 1, count)
    return dequantized(
        [(0, column, part) for column, part in col.spread(0, parts)], 1, count, dtype, ops
    )


def dequantized(
    parts: Sequence[tuple[int, int, Side]],
    rows: int,
    count: int,
    dtype: mx.Dtype,
    ops: CodeOps,
) -> mx.array:
    """Copy parts, each (row, column, side), into a new array of rows x count; evaluated."""
    result: Side | None = None
    for row, column, part in parts:
        end = col.columns(part)
        starts, step = range(1), end
        if isinstance(part, Coded):
            step = _piece_tokens(part.codec)
            starts = range(0, end, step)
        for cuts in _in_lanes([(start, min(start + step, end)) for start in starts], ops.lanes):
            pieces = []
            for number, (start, stop) in enumerate(cuts):
                piece = col.take(part, start, stop)
                with ops.lane(number):
                    pieces.append(
                        piece.dequantize(ops).astype(dtype) if isinstance(piece, Coded) else piece
                    )
            for (start, _), piece in zip(cuts, pieces, strict=True):
                result = col.blank(piece, count, rows) if result is None else result
                result = col.write(result, column + start, piece, row)
            assert isinstance(result, mx.array)
            mx.eval(result)
    assert isinstance(result, mx.array)
    return result


@dataclass(frozen=True, slots=True)
class CodeBuffers:
    """Buffers for the codes of one side, written in place; nothing else may reference them."""

    codec: Codec
    parts: list[mx.array]
    dim: int

    def put(self, number: int, part: mx.array, head: int, column: int) -> None:
        written = col.write(self.parts[number], column, part, head=head)
        assert isinstance(written, mx.array)
        self.parts[number] = written

    def coded(self) -> Coded:
        return Coded(self.codec, tuple(self.parts), self.dim)


def code_buffers(number: int, side: Side, codec: Codec | None, ops: CodeOps) -> CodeBuffers | None:
    """Allocate buffers for the codes of one side, on lane `number`; None if it stays as it is."""
    if codec is None or not isinstance(side, mx.array):
        return None
    batch, heads, tokens, dim = side.shape
    codec.token_bits(dim)
    whole = tokens % codec.span or codec.span  # raises an error for an incomplete span
    like = codec.encode(mx.zeros((batch, heads, whole, dim), side.dtype), ops)  # not evaluated
    with ops.lane(number):
        blank = col.blank(like, tokens)
    assert isinstance(blank, Coded)
    return CodeBuffers(codec, list(blank.parts), dim)


def encode(layer: tuple[Side, Side], into: Sequence[CodeBuffers | None], ops: CodeOps) -> None:
    """Encode keys and values into their buffers, piece by piece in all lanes.

    A lane starts a piece when the arrays of the previous one have been freed. The last pieces may
    still be running on return.
    """
    sides, pieces = {}, []
    for number, (side, buffers) in enumerate(zip(layer, into, strict=True)):
        if buffers is not None and isinstance(side, mx.array):
            cuts = _cuts(side.shape, buffers.codec)
            sides[number] = buffers, buffers.codec.encode_by(cuts, side, buffers.put, ops)
            pieces += [(place, number) for place in range(len(cuts))]
    for lane_pieces in _in_lanes(sorted(pieces), ops.lanes):  # alternating between the sides
        numbers = [number for _, number in lane_pieces]
        for place, number in enumerate(numbers):
            with ops.lane(place):
                next(sides[number][1])
        for number in dict.fromkeys(numbers):
            # If fewer pieces than lanes are left, earlier pieces of the side may be in any lane.
            for place in range(ops.lanes):
                if len(numbers) < ops.lanes or numbers[place] == number:
                    ops.settle(place)
            mx.async_eval(sides[number][0].parts)  # type: ignore[no-untyped-call]


def _piece_tokens(codec: Codec) -> int:
    """Return the tokens per piece, which is larger for codecs that need less memory per token."""
    tokens = int(PIECE_TOKENS * Codec.buffers / codec.buffers)
    return tokens - tokens % PIECE_STEP


def _cuts(shape: Sequence[int], codec: Codec) -> list[Cut]:
    """Split an array (1, heads, tokens, dim) into pieces of some heads and tokens."""
    _, heads, tokens, _ = shape
    most_tokens = _piece_tokens(codec) * heads
    if tokens > most_tokens:
        step, per_cut = most_tokens - most_tokens % PIECE_STEP, 1
    else:
        step, per_cut = max(1, tokens), max(1, min(heads, most_tokens // max(1, tokens)))
    return [
        (slice(head, min(head + per_cut, heads)), slice(start, min(start + step, tokens)))
        for head in range(0, heads, per_cut)
        for start in range(0, tokens, step)
    ]


def _in_lanes(pieces: Sequence[_Part], lanes: int) -> Iterator[Sequence[_Part]]:
    for first in range(0, len(pieces), lanes):
        yield pieces[first : first + lanes]
