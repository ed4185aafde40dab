"""Group quantization with scale and offset, as in `mx.quantize`, with optional rotation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

import mlx.core as mx

from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import GROUP_SIZES, Codec, Coded, Cut, Grid, Put, quantized
from penstock.kv.codecs.rotation import rotate, rotate_back
from penstock.kv.codecs.scales import Scaled, divided, multiplied

BITS = (2, 3, 4, 5, 6, 8)
_NAME = re.compile(r"(affine|rot)?([2-8])(?:g(32|64|128))?")
GRID_CUTS = 2
"""Number of pieces whose scales and offsets are computed together for 8-bit codes."""


@dataclass(frozen=True, slots=True)
class Affine(Scaled):
    """Codec with a scale and an offset per `group_size` values: bits + 32 / group_size per value.

    Scales and offsets are float16. Parts: codes, scales, offsets.
    """

    FORMS: ClassVar[str] = (
        "affine2 to affine6 and affine8 (or 2, 3, 4, 5, 6, 8), with a suffix g32 or g128 for "
        "other groups than 64; rot2 to rot6, rot8"
    )
    buffers: ClassVar[float] = 2

    bits: int
    group_size: int = 64
    rotated: bool = False

    @classmethod
    def parse(cls, word: str, *, keys: bool) -> Self | None:
        match = _NAME.fullmatch(word)
        if match is None or int(match[2]) not in BITS:
            return None
        return cls(int(match[2]), int(match[3] or 64), rotated=match[1] == "rot")

    @property
    def name(self) -> str:
        group = "" if self.group_size == 64 else f"g{self.group_size}"
        return f"{'rot' if self.rotated else 'affine'}{self.bits}{group}"

    def token_bits(self, dim: int) -> int:
        if dim % self.group_size:
            fitting = [f"g{size}" for size in GROUP_SIZES if dim % size == 0]
            other = f"no group does, but turbo{self.bits} holds it"
            raise ValueError(
                f"{self.name} uses groups of {self.group_size} values, which do not divide a "
                f"head of {dim}; {f'append {fitting[0]}' if fitting else other}"
            )
        return int(dim * (self.bits + Fraction(32, self.group_size)))

    @property
    def takes_scales(self) -> bool:
        return self.rotated

    def encode(self, x: mx.array, ops: CodeOps) -> Coded:
        rotated = rotate(divided(x, self.scales)) if self.rotated else x
        parts = quantized(rotated, self.group_size, self.bits, ops)
        return Coded(self, parts, x.shape[-1])

    def encode_by(self, cuts: Sequence[Cut], x: mx.array, put: Put, ops: CodeOps) -> Iterator[None]:
        for first in range(0, len(cuts), GRID_CUTS):
            group = cuts[first : first + GRID_CUTS]
            heads, tokens = (slice(group[0][axis].start, group[-1][axis].stop) for axis in (0, 1))
            ragged = all(len({cut[axis].start for cut in group}) > 1 for axis in (0, 1))
            if self.rotated or self.bits != 8 or ragged:
                yield from Codec.encode_by(self, group, x, put, ops)
                continue
            scales, offsets, grid = Grid.of(x[:, heads, tokens], self.group_size, ops)
            put(1, scales, heads.start, tokens.start)
            put(2, offsets, heads.start, tokens.start)
            del scales, offsets
            for cut in group:
                part = grid.part(_behind(cut[0], heads.start), _behind(cut[1], tokens.start))
                put(0, part.codes(x[:, *cut], ops), cut[0].start, cut[1].start)
                yield

    def dequantize(self, coded: Coded, ops: CodeOps) -> mx.array:
        codes, scales, offsets = coded.parts
        x = ops.dequantize_codes(codes, scales, offsets, group_size=self.group_size, bits=self.bits)
        return multiplied(rotate_back(x), self.scales) if self.rotated else x

    def transform_query(self, queries: mx.array) -> mx.array:
        return rotate(multiplied(queries, self.scales)) if self.rotated else queries

    def inverse_transform(self, mixed: mx.array, dim: int) -> mx.array:
        return multiplied(rotate_back(mixed), self.scales) if self.rotated else mixed

    def score(self, queries: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        return self._product(queries, coded, ops, transpose=True)

    def mix(self, weights: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        return self._product(weights, coded, ops, transpose=False)

    def _product(self, x: mx.array, coded: Coded, ops: CodeOps, *, transpose: bool) -> mx.array:
        parts = (part.squeeze(0) for part in coded.parts)
        return ops.multiply_codes(
            x, *parts, transpose=transpose, group_size=self.group_size, bits=self.bits
        )


def _behind(cut: slice, start: int) -> slice:
    return slice(cut.start - start, cut.stop - start)
