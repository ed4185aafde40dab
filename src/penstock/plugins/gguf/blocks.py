"""Conversion of GGUF tensors for MLX: dense values, or codes with group scales and biases.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are affine in groups of 32, which MLX supports, so their
codes are repacked without loss. Q2_K, Q3_K and Q6_K have groups of 16; the package `gguf`
dequantizes them, and unless the model is loaded in float32, MLX requantizes them. For the layouts
of blocks see https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from penstock.errors import ModelError
from penstock.plugins.gguf.header import FLOAT4, GROUP, Form, TensorInfo

Bytes: TypeAlias = np.ndarray[Any, Any]
Codes: TypeAlias = tuple[Bytes, ...]
"""Words of codes, scales, and biases in affine forms."""
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

Rows: TypeAlias = mx.array | tuple[slice, ...]
"""Index of leading axes."""

NUMBERS_IN_CACHE = 1 << 18
"""Numbers of a tensor whose codes are converted at a time."""
NUMBERS_TOGETHER = 4 << 20
"""Number of values of a tensor that are requantized at a time: 16 MB in float32."""


@dataclass(frozen=True, slots=True)
class AffineCodes:
    """Quantized matrix in MLX's affine format: value = code x scale + bias."""

    weight: mx.array
    scales: mx.array
    """Scales, (rows, groups) float32; in the file they are float16, or products of two."""
    biases: mx.array
    bits: int

    def dequantized(self) -> mx.array:
        return mx.dequantize(
            self.weight, self.scales, self.biases, group_size=GROUP, bits=self.bits
        )

    def rows(self, order: Rows) -> AffineCodes:
        return AffineCodes(self.weight[order], self.scales[order], self.biases[order], self.bits)

    def groups(self, order: mx.array) -> AffineCodes:
        """Return the matrix with its groups of columns in the given order."""
        words = self.weight.reshape(*self.scales.shape, self.bits)[..., order, :]
        weight = words.reshape(self.weight.shape)
        return AffineCodes(weight, self.scales[..., order], self.biases[..., order], self.bits)


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """Quantized matrix in MLX's mxfp4 format: 4-bit floats, and a power of two per 32 of them."""

    weight: mx.array
    scales: mx.array

    def dequantized(self) -> mx.array:
        codes: mx.array = mx.dequantize(
            self.weight, self.scales, group_size=GROUP, bits=4, mode="mxfp4", dtype=mx.float32
        )
        return codes

    def rows(self, order: Rows) -> FloatCodes:
        return FloatCodes(self.weight[order], self.scales[order])


def read(tensor: TensorInfo, *, float32: bool = False) -> mx.array | AffineCodes | FloatCodes:
    """Read one tensor; with `float32`, formats that MLX does not have are only dequantized."""
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    form, bits = tensor.form.name, tensor.form.bits
    if form == "BF16":
        return mx.array(raw.view("<u2").reshape(tensor.shape)).view(mx.bfloat16)
    if form in _DENSE:
        return mx.array(raw.view(_DENSE[form]).reshape(tensor.shape))
    assert bits is not None
    if form in _CODES:
        arrays = (x.reshape(*tensor.shape[:-1], -1) for x in _converted(raw, tensor.form))
        weight, scales, *biases = map(mx.array, arrays)
        return (
            AffineCodes(weight, scales, biases[0], bits) if biases else FloatCodes(weight, scales)
        )
    by_row = raw.reshape(prod(tensor.shape[:-1]), -1)
    if float32:
        return mx.array(_dequantized(by_row, tensor).reshape(tensor.shape))
    return _nearest(by_row, tensor, bits)


