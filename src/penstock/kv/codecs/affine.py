"""Neighbours of a vector share a scale and an offset, as in `mx.quantize`; rotated first or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import mlx.core as mx

from penstock.kv.codecs.base import (
    GROUP_SIZES,
    TOKEN_AXIS,
    Codec,
    Coded,
    Grid,
    dequantized,
    multiply,
    quantized,
)
from penstock.kv.codecs.rotation import rotate, rotate_back
from penstock.kv.codecs.scales import Scaled, divided, multiplied

BITS = (2, 3, 4, 5, 6, 8)
GRID_PIECES = 2
"""Pieces whose scales and offsets are found together."""


@dataclass(frozen=True, slots=True)
class Affine(Scaled):
    """`group_size` neighbours to a scale and an offset, both float16: bits + 32 / group_size bits
    a number. Parts: codes, scales, offsets."""

    buffers: ClassVar[float] = 2.25

    bits: int
    group_size: int = 64
    rotated: bool = False

    @property
    def name(self) -> str:
        """As `affine4`, `rot4`, `affine4g32`."""
        group = "" if self.group_size == 64 else f"g{self.group_size}"
        return f"{'rot' if self.rotated else 'affine'}{self.bits}{group}"

    def token_bits(self, dim: int) -> int:
        """See `Codec`."""
        if dim % self.group_size:
            fitting = [f"g{size}" for size in GROUP_SIZES if dim % size == 0]
            raise ValueError(
                f"{self.name} holds {self.group_size} numbers by one scale, which do not divide a "
                f"head of {dim}; {f'put {fitting[0]} behind it' if fitting else 'no group does'}"
            )
        return int(dim * (self.bits + Fraction(32, self.group_size)))

    @property
    def takes_scales(self) -> bool:
        """See `Codec`; without a rotation it is as `mx.quantize` has it."""
        return self.rotated

    def encode(self, x: mx.array) -> Coded:
        """See `Codec`."""
        turned = rotate(divided(x, self.scales)) if self.rotated else x
        parts = quantized(turned, self.group_size, self.bits)
        return Coded(self, parts, x.shape[-1])

    def encode_by(self, tokens: int, x: mx.array) -> Iterator[Coded]:
        """See `Codec`."""
        if self.rotated or self.bits != 8:
            yield from Codec.encode_by(self, tokens, x)
            return
        count, run = x.shape[TOKEN_AXIS], GRID_PIECES * tokens
        for first in range(0, count, run):
            numbers = x[:, :, first : first + run]
            grid = Grid.of(numbers, self.group_size)
            for start in range(0, min(run, count - first), tokens):
                some = grid.part(start, start + tokens)
                codes = some.codes(numbers[:, :, start : start + tokens])
                yield Coded(self, (codes, some.scales, some.offsets), x.shape[-1])

    def widen(self, coded: Coded) -> mx.array:
        """See `Codec`."""
        codes, scales, offsets = coded.parts
        x = dequantized(codes, scales, offsets, group_size=self.group_size, bits=self.bits)
        return multiplied(rotate_back(x), self.scales) if self.rotated else x

    def turned(self, queries: mx.array) -> mx.array:
        """See `Codec`."""
        return rotate(multiplied(queries, self.scales)) if self.rotated else queries

    def turned_back(self, mixed: mx.array, dim: int) -> mx.array:
        """See `Codec`."""
        return multiplied(rotate_back(mixed), self.scales) if self.rotated else mixed

    def score(self, turned: mx.array, coded: Coded) -> mx.array:
        """See `Codec`."""
        return self._product(turned, coded, transpose=True)

    def mix(self, weights: mx.array, coded: Coded) -> mx.array:
        """See `Codec`."""
        return self._product(weights, coded, transpose=False)

    def _product(self, x: mx.array, coded: Coded, *, transpose: bool) -> mx.array:
        parts = (part.squeeze(0) for part in coded.parts)
        return multiply(x, *parts, transpose=transpose, group_size=self.group_size, bits=self.bits)
