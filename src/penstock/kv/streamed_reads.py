"""Attention of tokens far into a prompt, which read the tokens before them piece by piece.

The columns are never joined. Results over the pieces are merged by the maximum and the sum of the
softmax. So only one piece of the keys and values in a cold tier is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import mlx.core as mx

from penstock.kv import attention, backend
from penstock.kv.attention import Partial
from penstock.kv.attention_plan import KVSpan
from penstock.kv.codecs.coded import Coded
from penstock.kv.joined_reads import SideData, read_sides
from penstock.kv.spilled_reads import wide_sides

STREAMED_TOKENS = 512
"""Tokens of a piece."""
Sides: TypeAlias = tuple[mx.array, mx.array]
"""Keys and values of a piece, (kv_heads, tokens, dim)."""


def attend_streamed(
    queries: mx.array,
    own: Sides,
    parts: Sequence[KVSpan],
    layer: int,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to all columns of the parts and to own ones: (1, heads, n, value_dim), float32.

    Args:
        queries: of the last of the own tokens, in base 2, (1, heads, n, dim).
        own: keys and values of the tokens behind the parts, (1, kv_heads, tokens, dim).
        parts: spans in front of them, each of which is seen whole.
        layer: number of the layer.
        sinks: scores of the heads without a value, in base 2, (heads,).
    """
    heads, n = queries.shape[1:3]
    kv_heads, tokens = own[0].shape[1:3]
    # As many queries as have the scores that any chunk computes at a time.
    step = max(1, backend.current().scores_at_once // (heads * STREAMED_TOKENS))
    slices = [
        _Queries(queries[:, :, at : at + step], tokens - n + at, kv_heads)
        for at in range(0, n, step)
    ]
    for keys, values in _pieces(parts, layer):
        for part in slices:
            part.read(keys, values)
    for at in range(0, tokens, STREAMED_TOKENS):
        keys, values = (side.squeeze(0)[:, at : at + STREAMED_TOKENS] for side in own)
        for part in slices:
            part.read(keys, values, at)
    sunk = None if sinks is None else sinks.reshape(kv_heads, -1, 1, 1)
    return mx.concatenate([part.result(sunk) for part in slices], axis=2)


class _Queries:
    """Some consecutive queries, and their results so far.

    Args:
        queries: in base 2, (1, heads, n, dim).
        at: number of the first of them among the own tokens.
        kv_heads: of the layer.
    """

    def __init__(self, queries: mx.array, at: int, kv_heads: int) -> None:
        self._at = at
        _, self._heads, self._count, _ = queries.shape
        self._groups = self._heads // kv_heads
        self._stacked = attention.grouped(queries, kv_heads)
        self._read: Partial | None = None

    def read(self, keys: mx.array, values: mx.array, own: int | None = None) -> None:
        """Read a piece; computed at once.

        Args:
            keys: (kv_heads, tokens, dim).
            values: of these keys.
            own: number of the piece's first token among the own ones, where it is of these.
        """
        seen = None
        if own is not None:
            if own >= self._at + self._count:
                return
            rows = mx.arange(self._at, self._at + self._count)[:, None]
            seen = mx.arange(own, own + keys.shape[1]) <= rows
            seen = mx.tile(seen, (self._groups, 1))
        part = backend.current().attend_piece(self._stacked, keys, values, seen)
        self._read = part if self._read is None else attention.together(self._read, part)
        mx.eval(self._read.top, self._read.total, self._read.mixed)

    def result(self, sunk: mx.array | None) -> mx.array:
        """Return the attention's result, (1, heads, n, value_dim), float32."""
        read = self._read
        assert read is not None
        shape = (-1, self._groups, self._count)
        split = Partial(
            *(x.reshape(*shape, x.shape[-1]) for x in (read.top, read.total, read.mixed))
        )
        return attention.merged([split], sunk).reshape(1, self._heads, self._count, -1)


def _pieces(parts: Sequence[KVSpan], layer: int) -> Iterator[Sides]:
    """Yield keys and values of the parts, so many tokens at a time."""
    for part in parts:
        for start in range(0, part.columns, STREAMED_TOKENS):
            stop = min(start + STREAMED_TOKENS, part.columns)
            (keys,), (values,) = read_sides([(part.segment, start, stop)], layer)
            if isinstance(keys, Coded) and isinstance(values, Coded):
                keys, values = (side.squeeze(0) for side in wide_sides(keys, values))
            yield _as_array(keys), _as_array(values)


def _as_array(side: SideData) -> mx.array:
    """Return keys or values as an array."""
    return side.dequantize().squeeze(0) if isinstance(side, Coded) else side
