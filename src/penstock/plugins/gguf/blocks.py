"""Conversion of GGUF tensors for MLX: dense values, or codes with group scales and biases.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are affine in groups of 32, which is one of MLX's own
forms: the codes are repacked without loss. Q2_K, Q3_K and Q6_K have groups of 16; the package
`gguf` dequantizes them, and MLX quantizes them where codes stay codes, with scales that float16
holds. The layouts of blocks are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from penstock.errors import ModelError
from penstock.plugins.gguf.header import FLOAT4, GROUP, TensorInfo

Bytes: TypeAlias = np.ndarray[Any, Any]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

NUMBERS_TOGETHER = 4 << 20
"""Numbers of a tensor that are quantized anew at a time: 16 MB in float32."""


@dataclass(frozen=True, slots=True)
class AffineCodes:
    """Quantized matrix in MLX's affine format: value = code x scale + bias."""

    weight: mx.array
    scales: mx.array
    """Scales in float32, (rows, groups); the file's are float16, or products of two."""
    biases: mx.array
    bits: int

    def dequantized(self) -> mx.array:
        return mx.dequantize(
            self.weight, self.scales, self.biases, group_size=GROUP, bits=self.bits
        )

    def rows(self, order: mx.array) -> AffineCodes:
        return AffineCodes(self.weight[order], self.scales[order], self.biases[order], self.bits)

    def groups(self, order: mx.array) -> AffineCodes:
        """Return the codes with groups of columns in another order."""
        words = self.weight.reshape(*self.scales.shape, self.bits)[..., order, :]
        weight = words.reshape(self.weight.shape)
        return AffineCodes(weight, self.scales[..., order], self.biases[..., order], self.bits)


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """Quantized matrix in MLX's mxfp4 format: 32 floats of 4 bits, and a power of two."""

    weight: mx.array
    scales: mx.array

    def dequantized(self) -> mx.array:
        codes: mx.array = mx.dequantize(
            self.weight, self.scales, group_size=GROUP, bits=4, mode="mxfp4", dtype=mx.float32
        )
        return codes

    def rows(self, order: mx.array) -> FloatCodes:
        return FloatCodes(self.weight[order], self.scales[order])


def read(tensor: TensorInfo, *, float32: bool = False) -> mx.array | AffineCodes | FloatCodes:
    """Read one tensor; with `float32`, tensors to be dequantized anyway are read as float32."""
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    form, bits = tensor.form.name, tensor.form.bits
    if form == "BF16":
        return mx.array(raw.view("<u2").reshape(tensor.shape)).view(mx.bfloat16)
    if form in _DENSE:
        return mx.array(raw.view(_DENSE[form]).reshape(tensor.shape))
    assert bits is not None
    if form == FLOAT4:
        blocks = raw.reshape(-1, tensor.form.block_bytes)
        words = _packed(_nibbles(blocks[:, 1:]), bits)
        shape = (*tensor.shape[:-1], -1)
        return FloatCodes(mx.array(words.reshape(shape)), mx.array(blocks[:, 0].reshape(shape)))
    if form in _AFFINE:
        codes, scales, biases = _AFFINE[form](raw.reshape(-1, tensor.form.block_bytes))
        rows = tensor.shape[:-1]
        return AffineCodes(
            mx.array(_packed(codes, bits).reshape(*rows, -1)),
            mx.array(scales.reshape(*rows, -1)),
            mx.array(biases.reshape(*rows, -1)),
            bits,
        )
    by_row = raw.reshape(prod(tensor.shape[:-1]), -1)
    if float32:
        return mx.array(_dequantized(by_row, tensor).reshape(tensor.shape))
    return _nearest(by_row, tensor, bits)


def _nearest(by_row: Bytes, tensor: TensorInfo, bits: int) -> AffineCodes:
    """Quantize a tensor anew, with scales and biases in float16, some rows at a time."""
    count = max(1, NUMBERS_TOGETHER // tensor.shape[-1])
    parts: list[tuple[mx.array, ...]] = []
    for first in range(0, len(by_row), count):
        numbers = mx.array(_dequantized(by_row[first : first + count], tensor))
        _, scales, biases = mx.quantize(numbers, GROUP, bits)
        scales *= 1 + 2**-11  # a scale rounded down would clip a group's ends
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
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Return the codes of 16 bytes: low nibbles first, then high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifths(raw: Bytes) -> Bytes:
    """Return the fifth bits of 32 codes, from four bytes."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") << 4


def _q4_0(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(raw[:, :2])
    return _nibbles(raw[:, 2:]), scales, -8 * scales


def _q4_1(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(raw[:, :2])
    return _nibbles(raw[:, 6:]) | _fifths(raw[:, 2:6]), scales, -16 * scales


def _q5_1(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    codes = _nibbles(raw[:, 8:]) | _fifths(raw[:, 4:8])
    return codes, _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(raw[:, :2])
    return raw[:, 2:] ^ 128, scales, -128 * scales


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Return the eight scales and biases of 256 values: 6 bits each, times two float16 factors."""
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    least = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    return _half(raw[:, :2]) * scales, -_half(raw[:, 2:4]) * least


def _k_nibbles(raw: Bytes) -> Bytes:
    """Return 256 codes of four runs of 32 bytes: low nibbles of each run, then high ones."""
    runs = raw.reshape(-1, 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 8, GROUP)


def _q4_k(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _k_nibbles(raw[:, 16:]).reshape(-1, GROUP), *_k_scales(raw)


def _q5_k(raw: Bytes) -> tuple[Bytes, Floats, Floats]:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _k_nibbles(raw[:, 48:]) | fifth << 4
    return codes.reshape(-1, GROUP), *_k_scales(raw)


_AFFINE: dict[str, Callable[[Bytes], tuple[Bytes, Floats, Floats]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
"""Functions that split blocks into codes, scales and biases."""


def _dequantized(by_row: Bytes, tensor: TensorInfo) -> Floats:
    """Return rows of a tensor, (rows, columns), from their bytes (rows, bytes)."""
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
