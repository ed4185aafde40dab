"""Index of keys: the rotated key in two bits a number, by which tokens worth reading are found.

Two bits keep 88 % of the variance of normal numbers, where their signs keep 64 %. That ranks blocks
by their best token nearly as the keys do, at a twenty-eighth of the bytes that keys and values take
in float32. With values in two bits, too, tokens that are not worth reading exactly can be read from
the index; see `rest_reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import mlx.core as mx
import numpy as np

from penstock.attention.ops import AttentionOps
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.rotations import CenterLoop
from penstock.kv import columns as col
from penstock.kv.codecs.coded import Codec, Coded
from penstock.kv.codecs.turbo import STEPS, Turbo, padded
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape

BITS = 2
"""Bits of a number. Each stands for a sign: code - 1.5 is a half and a one, plus or minus."""
PIECE_TOKENS = 256
"""Tokens of one layer that are indexed together."""
READ_TOKENS = 4_096
"""Tokens whose values are read from an index together, where compiled loops do not read it."""
READ_BUFFERS = 6
"""Arrays of their scores that are alive together."""


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The rule by which keys are indexed."""

    layers: frozenset[int]
    """Numbers of the layers whose keys have an index."""
    with_values: bool = False
    """Whether it has the values, too, in as many bits: the third and fourth part of an index."""
    centers: Mapping[int, KeyCenters] = field(default_factory=dict, compare=False)
    """Vectors that are taken off the keys of a layer before; nothing where there are none."""
    codec: Codec = field(default_factory=lambda: Turbo(BITS))
    value_codec: Codec = field(default_factory=lambda: Turbo(BITS, unbiased=False))

    def signs(self, key_dim: int) -> int:
        """Return how many signs a token's key has, each with a weight of a power of two."""
        return BITS * padded(key_dim)

    def token_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Return the bytes of one token's index in all layers."""
        return sum(self._layer_bytes(shapes[layer]) for layer in self.layers)

    def _layer_bytes(self, shape: LayerShape) -> int:
        bits = self.codec.token_bits(shape.key_dim)
        if self.with_values:
            bits += self.value_codec.token_bits(shape.value_dim)
        return shape.kv_heads * bits // 8

    def piece_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Return the most bytes that are taken while one layer is indexed, a side at a time."""
        sides = [(shapes[n].kv_heads, shapes[n].key_dim) for n in self.layers]
        if self.with_values:
            sides += [(shapes[n].kv_heads, shapes[n].value_dim) for n in self.layers]
        numbers = max((heads * padded(dim) for heads, dim in sides), default=0)
        return int(Codec.buffers * mx.float32.size * PIECE_TOKENS * numbers)

    def table_bytes(self, tokens: int) -> int:
        """Return the bytes of the tables that rotate centers, for sequences of `tokens` tokens."""
        used = [one.rotation for layer, one in self.centers.items() if layer in self.layers]
        return sum(one.table_bytes(tokens) for one in {id(one): one for one in used}.values())

    def read_bytes(
        self, shapes: Sequence[LayerShape], heads: int, code_bytes: Callable[[int], int]
    ) -> int:
        """Return the most bytes that are taken while values are read from an index.

        Args:
            shapes: shapes of the layers' keys and values.
            heads: query heads of the model.
            code_bytes: returns the bytes that a product takes, by its number of codes.
        """
        if not self.with_values:
            return 0
        sides = (
            shapes[n].kv_heads * max(shapes[n].key_dim, shapes[n].value_dim) for n in self.layers
        )
        codes = code_bytes(READ_TOKENS * max(sides, default=0))
        return codes + READ_BUFFERS * mx.float32.size * READ_TOKENS * heads

    def complete(self, segment: Segment) -> bool:
        """Tell whether a segment has all of its index."""
        return bool(segment.index) and all(segment.index[n] is not None for n in self.layers)

    def indexed(self, segment: Segment, start: int, ops: AttentionOps) -> Segment:
        """Return a segment with its index, evaluated; keys and values are shared.

        Keys that are held in a codec are indexed as the codes stand for them.

        Args:
            segment: without an index in some layers, or without any.
            start: position of its first token.
            ops: encode the index.
        """
        if not self.layers or self.complete(segment) or not segment.tokens:
            return segment
        index = list(segment.index or (None,) * len(segment.layers))
        for layer in sorted(self.layers):
            if index[layer] is None and not (segment.missing and segment.missing[layer]):
                index[layer] = self.of(*segment.layers[layer], layer, start, ops)
        return replace(segment, index=tuple(index))

    def transform_query(self, queries: Floats) -> Floats:
        """Return queries (kv_heads, m, dim) as `best_by_block` takes them: (kv_heads, m, n).

        One row's at a time: how a product rounds depends on its shape, and so would the choice.
        """
        return queries @ _rotation(self.codec, queries.shape[-1])

    def inverse_transform(self, mixed: Floats, dim: int) -> Floats:
        """Return mixes of the index's values (kv_heads, m, n) as values, (kv_heads, m, dim)."""
        return mixed @ _back_rotation(self.value_codec, mixed.shape[-1], dim)

    def best_by_block(
        self, x: Floats, parts: Iterable[tuple[Coded, int, int]], block: int, ops: AttentionOps
    ) -> Floats:
        """Return the largest score of each block of tokens; see `AttentionOps.best_by_block`.

        Args:
            x: queries as `transform_query` returns them, (kv_heads, m, n).
            parts: pieces of an index, and their columns start..stop-1; whole blocks together.
            block: tokens of a block.
            ops: score them.

        Returns:
            (kv_heads, m, blocks).
        """
        pieces = [
            [part[0, :, start:stop] for part in coded.parts[:2]] for coded, start, stop in parts
        ]
        codes, sizes = (
            side[0] if len(side) == 1 else mx.concatenate(list(side), axis=1)
            for side in zip(*pieces, strict=True)
        )
        return ops.best_by_block(x, codes, sizes, block)

    def center_scores(
        self,
        layer: int,
        queries: Floats,
        heads: slice,
        first: int,
        stop: int,
        *,
        loop: CenterLoop | None = None,
    ) -> Floats | None:
        """Return what the index of a layer leaves out of scores, (heads, m, blocks).

        Args:
            layer: number of the layer.
            queries: of some key heads, (heads, m, dim).
            heads: numbers of these.
            first: number of the first block.
            stop: number of the block behind the last.
            loop: see `Rotation.sums`.
        """
        centers = self.centers.get(layer)
        if centers is None:
            return None
        return centers.scores(queries, heads, first, stop, loop=loop)

    def of(self, keys: Side, values: Side, layer: int, start: int, ops: AttentionOps) -> Coded:
        """Return the index of one layer's tokens, some of them at a time; evaluated.

        It is the keys' codes and sizes, and with `with_values` those of the values.

        Args:
            keys: of consecutive tokens.
            values: of the same.
            layer: number of the layer.
            start: position of the first of them.
            ops: encode it.
        """
        index = _encoded(self.codec, keys, ops, self.centers.get(layer), start)
        if not self.with_values:
            return index
        codes, sizes = _encoded(self.value_codec, values, ops).parts
        # A value too large for a float16 is held as the largest: a mix with it stays finite.
        sizes = mx.minimum(sizes, mx.finfo(mx.float16).max)
        mx.eval(sizes)
        return replace(index, parts=(*index.parts, codes, sizes))

    def sides(self, index: Coded, value_dim: int) -> tuple[Coded, Coded]:
        """Return the keys and the values of an index that has both."""
        keys, values = index.parts[:2], index.parts[2:]
        return replace(index, parts=keys), Coded(self.value_codec, values, value_dim)