def _converted(raw: Bytes, form: Form) -> list[Bytes]:
    """Return the words of a tensor's codes, its scales, and its biases if it has any.

    They are converted some blocks at a time, which stay in the processor's cache.
    """
    blocks = raw.reshape(-1, form.block_bytes)
    together = NUMBERS_IN_CACHE // form.numbers
    arrays: list[Bytes] = []
    for first in range(0, len(blocks), together):
        parts = _CODES[form.name](blocks[first : first + together])
        if not arrays:
            count = len(blocks[:together])
            arrays = [np.empty((len(blocks), x.size // count), x.dtype) for x in parts]
        for array, part in zip(arrays, parts, strict=True):
            array[first : first + together] = part.reshape(-1, array.shape[1])
    return arrays


def _nearest(by_row: Bytes, tensor: TensorInfo, bits: int) -> AffineCodes:
    """Requantize a tensor, some rows at a time, with scales and biases rounded to float16."""
    count = max(1, NUMBERS_TOGETHER // tensor.shape[-1])
    parts: list[tuple[mx.array, ...]] = []
    for first in range(0, len(by_row), count):
        numbers = mx.array(_dequantized(by_row[first : first + count], tensor))
        _, scales, biases = mx.quantize(numbers, GROUP, bits)
        scales *= 1 + 2**-11  # rounding a scale down would clip the extremes of a group
        scales, biases = (side.astype(mx.float16).astype(mx.float32) for side in (scales, biases))
        by_group = numbers.reshape(*scales.shape, GROUP)
        steps = (by_group - biases[..., None]) / mx.where(scales == 0, 1, scales)[..., None]
        codes = mx.clip(mx.round(steps), 0, 2**bits - 1).astype(mx.uint8)
        packed = _packed(np.asarray(codes).reshape(-1, GROUP), bits)
        parts.append((mx.array(packed.reshape(len(numbers), -1)), scales, biases))
        mx.eval(parts[-1])
    weight, scales, biases = (
        mx.concatenate([part[number] for part in parts]).reshape(*tensor.shape[:-1], -1)
        for number in range(3)
    )
    return AffineCodes(weight, scales, biases, bits)


def nearest_error(tensor: TensorInfo) -> float:
    """Return the relative RMS error of requantizing a tensor with `mx.quantize`."""
    exact, nearest = read(tensor, float32=True), read(tensor)
    if not isinstance(exact, mx.array) or not isinstance(nearest, AffineCodes):
        return 0.0
    error = nearest.dequantized() - exact
    return float(mx.sqrt((error * error).mean() / mx.maximum((exact * exact).mean(), 1e-30)))


_DENSE = {"F32": "<f4", "F16": "<f2"}


def _packed(codes: Bytes, bits: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Pack codes (blocks, 32) as `mx.quantize` does: a bit stream, lowest bits first."""
    if bits == 8:
        stream = codes
    elif bits == 4:
        stream = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        single = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
        stream = np.packbits(single.reshape(len(codes), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).view("<u4")


def _half(raw: Bytes) -> Floats:
    """Return float16 values in some columns of blocks as float32."""
    return raw.view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Return the codes of 16 bytes: low nibbles first, then high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _nibble_words(raw: Bytes) -> Bytes:
    """Return the words of codes in runs (..., bytes): low nibbles first, then high ones."""
    pairs = np.ascontiguousarray(raw).view("<u2")
    low, high = pairs & 0x0F | pairs >> 4 & 0xF0, pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
    words = np.empty((*raw.shape[:-1], 2, raw.shape[-1] // 16), np.uint64)
    for number, side in enumerate((low, high)):
        words[..., number, :] = side.astype(np.uint8).view(np.uint64)
    return words.view("<u4")


def _fifths(raw: Bytes) -> Bytes:
    """Return the fifth bits of 32 codes, from four bytes."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") << 4


def _q4_0(raw: Bytes) -> Codes:
    scales = _half(raw[:, :2])
    return _nibble_words(raw[:, 2:]), scales, -8 * scales


def _q4_1(raw: Bytes) -> Codes:
    return _nibble_words(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: Bytes) -> Codes:
    scales = _half(raw[:, :2])
    return _packed(_nibbles(raw[:, 6:]) | _fifths(raw[:, 2:6]), 5), scales, -16 * scales


def _q5_1(raw: Bytes) -> Codes:
    codes = _nibbles(raw[:, 8:]) | _fifths(raw[:, 4:8])
    return _packed(codes, 5), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Codes:
    scales = _half(raw[:, :2])
    return _packed(raw[:, 2:] ^ 128, 8), scales, -128 * scales


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Return the 8 scales and biases of 256 values, stored in 6 bits with two float16 factors."""
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    least = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    return _half(raw[:, :2]) * scales, -_half(raw[:, 2:4]) * least


def _q4_k(raw: Bytes) -> Codes:
    return _nibble_words(raw[:, 16:].reshape(-1, 4, 32)), *_k_scales(raw)


def _q5_k(raw: Bytes) -> Codes:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    runs = raw[:, 48:].reshape(-1, 4, 32)
    nibbles = np.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 8, GROUP)
    return _packed((nibbles | fifth << 4).reshape(-1, GROUP), 5), *_k_scales(raw)


def _float4(raw: Bytes) -> Codes:
    return _nibble_words(raw[:, 1:]), raw[:, :1]


_CODES: dict[str, Callable[[Bytes], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    FLOAT4: _float4,
}
"""Functions that split blocks into words of codes, scales and biases."""


def _dequantized(by_row: Bytes, tensor: TensorInfo) -> Floats:
    """Dequantize rows of a tensor, (rows, columns), from their bytes, (rows, bytes)."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError(
            f"{tensor.file.name}: tensor {tensor.name[:64]!r} is in {tensor.form.name}, which "
            f"needs the package gguf: pip install gguf"
        ) from None
    kind = GGMLQuantizationType[tensor.form.name]
    numbers: Floats = dequantize(np.asarray(by_row), kind)
    return numbers
