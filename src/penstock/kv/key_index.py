"""Index of keys: the rotated key in two bits a number, by which tokens worth reading are found.

Two bits keep 88 % of the variance of normal numbers, where their signs keep 64 %. That ranks blocks
by their best token nearly as the keys do, at a twenty-eighth of the bytes that keys and values take
in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import mlx.core as mx
import numpy as np

from penstock.kv import backend
from penstock.kv import columns as col
from penstock.kv.codecs import Codec, Coded
from penstock.kv.codecs.rotation import rotate
from penstock.kv.codecs.turbo import STEPS, Turbo, padded
from penstock.kv.columns import Side
from penstock.kv.segment import Segment
from penstock.kv.sign_products import Floats
from penstock.kv.tails import LayerShape

BITS = 2
"""Bits of a number. Each stands for a sign: code - 1.5 is a half and a one, plus or minus."""
PIECE_TOKENS = 256
"""Tokens of one layer that are indexed together."""


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The rule by which keys are indexed."""

    layers: frozenset[int]
    """Numbers of the layers whose keys have an index."""
    codec: Codec = field(default_factory=lambda: Turbo(BITS))

    def signs(self, key_dim: int) -> int:
        """Return how many signs a token's key has, each with a weight of a power of two."""
        return BITS * padded(key_dim)

    def token_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Return the bytes of one token's index in all layers."""
        indexed = (shapes[layer] for layer in self.layers)
        return sum(s.kv_heads * self.codec.token_bits(s.key_dim) // 8 for s in indexed)

    def piece_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Return the most bytes that are taken while the keys of one layer are indexed."""
        numbers = max(
            (shapes[n].kv_heads * padded(shapes[n].key_dim) for n in self.layers), default=0
        )
        return int(Codec.buffers * mx.float32.size * PIECE_TOKENS * numbers)

    def complete(self, segment: Segment) -> bool:
        """Tell whether a segment has all of its index."""
        return bool(segment.index) and all(segment.index[n] is not None for n in self.layers)

    def indexed(self, segment: Segment) -> Segment:
        """Return a segment with its index, evaluated; keys and values are shared.

        Keys that are held in a codec are indexed as the codes stand for them.
        """
        if not self.layers or self.complete(segment) or not segment.tokens:
            return segment
        index = list(segment.index or (None,) * len(segment.layers))
        for layer in sorted(self.layers):
            if index[layer] is None and not (segment.missing and segment.missing[layer]):
                index[layer] = self.of_keys(segment.layers[layer][0])
        return replace(segment, index=tuple(index))

    def transform_query(self, queries: Floats) -> Floats:
        """Return queries (kv_heads, m, dim) as `best_by_block` takes them: (kv_heads, m, n).

        One row's at a time: how a product rounds depends on its shape, and so would the choice.
        """
        return queries @ _rotation(self.codec, queries.shape[-1])

    def best_by_block(
        self, x: Floats, parts: Iterable[tuple[Coded, int, int]], block: int
    ) -> Floats:
        """Return the largest score of each block of tokens; see `Backend.best_by_block`.

        Args:
            x: queries as `transform_query` returns them, (kv_heads, m, n).
            parts: pieces of an index, and their columns start..stop-1; whole blocks together.
            block: tokens of a block.

        Returns:
            (kv_heads, m, blocks).
        """
        pieces = [[part[0, :, start:stop] for part in coded.parts] for coded, start, stop in parts]
        codes, sizes = (
            side[0] if len(side) == 1 else mx.concatenate(list(side), axis=1)
            for side in zip(*pieces, strict=True)
        )
        return backend.current().best_by_block(x, codes, sizes, block)

    def of_keys(self, keys: Side) -> Coded:
        """Return the index of one layer's keys, some tokens at a time; evaluated."""
        tokens, pieces = col.columns(keys), []
        for start in range(0, tokens, PIECE_TOKENS):
            piece = col.take(keys, start, min(start + PIECE_TOKENS, tokens))
            wide = piece.dequantize() if isinstance(piece, Coded) else piece
            assert isinstance(wide, mx.array)
            pieces.append(self._encode(wide))
            mx.eval(pieces[-1].parts)
        return pieces[0] if len(pieces) == 1 else _joined(pieces)

    def _encode(self, keys: mx.array) -> Coded:
        """Encode keys as the codec does; on the CPU with NumPy, in a third of the time."""
        if not backend.current().uses_numpy:
            return self.codec.encode(keys)
        rotated = rotate(keys, padded(keys.shape[-1]))
        mx.eval(rotated)
        z = np.asarray(rotated)
        with np.errstate(over="ignore", invalid="ignore"):
            # Sums of a row alone: its index does not depend on what is indexed with it.
            over = (z * z).sum(axis=-1)
            step = np.float32(STEPS[BITS]) * np.sqrt(over / z.shape[-1])[..., None]
            plus, outer = z >= 0, np.abs(z) > step
            signs = np.stack([plus == outer, plus], axis=-1)
            along = (np.abs(z) * (outer + np.float32(0.5))).sum(axis=-1)
            along *= np.float32(STEPS[BITS])
            sizes = np.where(over > 0, over / np.maximum(along, 1e-30), 0.0).astype(np.float16)
        codes = np.packbits(signs.reshape(*z.shape[:-1], -1), axis=-1, bitorder="little")
        return Coded(self.codec, (mx.array(codes.view("<u4")), mx.array(sizes)), keys.shape[-1])


@cache
def _rotation(codec: Codec, dim: int) -> Floats:
    """Return the matrix by which queries meet an index, (dim, signs of a token)."""
    rotation = np.array(codec.transform_query(mx.eye(dim)[None])[0])
    weights = STEPS[BITS] * 2.0 ** np.arange(-1, BITS - 1)  # of a number's bits, the lowest first
    return np.kron(rotation, weights).astype(np.float32)


def _joined(pieces: Sequence[Coded]) -> Coded:
    joined = pieces[0].join(*pieces[1:])
    mx.eval(joined.parts)
    return joined
