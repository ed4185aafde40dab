"""Products with packed 4- or 8-bit weights, by ONNX Runtime's `MatMulNBits`.

The operator is fast only for symmetric codes, with a zero point of 8 or 128. Affine codes have an
offset: value = scale x (code - middle) + offset. So the product is that of the symmetric codes,
plus the sums of each row's blocks times the offsets: exact, with 1/32 of additional work.

Activations are rounded to 8 bits per block, as in llama.cpp; `exact` keeps them in float32. A row's
result does not depend on other rows. On some processors a single row, or the last of an odd number,
is summed in another order; there, rows are computed in pairs (`row_multiple`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash

from penstock.models.layer_seams import skips_logits
from penstock.plugins.cpu.onnx_graph import MICROSOFT, Array, Graph, RowSession

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

ROUNDED, EXACT = 4, 1
"""Accuracy levels of the operator: activations in 8 bits, and in float32."""
BLOCKS = (16, 32, 64, 128, 256)
"""Block sizes of scales that the operator supports."""
WIDER = {2: 4, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}
"""Stored width of codes, by bits."""
ALIGNMENT = 64
"""Alignment in bytes that the runtime uses for its own arrays."""
MULTIPLES = (1, 2, 4, 8)
"""Numbers of rows that may have to be computed together."""
ACTIVATIONS = 2
"""Number of products of a row alive at once in a graph."""
CODES_AT_ONCE = 1 << 22
"""Number of codes unpacked at a time."""


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Quantized matrix: value = scale x (code - middle) + offset, both of them per block."""

    codes: Array
    """Codes as bytes, low nibble first, (rows, blocks, block x bits / 8)."""
    scales: Floats
    """Scales, (rows, blocks)."""
    offsets: Floats | None
    """Offsets, (rows, blocks); None if all are 0."""
    bits: int
    """Width of a code, 4 or 8."""
    block: int
    """Number of values that share a scale."""

    @property
    def rows(self) -> int:
        """Number of rows of the matrix: size of a product."""
        return len(self.codes)

    @property
    def columns(self) -> int:
        """Number of columns of the matrix: size of an input row."""
        return int(self.codes.shape[1]) * self.block

    def digest(self) -> str:
        """Return a hash of the exact values."""
        hashed = xxhash.xxh3_128()
        for array in (self.codes, self.scales, self.offsets):
            hashed.update(b"" if array is None else array.tobytes())
        return str(hashed.hexdigest())

    def halves(self) -> tuple[PackedCodes, PackedCodes]:
        """Return two matrices of 4 bits whose sum is this one of 8 bits."""
        high, low = self.codes >> 4, self.codes & 15
        middle = 8 * self.scales
        offsets = middle if self.offsets is None else self.offsets + middle
        return (
            PackedCodes(_in_bytes(high, 4), 16 * self.scales, None, 4, self.block),
            PackedCodes(_in_bytes(low, 4), self.scales, offsets, 4, self.block),
        )


def packed_codes(module: nn.Module) -> PackedCodes | None:
    """Return the codes of a linear layer or embedding of MLX; None if the operator cannot use them.

    Unsupported widths are converted to wider codes with the same zero point.
    """
    if "scales" not in module or module.get("biases") is None or module.mode != "affine":
        return None
    bits, block = int(module.bits), int(module.group_size)
    if bits not in WIDER or block not in BLOCKS or module.weight.ndim != 2:
        return None
    scales, offsets = (_floats(module[name]) for name in ("scales", "biases"))
    offsets = offsets + np.float32(1 << bits - 1) * scales
    rows, blocks = scales.shape
    wider = WIDER[bits]
    if wider == bits:
        codes = np.asarray(module.weight).view(np.uint8).reshape(rows, blocks, -1)
    else:
        codes = _widened(module.weight, bits, wider, rows, blocks, block)
    return PackedCodes(codes, scales, offsets if offsets.any() else None, wider, block)


def _floats(array: mx.array) -> Floats:
    floats: Floats = np.array(array.astype(mx.float32))
    return floats


