"""Memory of a GGUF file's weights once loaded, computed without MLX."""

from __future__ import annotations

from collections import Counter
from math import prod

from penstock.memory.reading import OUTSIDE
from penstock.memory.sizes import packed_matrix_bytes
from penstock.plugins.gguf.architectures import is_read
from penstock.plugins.gguf.header import FLOAT4, GROUP, Header, TensorInfo

_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}
_HALF_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K", FLOAT4)
"""Formats whose scales and offsets can be represented exactly in float16."""
_SYMMETRIC = ("Q4_0", "Q5_0", "Q8_0", FLOAT4)
"""Formats whose offsets are determined by their scales."""
_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def activation_dtype(header: Header) -> str:
    """Return the dtype of activations: float16 if quantized, else that of the largest matrix.

    With MXFP4 it is bfloat16, because activations of these models overflow float16.
    """
    tensors = model_tensors(header)
    if any(tensor.form.name == FLOAT4 for tensor in tensors):
        return "bfloat16"
    if any(tensor.form.bits for tensor in tensors):
        return "float16"
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    return {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[largest.form.name]


def native_bytes(header: Header) -> int:
    dtype = activation_dtype(header)
    return sum(sum(_bytes(tensor, dtype)) for tensor in model_tensors(header))


def wide_bytes(header: Header) -> int:
    return sum(4 * prod(tensor.shape) for tensor in model_tensors(header))


def packed_bytes(header: Header) -> int | None:
    """Return the bytes of packed weights; None if there are no quantized weights."""
    total, has_codes = 0, False
    for tensor in model_tensors(header):
        numbers, bits = prod(tensor.shape), tensor.form.bits
        if bits is None:
            total += 4 * numbers
            continue
        has_codes = True
        scale_bytes = 2 if tensor.form.name in _HALF_SCALES else 4
        *experts, rows, columns = tensor.shape
        sides = 1 if tensor.form.name in _SYMMETRIC else 2
        one = packed_matrix_bytes(rows, columns, bits, GROUP, scale_bytes, sides=sides)
        total += prod(experts) * one
    return total if has_codes else None


def model_tensors(header: Header) -> list[TensorInfo]:
    return [x for x in header.tensors.values() if is_read(header, x.name)]


def bytes_by_kind(header: Header, *, float32: bool) -> dict[str, int]:
    """Return the bytes of the weights by kind, for `memory.read_model_spec`."""
    dtype = "float32" if float32 else activation_dtype(header)
    sums: Counter[str] = Counter()
    for tensor in model_tensors(header):
        floats, codes = (4 * prod(tensor.shape), 0) if float32 else _bytes(tensor, dtype)
        sums[_NAMES[dtype]] += floats
        sums["U32"] += codes
        if not tensor.name.startswith("blk."):
            sums[OUTSIDE] += floats + codes
    return dict(sums)


def _bytes(tensor: TensorInfo, dtype: str) -> tuple[int, int]:
    numbers, width, bits = prod(tensor.shape), _WIDTHS[dtype], tensor.form.bits
    if bits is None:
        return numbers * (4 if tensor.name.endswith(".ssm_a") else width), 0
    if tensor.form.name == FLOAT4:
        return 0, numbers // 8 * bits + numbers // GROUP
    return numbers // GROUP * 2 * width, numbers // 8 * bits