def _encoded(
    codec: Codec,
    side: Side,
    ops: AttentionOps,
    centers: KeyCenters | None = None,
    position: int = 0,
) -> Coded:
    """Encode one side from a position on, some tokens at a time; evaluated."""
    tokens, pieces = col.columns(side), []
    for start in range(0, tokens, PIECE_TOKENS):
        piece = col.take(side, start, min(start + PIECE_TOKENS, tokens))
        wide = piece.dequantize(ops) if isinstance(piece, Coded) else piece
        assert isinstance(wide, mx.array)
        if centers is not None:
            at = position + start
            wide = wide.astype(mx.float32) - mx.array(centers.at(at, at + wide.shape[2]))
        pieces.append(ops.index_codes(codec, wide))
        mx.eval(pieces[-1].parts)
    return pieces[0] if len(pieces) == 1 else _joined(pieces)


@cache
def _rotation(codec: Codec, dim: int) -> Floats:
    """Return the matrix by which queries meet an index, (dim, signs of a token)."""
    rotation = np.array(codec.transform_query(mx.eye(dim)[None])[0])
    weights = STEPS[BITS] * 2.0 ** np.arange(-1, BITS - 1)  # of a number's bits, the lowest first
    return np.kron(rotation, weights).astype(np.float32)


@cache
def _back_rotation(codec: Codec, width: int, dim: int) -> Floats:
    """Return the matrix that turns an index's values back, (width, dim)."""
    return np.array(codec.inverse_transform(mx.eye(width)[None], dim)[0])


def _joined(pieces: Sequence[Coded]) -> Coded:
    joined = pieces[0].join(*pieces[1:])
    mx.eval(joined.parts)
    return joined
