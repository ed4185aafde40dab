"""Rotated vectors, each by its own length, on one grid for all coordinates (TurboQuant).

A rotated vector's coordinates are about normal with the same variance, so that one grid fits all
and a vector needs one number beside its codes (Zandieh et al. 2025, "TurboQuant", the form that
minimizes the squared error). The grid is even, so that `mx.quantized_matmul` reads the codes as
they lie. Its step is the best one for normal numbers (Max 1960, "Quantizing for minimum
distortion"). At 1 or 2 bits it is as good as the best uneven grid, at 3 bits 8 % worse, at 4 bits
21 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from penstock.kv import backend
from penstock.kv.codecs.coded import (
    GROUP_SIZES,
    Coded,
    largest_group,
    pack,
)
from penstock.kv.codecs.rotation import rotate, rotate_back
from penstock.kv.codecs.scales import Scaled, divided, multiplied

STEPS = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
"""Distance between two levels, in standard deviations, by bits; at 1 bit it is the sign alone."""


@dataclass(frozen=True, slots=True)
class Turbo(Scaled):
    """One float16 scale a vector, and `bits` for each rotated number.

    With `half`, the first half of the rotated numbers has one bit more. Parts: codes (two arrays
    with `half`), scales.

    `unbiased` chooses the scale for keys: products with the vector itself are right on average.
    For values it is the one of least squared error.
    """

    bits: int
    half: bool = False
    unbiased: bool = True

    @property
    def name(self) -> str:
        """As `turbo3`, `turbo3.5`."""
        return f"turbo{self.bits}{'.5' if self.half else ''}"

    def token_bits(self, dim: int) -> int:
        """See `Codec`."""
        if self.half and dim % 64:
            raise ValueError(
                f"{self.name} halves a head, and {dim} is not a multiple of 64; turbo{self.bits} "
                f"and turbo{self.bits + 1} hold it"
            )
        return sum(w * bits for w, bits in zip(self._widths(dim), self._each, strict=True)) + 16

    @property
    def _each(self) -> tuple[int, ...]:
        return (self.bits + 1, self.bits) if self.half else (self.bits,)

    def _widths(self, dim: int) -> tuple[int, ...]:
        width = padded(dim)
        return (width // 2, width // 2) if self.half else (width,)

    def encode(self, x: mx.array) -> Coded:
        """See `Codec`."""
        dim = x.shape[-1]
        z = rotate(divided(x, self.scales), padded(dim))
        spread = mx.sqrt(mx.mean(z * z, axis=-1, keepdims=True))
        unit = z / mx.maximum(spread, 1e-30)
        codes, levels, start = [], [], 0
        for width, bits in zip(self._widths(dim), self._each, strict=True):
            step, most = STEPS[bits], 2**bits - 1
            middle = most / 2
            code = mx.clip(mx.round(unit[..., start : start + width] / step + middle), 0, most)
            codes.append(pack(code, bits))
            levels.append((code - middle) * step)
            start += width
        scales = fitted(z, mx.concatenate(levels, axis=-1), unbiased=self.unbiased)
        return Coded(self, (*codes, scales), dim)

    def dequantize(self, coded: Coded) -> mx.array:
        """See `Codec`."""
        *codes, scales = coded.parts
        z = [
            backend.current().dequantize_codes(
                part, step, offsets, group_size=largest_group(width), bits=bits
            )
            for part, offsets, step, width, bits in self._as_mlx(codes, scales, coded.dim)
        ]
        whole = z[0] if len(z) == 1 else mx.concatenate(z, axis=-1)
        return multiplied(rotate_back(whole, coded.dim), self.scales)

    def transform_query(self, queries: mx.array) -> mx.array:
        """See `Codec`."""
        return rotate(multiplied(queries, self.scales), padded(queries.shape[-1]))

    def inverse_transform(self, mixed: mx.array, dim: int) -> mx.array:
        """See `Codec`."""
        return multiplied(rotate_back(mixed, dim), self.scales)

    def score(self, queries: mx.array, coded: Coded) -> mx.array:
        """See `Codec`."""
        if self._each == (1,):
            codes, scales = (part.squeeze(0) for part in coded.parts)
            levels = scales.astype(mx.float32) * (STEPS[1] / 2)
            return backend.current().multiply_signs(queries, codes, levels)
        total, start = None, 0
        for codes, offsets, scales, width, bits in self._readable(coded):
            product = backend.current().multiply_codes(
                queries[..., start : start + width],
                codes,
                scales,
                offsets,
                transpose=True,
                group_size=largest_group(width),
                bits=bits,
            )
            total = product if total is None else total + product
            start += width
        assert total is not None
        return total

    def mix(self, weights: mx.array, coded: Coded) -> mx.array:
        """See `Codec`."""
        mixed = [
            backend.current().multiply_codes(
                weights,
                codes,
                scales,
                offsets,
                transpose=False,
                group_size=largest_group(width),
                bits=bits,
            )
            for codes, offsets, scales, width, bits in self._readable(coded)
        ]
        return mixed[0] if len(mixed) == 1 else mx.concatenate(mixed, axis=-1)

    def _readable(self, coded: Coded) -> list[tuple[mx.array, mx.array, mx.array, int, int]]:
        """Return codes, offsets, scales, width and bits of each half, as MLX reads them."""
        *codes, scales = (part.squeeze(0) for part in coded.parts)
        return self._as_mlx(codes, scales, coded.dim)

    def _as_mlx(
        self, codes: Sequence[mx.array], scales: mx.array, dim: int
    ) -> list[tuple[mx.array, mx.array, mx.array, int, int]]:
        arrays = []
        for part, width, bits in zip(codes, self._widths(dim), self._each, strict=True):
            step = mx.expand_dims(scales.astype(mx.float32), -1) * STEPS[bits]
            shape = (*step.shape[:-1], width // largest_group(width))
            offsets = step * (-(2**bits - 1) / 2)
            arrays.append(
                (part, mx.broadcast_to(offsets, shape), mx.broadcast_to(step, shape), width, bits)
            )
        return arrays


def padded(dim: int) -> int:
    """Return how many numbers a head is rotated into: whole groups of the smallest size."""
    return -(-dim // GROUP_SIZES[-1]) * GROUP_SIZES[-1]


def fitted(z: mx.array, levels: mx.array, *, unbiased: bool) -> mx.array:
    """Return the factor of each vector's levels, (...) float16.

    Unbiased: <z, z'> = <z, z>, so |z|^2 / <z, levels>; else of least error, <z, levels> /
    |levels|^2. A vector of zeros has the scale 0.
    """
    along = mx.sum(z * levels, axis=-1)
    over, under = (
        (mx.sum(z * z, axis=-1), along) if unbiased else (along, mx.sum(levels**2, axis=-1))
    )
    return mx.where(over > 0, over / mx.maximum(under, 1e-30), 0.0).astype(mx.float16)
