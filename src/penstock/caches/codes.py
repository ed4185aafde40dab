"""Blocks of one sequence, which are encoded by a codec when they are appended."""

from __future__ import annotations

import mlx.core as mx

from penstock.caches.growing import Growing
from penstock.errors import SettingError
from penstock.kv import columns as col
from penstock.kv.code_pieces import PIECE_TOKENS
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.columns import Side

BLOCK_TOKENS = 64
"""Number of tokens per block, a multiple of each codec's span."""


class Codes(Growing):
    """Quantized KV of one sequence: at most `max_columns` tokens; the first `kept` stay."""

    step = BLOCK_TOKENS

    def __init__(
        self, scheme: Scheme, capacity: int | None, max_columns: int | None, kept: int
    ) -> None:
        super().__init__(capacity)
        self.scheme, self.max_columns, self.kept = scheme, max_columns, kept

    @property
    def span(self) -> int:
        return max((codec.span for codec in self.scheme.codecs), default=1)

    def append(self, keys: mx.array, values: mx.array, ops: CodeOps) -> None:
        """Encode and append blocks, `PIECE_TOKENS` tokens at a time; evaluated."""
        tokens = keys.shape[2]
        size = (
            PIECE_TOKENS
            if self.max_columns is None
            else min(PIECE_TOKENS, self.max_columns - self.kept)
        )
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            piece = keys[:, :, start:stop], values[:, :, start:stop]
            codecs = self.scheme.keys, self.scheme.values
            sides = [encoded(side, codec, ops) for side, codec in zip(piece, codecs, strict=True)]
            new = sides[0], sides[1]
            if self.max_columns is not None:
                self._drop(self.offset + stop - start - self.max_columns)
            self.put(new, self.offset + tokens - start)

    def put(self, new: tuple[Side, Side], needed: int) -> None:
        self._make_room(min(needed, self.max_columns or needed), self.offset, new)
        self._write(self.offset, new)
        self.offset += col.columns(new[0])
        mx.eval(col.arrays(self.keys, self.values))

    def _drop(self, count: int) -> None:
        """Drop the oldest `count` columns that are not kept."""
        if count <= 0:
            return
        for name in ("keys", "values"):
            side = getattr(self, name)
            rest = col.copied(col.take(side, self.kept + count, self.offset))
            setattr(self, name, col.write(side, self.kept, rest))
            mx.eval(col.arrays(getattr(self, name)))
        self.offset -= count

    def _room_for(self, needed: int, allocated: int) -> int:
        if self.max_columns is not None and self._capacity is None:
            return self.max_columns
        room = super()._room_for(needed, allocated)
        return room if self.max_columns is None else min(self.max_columns, room)


def encoded(side: mx.array, codec: Codec | None, ops: CodeOps) -> Side:
    """Encode a side, evaluated; return it raw without a codec. SettingError if values overflow."""
    if codec is None:
        return side
    coded = codec.encode(side, ops)
    mx.eval(coded.parts)
    if not bool(coded.is_finite()):
        raise SettingError(
            f"{codec.name} cannot store values as large as {float(mx.abs(side).max()):.3g}: its "
            f"scales are float16; leave this layer in full precision"
        )
    return coded


def whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def dim_of(side: Side) -> int:
    return side.dim if isinstance(side, Coded) else col.arrays(side)[0].shape[3]
