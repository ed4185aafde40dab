"""Encode and dequantize keys and values piece by piece, in all lanes.

What takes memory beside the result is one piece of each lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from penstock.kv import backend
from penstock.kv import columns as col
from penstock.kv.codecs import Codec, Coded, Cut
from penstock.kv.columns import Side

_Part = TypeVar("_Part")
PIECE_TOKENS = 128
"""Encoded or dequantized at a time in each lane, by codecs that take most memory for it; by others
as many more as take no more."""
PIECE_STEP = 64
"""A multiple of every codec's span."""


def placed(parts: Sequence[Side], count: int, dtype: mx.Dtype) -> Side:
    """Copy consecutive parts into one new buffer of `count` columns; evaluated.

    Codes are dequantized to `dtype`, some tokens at a time.
    """
    if not any(isinstance(part, Coded) for part in parts):
        return col.laid([(0, at, part) for at, part in col.spread(0, parts)], 1, count)
    return dequantized([(0, at, part) for at, part in col.spread(0, parts)], 1, count, dtype)


def dequantized(
    parts: Sequence[tuple[int, int, Side]], rows: int, count: int, dtype: mx.Dtype
) -> mx.array:
    """Copy parts, each (row, column, side), into a new array of rows x count; evaluated.

    Codes are dequantized, some tokens at a time.
    """
    wide: Side | None = None
    for row, at, part in parts:
        end = col.columns(part)
        starts, step = range(1), end
        if isinstance(part, Coded):
            step = _piece_tokens(part.codec)
            starts = range(0, end, step)
        for cuts in _in_lanes([(start, min(start + step, end)) for start in starts]):
            pieces = []
            for number, (start, stop) in enumerate(cuts):
                piece = col.take(part, start, stop)
                with backend.current().lane(number):
                    pieces.append(
                        piece.dequantize().astype(dtype) if isinstance(piece, Coded) else piece
                    )
            for (start, _), piece in zip(cuts, pieces, strict=True):
                wide = col.blank(piece, count, rows) if wide is None else wide
                wide = col.write(wide, at + start, piece, row)
            assert isinstance(wide, mx.array)
            mx.eval(wide)
    assert isinstance(wide, mx.array)
    return wide


@dataclass(frozen=True, slots=True)
class CodeBuffers:
    """Buffers for the codes of one side, written in place; nothing else refers to them."""

    codec: Codec
    parts: list[mx.array]
    dim: int

    def put(self, number: int, part: mx.array, head: int, column: int) -> None:
        """See `Codec.encode_by`."""
        written = col.write(self.parts[number], column, part, head=head)
        assert isinstance(written, mx.array)
        self.parts[number] = written

    def coded(self) -> Coded:
        """Return the keys and values that were put there."""
        return Coded(self.codec, tuple(self.parts), self.dim)


def code_buffers(number: int, side: Side, codec: Codec | None) -> CodeBuffers | None:
    """Return the buffers for the codes of a layer's first or second side, in a lane of its own.

    None if that side stays as it is.
    """
    if codec is None or not isinstance(side, mx.array):
        return None
    batch, heads, tokens, dim = side.shape
    codec.token_bits(dim)
    whole = tokens % codec.span or codec.span  # what is no whole span is refused
    like = codec.encode(mx.zeros((batch, heads, whole, dim), side.dtype))  # not computed
    with backend.current().lane(number):
        blank = col.blank(like, tokens)
    assert isinstance(blank, Coded)
    return CodeBuffers(codec, list(blank.parts), dim)


def encode(layer: tuple[Side, Side], into: Sequence[CodeBuffers | None]) -> None:
    """Encode into the targets, piece by piece in all lanes.

    In each lane a piece begins when the arrays of the last one are freed, and is put together
    before. The last pieces may still be computed.
    """
    device = backend.current()
    sides, pieces = {}, []
    for number, (side, buffers) in enumerate(zip(layer, into, strict=True)):
        if buffers is not None and isinstance(side, mx.array):
            cuts = _cuts(side.shape, buffers.codec)
            sides[number] = buffers, buffers.codec.encode_by(cuts, side, buffers.put)
            pieces += [(place, number) for place in range(len(cuts))]
    for lane_pieces in _in_lanes(sorted(pieces)):  # of both sides in turn
        numbers = [number for _, number in lane_pieces]
        for place, number in enumerate(numbers):
            with device.lane(place):
                next(sides[number][1])
        for number in dict.fromkeys(numbers):
            # A last piece is alone: of its side one may be in any lane.
            for place in range(device.lanes):
                if len(numbers) < device.lanes or numbers[place] == number:
                    device.settle(place)
            mx.async_eval(sides[number][0].parts)  # type: ignore[no-untyped-call]


def _piece_tokens(codec: Codec) -> int:
    """Return how many tokens are encoded or dequantized together.

    It is as many as keep within the bytes of the largest codec.
    """
    tokens = int(PIECE_TOKENS * Codec.buffers / codec.buffers)
    return tokens - tokens % PIECE_STEP


def _cuts(shape: Sequence[int], codec: Codec) -> list[Cut]:
    """Return the (heads, tokens) of the pieces of (1, heads, tokens, dim).

    A piece has as many numbers, at most, as `_piece_tokens` of all heads. It has as few heads as
    possible, so that its tokens are contiguous.
    """
    _, heads, tokens, _ = shape
    most = _piece_tokens(codec) * heads
    if tokens > most:
        step, per_cut = most - most % PIECE_STEP, 1
    else:
        step, per_cut = max(1, tokens), max(1, min(heads, most // max(1, tokens)))
    return [
        (slice(head, min(head + per_cut, heads)), slice(start, min(start + step, tokens)))
        for head in range(0, heads, per_cut)
        for start in range(0, tokens, step)
    ]


def _in_lanes(pieces: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """Yield as many pieces as there are lanes at a time."""
    lanes = backend.current().lanes
    for first in range(0, len(pieces), lanes):
        yield pieces[first : first + lanes]
