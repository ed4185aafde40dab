"""Products with codes converted to floats, replacing MLX's quantized kernels on the CPU.

On the CPU, MLX decodes every code again for each row of the product. For several rows it is faster
to convert the codes once and use BLAS: 3 to 8 times for 32 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import mlx.core as mx

ALONG_FROM = {2: 3, 3: 3, 4: 2, 5: 4, 6: 3, 8: 1}
"""Minimum number of rows for which a transposed product is faster with floats, by bits."""
ACROSS_FROM = {2: 3, 3: 3, 4: 5, 5: 3, 6: 5, 8: 5}
"""Minimum number of rows for which a product is faster with floats, by bits."""
BUFFERS = 5
"""Number of floats in memory at once per float multiplied; 4.4 measured, because MLX evaluates
several operations ahead."""


def is_quicker(rows: int, bits: int, *, transpose: bool) -> bool:
    """Return whether a product of `rows` rows is faster with codes converted to floats."""
    return rows >= (ALONG_FROM if transpose else ACROSS_FROM)[bits]


def multiply(
    x: mx.array,
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    transpose: bool,
    bits: int,
    at_once: int,
) -> mx.array:
    """Multiply float32 by codes like `mx.quantized_matmul`, decoding `at_once` codes at a time."""
    biases = biases + scales * 2 ** (bits - 1)  # offsets of centered codes, see `_WideCodes`
    products: list[mx.array] = []
    by_span = codes.ndim > 3  # one product per span of tokens
    count = codes.shape[1]
    step = max(1, at_once * bits * count // max(1, 32 * codes.size))
    for start in range(0, max(1, count), step):
        columns = slice(start, start + step)
        now = codes[:, columns]
        if products:  # in sequence, so that few codes are floats at the same time
            now = mx.depends([now], [products[-1]])[0]
        chunk = _WideCodes(now, scales[:, columns], biases[:, columns], bits)
        if transpose:
            products.append(chunk.along(x[:, columns] if by_span else x))
        else:
            products.append(chunk.across(x[:, columns] if by_span else x[..., columns]))
    if len(products) == 1:
        return products[0]
    if by_span or transpose:
        return mx.concatenate(products, axis=1 if by_span else -1)
    return sum(products[1:], start=products[0])


def dequantize(
    codes: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """Dequantize codes to float32, 2 to 13 times faster than `mx.dequantize` on the CPU."""
    parts = planes(codes, bits)
    whole = parts[0] if len(parts) == 1 else mx.stack(parts, axis=-1)
    groups = whole.reshape(*scales.shape, group_size).astype(mx.float32)
    return (groups * scales[..., None] + biases[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class _WideCodes:
    """Codes multiplied as floats; scales and offsets are applied to the products.

    Half the range is subtracted from all codes first. Otherwise adding a product and an offset of
    similar size and opposite sign would lose digits.
    """

    codes: mx.array
    scales: mx.array
    """Shape (..., rows, groups), like the offsets."""
    biases: mx.array
    bits: int

    def along(self, x: mx.array) -> mx.array:
        total, groups = None, self.scales.shape[-1]
        width = x.shape[-1] // groups
        for group in range(groups):
            part = x[..., group * width : (group + 1) * width]
            floats = self._floats(group)
            products = [
                part[..., number :: len(floats)] @ plane.swapaxes(-1, -2)
                for number, plane in enumerate(floats)
            ]
            scaled = sum(products[1:], start=products[0]) * self.scales[..., None, :, group]
            scaled = scaled + part.sum(axis=-1, keepdims=True) * self.biases[..., None, :, group]
            total = scaled if total is None else total + scaled
        assert total is not None
        return total

    def across(self, x: mx.array) -> mx.array:
        products = []
        for group in range(self.scales.shape[-1]):
            weights = x * self.scales[..., None, :, group]
            columns = mx.stack([weights @ plane for plane in self._floats(group)], axis=-1)
            offset = x @ self.biases[..., group : group + 1]
            products.append(columns.flatten(-2) + offset)
        return products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)

    def _floats(self, group: int) -> list[mx.array]:
        width = self.codes.shape[-1] // self.scales.shape[-1]
        codes = self.codes[..., group * width : (group + 1) * width]
        half = 2 ** (self.bits - 1)
        return [
            (plane - half).view(mx.int8).astype(mx.float32) for plane in planes(codes, self.bits)
        ]


def planes(codes: mx.array, bits: int) -> list[mx.array]:
    """Return codes (..., words) as k uint8 planes: plane i has the codes i, i + k, ...

    Each code must be in at most two bytes, in the bit order of `pack`.
    """
    raw = codes.view(mx.uint8)
    common = gcd(8, bits)
    floats = []
    for number in range(8 // common):
        first, shift = divmod(number * bits, 8)
        code = raw[..., first :: bits // common]
        if shift:
            code = code >> shift
        if shift + bits > 8:
            code = code | (raw[..., first + 1 :: bits // common] << (8 - shift))
        if shift + bits != 8:
            code = code & (2**bits - 1)
        floats.append(code)
    return floats