def _widened(weight: mx.array, bits: int, wider: int, rows: int, blocks: int, block: int) -> Array:
    """Return codes in more bits, shifted to the zero point of the wider ones."""
    out = np.empty((rows, blocks, block * wider // 8), np.uint8)
    step = max(1, CODES_AT_ONCE // (blocks * block))
    for first in range(0, rows, step):
        part = weight[first : first + step]
        ones = mx.ones((len(part), blocks), mx.float32)
        numbers = mx.dequantize(part, ones, 0 * ones, group_size=block, bits=bits)
        moved = numbers + ((1 << wider - 1) - (1 << bits - 1))
        codes = np.asarray(moved.astype(mx.uint8)).reshape(len(part), blocks, block)
        out[first : first + step] = _in_bytes(codes, wider)
    return out


def _in_bytes(codes: Array, bits: int) -> Array:
    """Pack codes of one byte each into `bits` bits."""
    return codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4


# ---- nodes of graphs


def add_product(
    graph: Graph, x: str, sums: dict[int, str], matrix: PackedCodes, *, exact: bool
) -> str:
    """Add the product of rows with a matrix to a graph; return the name of the result.

    Args:
        graph: graph to extend.
        x: name of the rows.
        sums: names of the sums of the rows' blocks, by block size; missing ones are added.
        matrix: quantized matrix.
        exact: whether activations stay in float32.
    """
    multiple = row_multiple(matrix.bits, matrix.block, exact)
    graph.row_multiple = max(graph.row_multiple, multiple)
    return _add_product(graph, x, sums, matrix, exact=exact)


def _add_product(
    graph: Graph, x: str, sums: dict[int, str], matrix: PackedCodes, *, exact: bool
) -> str:
    if exact and matrix.bits == 8:  # in float32 the operator has a quick way for 4 bits alone
        parts = [_add_product(graph, x, sums, half, exact=True) for half in matrix.halves()]
        return str(graph.node("Add", *parts))
    product = graph.node(
        "MatMulNBits", x, graph.weight(matrix.codes), graph.weight(matrix.scales),
        domain=MICROSOFT, K=matrix.columns, N=matrix.rows, bits=matrix.bits,
        block_size=matrix.block, accuracy_level=EXACT if exact else ROUNDED,
    )  # fmt: skip
    if matrix.offsets is None:
        return str(product)
    if matrix.block not in sums:
        shape = np.array([0, -1, matrix.block], np.int64)
        blocks = graph.node("Reshape", x, graph.weight(shape))
        last = graph.weight(np.array([2], np.int64))
        sums[matrix.block] = graph.node("ReduceSum", blocks, last, keepdims=0)
    offsets = graph.weight(matrix.offsets.T)
    return str(graph.node("Add", product, graph.node("MatMul", sums[matrix.block], offsets)))


def add_products(
    graph: Graph, x: str, sums: dict[int, str], matrices: Sequence[PackedCodes], *, exact: bool
) -> list[str]:
    """Add products of the same rows with several matrices, as one if their formats agree.

    For arguments and result see `add_product`.
    """
    whole = _stacked(matrices)
    if whole is None:
        return [add_product(graph, x, sums, matrix, exact=exact) for matrix in matrices]
    product = add_product(graph, x, sums, whole, exact=exact)
    if len(matrices) == 1:
        return [product]
    return add_split(graph, product, [matrix.rows for matrix in matrices])


def add_split(graph: Graph, x: str, widths: Sequence[int]) -> list[str]:
    """Add the split of rows into parts of these widths to a graph; return the parts' names."""
    sizes = graph.weight(np.array(widths, np.int64))
    parts: list[str] = graph.node("Split", x, sizes, outputs=len(widths), axis=1)
    return parts


def _stacked(matrices: Sequence[PackedCodes]) -> PackedCodes | None:
    """Concatenate matrices along rows; None if their formats differ."""
    if len({(matrix.bits, matrix.block) for matrix in matrices}) > 1:
        return None
    offsets = []
    if any(matrix.offsets is not None for matrix in matrices):
        offsets = [0 * x.scales if x.offsets is None else x.offsets for x in matrices]
    return PackedCodes(
        np.concatenate([matrix.codes for matrix in matrices]),
        np.concatenate([matrix.scales for matrix in matrices]),
        np.concatenate(offsets) if offsets else None,
        matrices[0].bits,
        matrices[0].block,
    )


@cache
def row_multiple(bits: int, block: int, exact: bool) -> int:
    """Return the number of rows to pad to so that each row has the same bits; determined by a test.

    2 for rows in float32, and for rounded ones with AVX2 and 4 bits, or with AVX-512 and blocks of
    64.
    """
    columns, rows = 5 * block, MULTIPLES[-1] * 3
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 256, (67, 5, block * bits // 8), np.uint8)
    scales = draw.random((67, 5), np.float32)
    graph = Graph()
    matrix = PackedCodes(codes, scales, scales.copy(), bits, block)
    session = graph.session({"x": columns}, {_add_product(graph, "x", {}, matrix, exact=exact): 67})
    x = _aligned(draw.standard_normal((rows, columns), np.float32), rows)
    (together,) = session.run(x)
    for multiple in MULTIPLES:
        counts = range(multiple, rows, multiple)
        spans = [slice(first, first + n) for n in counts for first in (0, rows - n)]
        if all(
            np.array_equal(
                session.run(_aligned(x[span], span.stop - span.start))[0], together[span]
            )
            for span in spans
        ):
            return multiple
    return MULTIPLES[-1]


def run_rows(session: RowSession, *inputs: Array) -> list[Array]:
    """Run a session on rows so that no result depends on their number."""
    rows = len(inputs[0])
    padded = -(-rows // session.row_multiple) * session.row_multiple
    whole = session.run(*(_aligned(x, padded) for x in inputs))
    return [out[:rows] for out in whole]


def _aligned(x: Array, rows: int) -> Array:
    """Return aligned rows, padded to a number of rows by repeating the last one.

    Otherwise sums would start at another offset within a vector, and be computed in another order.
    """
    if len(x) == rows and x.__array_interface__["data"][0] % ALIGNMENT == 0:
        return x
    raw = np.empty(rows * x.shape[1] * x.itemsize + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    copy = raw[start : start + rows * x.shape[1] * x.itemsize].view(x.dtype).reshape(rows, -1)
    copy[: len(x)], copy[len(x) :] = x, x[-1]
    return copy


# ---- modules


class PackedModule(nn.Module):
    """Module whose weights are in ONNX sessions, outside MLX's arrays."""

    packed_bytes = 0
    """Bytes of the weights in its sessions."""
    packed_row_bytes = 0
    """Bytes of a row's activations in its sessions; 0 if only rows with logits are computed."""

    def __init__(self, matrices: Sequence[PackedCodes], *, exact: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.packed_width = max(matrix.rows for matrix in matrices)
        self.packed_row_bytes = ACTIVATIONS * 4 * sum(matrix.rows for matrix in matrices)
        self.name_of_weights = f"{'exact' if exact else 'rounded'} rows, weights "
        self.name_of_weights += " ".join(matrix.digest() for matrix in matrices)

    def _extra_repr(self) -> str:
        return self.name_of_weights


class PackedLinear(PackedModule):
    """Linear layer with quantized weights, computed when called."""

    def __init__(self, matrix: PackedCodes, bias: mx.array | None, *, exact: bool) -> None:
        super().__init__([matrix], exact=exact)
        if bias is not None:
            self.bias = bias.astype(mx.float32)
        self._product = product_session(matrix, exact=exact)
        self.packed_bytes = self._product.weight_bytes

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply (..., n) by the weights, giving (..., m), and add the bias."""
        products = multiplied(self._product, x)
        return products + self["bias"] if "bias" in self else products


class PackedHead(PackedLinear):
    """Output layer of a model; logits are computed only where they are needed."""

    def __init__(self, matrix: PackedCodes, bias: mx.array | None, *, exact: bool) -> None:
        super().__init__(matrix, bias, exact=exact)
        self.packed_row_bytes = 0

    def __call__(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of (..., n)."""
        return no_logits(x, self.packed_width) if skips_logits() else super().__call__(x)


class PackedEmbedding(PackedModule):
    """Embedding tied to the output layer; its weights are stored twice."""

    def __init__(self, codes: nn.QuantizedEmbedding, matrix: PackedCodes, *, exact: bool) -> None:
        super().__init__([matrix], exact=exact)
        self.codes = codes
        self.packed_row_bytes = 0
        self._product = product_session(matrix, exact=exact)
        self.packed_bytes = self._product.weight_bytes

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (..., n) of tokens."""
        rows: mx.array = self.codes(tokens)
        return rows

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of (..., n)."""
        if skips_logits():
            return no_logits(x, self.packed_width)
        return multiplied(self._product, x)


def no_logits(x: mx.array, width: int) -> mx.array:
    """Return a placeholder for unused logits; it is not evaluated."""
    return mx.zeros((*x.shape[:-1], width))


def product_session(matrix: PackedCodes, *, exact: bool) -> RowSession:
    """Return a session that multiplies rows by a matrix."""
    graph = Graph()
    product = add_product(graph, "x", {}, matrix, exact=exact)
    width = {product: matrix.rows}
    return graph.session({"x": matrix.columns}, width)


def multiplied(session: RowSession, x: mx.array) -> mx.array:
    """Run a session with one input and one output on an array's rows, immediately."""
    (products,) = run_rows(session, rows_of(x))
    return mx.array(products).reshape(*x.shape[:-1], products.shape[-1])


def rows_of(x: mx.array) -> Floats:
    """Return an array (..., n) as rows (rows, n), evaluated, and copied if needed."""
    return np.ascontiguousarray(np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1]))
