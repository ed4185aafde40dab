"""Products with packed weights of 4, 5, 6 or 8 bits, by compiled loops over tiles.

Affine codes are not converted: value = scale x code + offset, with a scale and an offset per group
of columns. Floats of 4 bits (mxfp4) are converted to such codes by a table. Activations are rounded
in blocks of 32, to 16 bits (`packed`) or 24 (`packed-exact`, as accurate as float32), in digits of
8 bits, whose products with codes are exact. A product is the integer product times the scale, plus
the sum of the rounded block times the offset. The result of a row depends neither on other rows nor
on the processor; see `tile_products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash

from penstock.kv.readable_arrays import ReadableArray
from penstock.memory.sizes import packed_matrix_bytes
from penstock.models.layer_seams import read_rows, skips_logits
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.layer_loops import PART_WORDS, PartTable, part_loops
from penstock.plugins.cpu.pack_loop import PackTable, RowTable, pack_loop, row_loop
from penstock.plugins.cpu.tile_products import (
    BLOCK,
    FLOAT4_CODES,
    FLOAT4_ZERO,
    SCALE_FLOATS,
    TILE_ROWS,
    block_bytes,
    multiply_loop,
)

Array: TypeAlias = np.ndarray[Any, Any]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

ROUNDED, EXACT = 2, 3
"""Number of 8-bit digits of an activation, in `packed` and in `packed-exact`."""
GROUPS = (32, 64, 128, 256)
"""Supported numbers of columns that share a scale."""
WIDER = {2: 4, 3: 4, 4: 4, 5: 5, 6: 6, 8: 8}
"""Bits in which codes are stored, by bits of the model's codes."""
FLOAT4_MODE = "mxfp4"
"""MLX's quantization mode with 4-bit floats."""
FLOAT4_BIAS = 128
"""Exponent bias of scales: one more than MLX's, because `FLOAT4_CODES` are doubled."""
ALIGNMENT = 64
"""Alignment of tiles, in bytes."""
ACTIVATIONS = 2
"""Number of outputs of a layer in memory at once."""
ROWS_TOGETHER = 4096
"""Number of rows whose scales are compared at a time."""


class PackedMatrix:
    """Quantized matrix in tiles of 16 rows, the layout that `multiply_loop` reads.

    Args:
        codes: codes of the rows, which are padded with zeros to whole tiles.
        scales: scales, (rows, groups), float16 or float32.
        offsets: offsets, (rows, groups), of the same dtype; not stored if `zero` is given.
        bits: bits of a stored code: 4, 5, 6 or 8.
        zero: code that represents 0, if all offsets are -zero x scale; 0 to store the offsets.
        floats: whether codes are 4-bit floats, converted by `FLOAT4_CODES`.
    """

    def __init__(
        self,
        codes: CodeRows,
        scales: Array,
        offsets: Array,
        bits: int,
        *,
        zero: int = 0,
        floats: bool = False,
    ) -> None:
        self.rows, groups = scales.shape
        self.columns = codes.group * groups
        self.bits = bits
        self.zero = zero
        self.floats = floats
        self.scale_bytes = scales.dtype.itemsize
        self.per_scale = codes.group // BLOCK
        tiles = -(-self.rows // TILE_ROWS)
        record = block_bytes(bits, self.per_scale, self.scale_bytes, zero=zero)
        self.tiles: Array = _aligned(tiles * groups * record).reshape(tiles, groups, record)
        """Scales, offsets if stored, and codes, (tiles, groups, bytes)."""
        self._pack(codes, scales, offsets)

    def _pack(self, codes: CodeRows, scales: Array, offsets: Array) -> None:
        """Write the tiles, on all threads."""
        words = np.ascontiguousarray(np.asarray(codes.weight))
        scales, offsets = np.ascontiguousarray(scales), np.ascontiguousarray(offsets)
        needed = (self.rows, self.columns * codes.bits // 32)
        if words.shape != needed or words.dtype != np.uint32 or offsets.shape != scales.shape:
            raise ValueError(f"need codes {needed} uint32, not {words.shape} {words.dtype}")
        table = np.zeros(len(PackTable), np.int64)
        entries = {
            PackTable.CODES: words.ctypes.data,
            PackTable.SCALES: scales.ctypes.data,
            PackTable.OFFSETS: 0 if self.zero else offsets.ctypes.data,
            PackTable.TILES: self.tiles.ctypes.data,
            PackTable.ROWS: self.rows,
            PackTable.GROUPS: self.tiles.shape[1],
            PackTable.PER_SCALE: self.per_scale,
            PackTable.BITS: codes.bits,
            PackTable.STORED: self.bits,
            PackTable.SCALE_BYTES: self.scale_bytes,
        }
        table[list(entries)] = list(entries.values())
        team().run(pack_loop(), table)

    @cached_property
    def digest(self) -> str:
        """Hash of the exact values and their layout."""
        shape = (self.rows, self.columns, self.bits, self.per_scale, self.scale_bytes)
        hashed = xxhash.xxh3_128(repr((shape, self.zero, self.floats)).encode())
        hashed.update(self.tiles.data)
        return hashed.hexdigest()

    def linear(self, digits: int, bias: Floats | None = None) -> list[int]:
        """Return the values of `LinearEntry`, valid while the matrix and the bias exist.

        Args:
            digits: bytes of an activation.
            bias: (tiles x 16,) from `padded_bias`, or None.
        """
        form = (self.bits, self.per_scale, self.scale_bytes, digits)
        function = multiply_loop(*form, floats=self.floats, zero=self.zero)
        tiles = len(self.tiles)
        bias_address = 0 if bias is None else rows_address(bias[None], tiles * TILE_ROWS)
        return [function, self.tiles.ctypes.data, tiles, self.columns // BLOCK, bias_address]

    def rows_of(self, tokens: Integers) -> Floats:
        """Return the rows of tokens as float32, (n, columns); zeros for those of the padding.

        Raises IndexError for others, because the compiled loop does not check.
        """
        tokens = np.ascontiguousarray(tokens, np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self.tiles) * TILE_ROWS:
            raise IndexError(f"need rows from 0 to {self.rows - 1}, not {tokens.max()}")
        result = np.empty((len(tokens), self.columns), np.float32)
        table = self._row_table.copy()
        table[RowTable.ROWS], table[RowTable.COUNT] = tokens.ctypes.data, len(tokens)
        table[RowTable.RESULT] = result.ctypes.data
        team().run_alone(row_loop(), table)
        return result

    @cached_property
    def _row_table(self) -> Integers:
        table = np.zeros(len(RowTable), np.int64)
        entries = {
            RowTable.TILES: self.tiles.ctypes.data,
            RowTable.GROUPS: self.tiles.shape[1],
            RowTable.PER_SCALE: self.per_scale,
            RowTable.STORED: self.bits,
            RowTable.SCALE_BYTES: self.scale_bytes,
            RowTable.ZERO: self.zero,
            RowTable.VALUES: _code_values(self.floats).ctypes.data,
        }
        table[list(entries)] = list(entries.values())
        return table


@cache
def _code_values(floats: bool) -> Floats:
    """Return the value of each code, (256,)."""
    values = np.arange(256, dtype=np.float32)
    if floats:
        values[: len(FLOAT4_CODES)] = FLOAT4_CODES
    return values


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Codes of rows of an MLX module."""

    weight: mx.array
    bits: int
    group: int
    """Number of columns that share a scale."""


def can_multiply(module: nn.Module, *, dimensions: int = 2) -> bool:
    """Return whether the compiled loops can multiply the codes of a module.

    Its weights must have the given number of dimensions: 2, or 3 for experts.
    """
    if "scales" not in module or module.weight.ndim != dimensions:
        return False
    if module.group_size not in GROUPS:
        return False
    if module.mode == FLOAT4_MODE:
        return True
    return module.mode == "affine" and module.get("biases") is not None and module.bits in WIDER


def packed_matrix(module: nn.Module, rows: slice | int = slice(None)) -> PackedMatrix:
    """Return rows of a module's matrix in tiles; `can_multiply` must be true.

    For a module of experts, `rows` is the index of an expert.
    """
    bits, floats = int(module.bits), module.mode == FLOAT4_MODE
    zero = FLOAT4_ZERO if floats else 2 ** (bits - 1)
    if floats:  # the stored scales are exponents
        powers = np.asarray(module.scales[rows]).astype(np.int32) - FLOAT4_BIAS
        scales = np.ldexp(np.float32(1), powers)
        sides = [scales, -FLOAT4_ZERO * scales]
    else:
        sides = [_numbers(_rows(module[x], rows)) for x in ("scales", "biases")]
    if not _follow(sides[1], sides[0], zero):
        zero = 0
    if all(map(_fits_half, sides[:1] if zero else sides)):
        sides = [side.astype(np.float16, copy=False) for side in sides]
    elif len({side.dtype for side in sides}) > 1:
        sides = [side.astype(np.float32) for side in sides]
    codes = CodeRows(_rows(module.weight, rows), bits, int(module.group_size))
    return PackedMatrix(codes, sides[0], sides[1], WIDER[bits], zero=zero, floats=floats)


def _rows(matrix: mx.array, rows: slice | int) -> mx.array:
    """Return rows of a matrix; the matrix itself, not a copy, for all rows."""
    return matrix if rows == slice(None) else matrix[rows]


def _numbers(side: mx.array) -> Array:
    """Return scales or offsets as a NumPy array of float16 or float32."""
    return np.asarray(side if side.dtype == mx.float16 else side.astype(mx.float32))


def _follow(offsets: Array, scales: Array, zero: int) -> bool:
    """Return whether all offsets are -zero x scale, as in symmetric GGUF types."""
    factor = np.float32(-zero)
    parts = (slice(x, x + ROWS_TOGETHER) for x in range(0, len(scales), ROWS_TOGETHER))
    return all(np.array_equal(offsets[part], factor * scales[part]) for part in parts)


def _fits_half(numbers: Array) -> bool:
    """Return whether float16 represents the numbers exactly, as it does those of GGUF files."""
    if numbers.dtype == np.float16:
        return True
    with np.errstate(over="ignore"):
        return np.array_equal(numbers.astype(np.float16), numbers)


def packed_bytes(module: nn.Module) -> int:
    """Return the maximum bytes of a module's matrix in tiles, assuming float16 scales for mxfp4."""
    floats = module.mode == FLOAT4_MODE
    is_half = floats or (module.scales.dtype == module.biases.dtype == mx.float16)
    scale_bytes = 2 if is_half else 4
    *experts, rows, groups = module.scales.shape
    group = int(module.group_size)
    columns, stored = groups * group, 1 if floats else 2
    one = packed_matrix_bytes(rows, columns, module.bits, group, scale_bytes, sides=stored)
    return int(prod(experts)) * one


def _aligned(nbytes: int) -> Array:
    """Return an uninitialized array of bytes aligned to `ALIGNMENT`."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def padded_bias(bias: mx.array | None) -> Floats | None:
    """Return a bias as float32, with zeros for the rows that pad the last tile."""
    if bias is None:
        return None
    numbers: Floats = np.zeros(-(-len(bias) // TILE_ROWS) * TILE_ROWS, np.float32)
    numbers[: len(bias)] = np.asarray(bias.astype(mx.float32))
    return numbers


# ---- jobs


def rows_address(rows: Array, columns: int) -> int:
    """Return the address of rows (n, columns), for compiled loops, which do not check shapes.

    Raises ValueError for arrays of another shape, dtype or order.
    """
    if (
        rows.shape != (len(rows), columns)
        or rows.dtype != np.float32
        or not rows.flags.c_contiguous
    ):
        order = "" if rows.flags.c_contiguous else ", not contiguous"
        raise ValueError(f"need (n, {columns}) float32, not {rows.shape} {rows.dtype}{order}")
    return int(rows.ctypes.data)


class Job:
    """A compiled part of a layer, with the table of its arguments.

    Args:
        function: address of the compiled function, from `part_loops`.
        linears: entries of its linear layers.
        digits: bytes of an activation.
        columns: number of columns of the widest linear layer.
        entries: table entries that are the same in every call.
    """

    def __init__(
        self,
        function: int,
        linears: Sequence[Sequence[int]],
        digits: int,
        columns: int,
        entries: dict[PartTable, int],
    ) -> None:
        self.function = function
        self.digits = digits
        self.columns = columns
        table = np.zeros(PART_WORDS, np.int64)
        table[PartTable.DIGITS] = digits
        for entry, value in entries.items():
            table[entry] = value
        flat = np.array([word for linear in linears for word in linear], np.int64)
        self.table = np.concatenate([table, flat])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of rounded activations and their scales."""
        return self.columns * self.digits + self.columns // BLOCK * 4 * SCALE_FLOATS

    def run(self, rows: int, width: int, entries: dict[PartTable, int], floats: int = 0) -> None:
        """Run the part on rows.

        Args:
            rows: number of rows.
            width: width of the layer's input.
            entries: addresses of inputs and results, whose arrays the caller must keep.
            floats: number of floats per row for RESIDUAL and HIDDEN together.
        """
        threads = team()
        blocks = rows * self.columns // BLOCK
        space = np.empty(
            rows * floats + threads.threads * width + rows * self.row_bytes // 4,
            np.float32,
        )  # fmt: skip
        start = space.ctypes.data
        table = self.table.copy()
        table[PartTable.ROWS] = rows
        for entry, value in entries.items():
            table[entry] = value
        table[PartTable.RESIDUAL] = start
        table[PartTable.HIDDEN] = start + 4 * rows * width
        start += 4 * rows * floats
        table[PartTable.NORMED] = start
        start += 4 * threads.threads * width
        table[PartTable.SCALES] = start
        table[PartTable.ROUNDED] = start + 4 * SCALE_FLOATS * blocks
        threads.run(self.function, table)


# ---- modules


class PackedModule(nn.Module):
    """Module whose weights are in tiles, not in MLX arrays.

    Its `repr` contains a hash of the weights and settings, which the model's fingerprint includes.
    """

    packed_bytes = 0
    """Bytes of the weights."""
    packed_row_bytes = 0
    """Bytes of activations per row, excluding logits."""

    def __init__(
        self,
        matrices: Sequence[PackedMatrix],
        *,
        exact: bool,
        vectors: Mapping[str, Floats | None] | None = None,
        settings: object = None,
    ) -> None:
        """Count and hash the weights.

        Args:
            matrices: packed matrices, in an order that is the same in every process.
            exact: whether activations have 24 bits instead of 16.
            vectors: biases and weights of norms by name, None if missing.
            settings: other values that affect results, hashed by their `repr`.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        present = {name: x for name, x in (vectors or {}).items() if x is not None}
        self.packed_bytes = sum(matrix.tiles.nbytes for matrix in matrices)
        self.packed_bytes += sum(vector.nbytes for vector in present.values())
        self.packed_width = max(matrix.rows for matrix in matrices)
        self.packed_row_bytes = ACTIVATIONS * 4 * sum(matrix.rows for matrix in matrices)
        hashed = xxhash.xxh3_128(repr((exact, settings)).encode())
        for matrix in matrices:
            hashed.update(matrix.digest.encode())
        for name, vector in sorted(present.items()):
            hashed.update(f"{name} {len(vector)}".encode())
            hashed.update(np.ascontiguousarray(vector).data)
        self.weights_digest = hashed.hexdigest()

    def _extra_repr(self) -> str:
        return f"weights={self.weights_digest}"


class Product:
    """Multiplication of rows by a packed matrix."""

    def __init__(self, matrix: PackedMatrix, bias: Floats | None, *, exact: bool) -> None:
        self.matrix = matrix
        self._bias = bias
        digits = EXACT if exact else ROUNDED
        entries = {PartTable.WIDTH: matrix.columns}
        linears = [matrix.linear(digits, bias)]
        self._job = Job(part_loops()[0], linears, digits, matrix.columns, entries)

    @property
    def row_bytes(self) -> int:
        """Bytes of an input row, as float32 and rounded."""
        return 4 * int(self.matrix.columns) + self._job.row_bytes

    def table(self, rows: int, buffers: Mapping[PartTable, int]) -> Integers:
        """Return the table of `function`, with the addresses of its buffers."""
        table = self._job.table.copy()
        entries = {PartTable.ROWS: rows, PartTable.STRIDE: self.stride, **buffers}
        table[list(entries)] = list(entries.values())
        return table

    @property
    def function(self) -> int:
        """Address of the job of `table`."""
        return self._job.function

    @property
    def stride(self) -> int:
        """Number of columns of the result, with those of the last tile's padding."""
        return len(self.matrix.tiles) * TILE_ROWS

    def __call__(self, x: Floats) -> Floats:
        """Multiply rows (n, columns) of contiguous float32, giving (n, rows of the matrix)."""
        result = np.empty((len(x), self.stride), np.float32)
        places = {
            PartTable.X: rows_address(x, self.matrix.columns),
            PartTable.RESULT: result.ctypes.data,
            PartTable.STRIDE: self.stride,
        }
        self._job.run(len(x), self.matrix.columns, places)
        return result[:, : self.matrix.rows]


class PackedLinear(PackedModule):
    """Linear layer with packed weights, computed immediately."""

    def __init__(self, matrix: PackedMatrix, bias: mx.array | None, *, exact: bool) -> None:
        padded = padded_bias(bias)
        super().__init__([matrix], exact=exact, vectors={"bias": padded})
        self.product = Product(matrix, padded, exact=exact)
        self.packed_row_bytes += self.product.row_bytes

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply (..., n) by the weights, giving (..., m), and add the bias."""
        return multiplied(self.product, x)


class PackedHead(PackedLinear):
    """Output layer of a model, which computes only the logits that are read."""

    def __init__(self, matrix: PackedMatrix, bias: mx.array | None, *, exact: bool) -> None:
        super().__init__(matrix, bias, exact=exact)
        self.packed_row_bytes = 0

    def __call__(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of hidden states (..., n)."""
        if skips_logits():
            return no_logits(x, self.packed_width)
        return super().__call__(read_rows(x))


class PackedEmbedding(PackedModule):
    """Embedding that can also be the output layer."""

    def __init__(self, matrix: PackedMatrix, *, exact: bool) -> None:
        super().__init__([matrix], exact=exact)
        self.packed_row_bytes = ACTIVATIONS * 4 * matrix.columns
        self.product = Product(matrix, None, exact=exact)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (..., n) of tokens."""
        matrix = self.product.matrix
        rows = matrix.rows_of(np.asarray(tokens).reshape(-1))
        return mx.array(rows.reshape(*tokens.shape, matrix.columns))

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of hidden states (..., n)."""
        if skips_logits():
            return no_logits(x, self.packed_width)
        return multiplied(self.product, read_rows(x))


def no_logits(x: mx.array, width: int) -> mx.array:
    """Return a placeholder for unused logits; it is not evaluated."""
    return mx.zeros((*x.shape[:-1], width))


class NormedOutput(ReadableArray):
    """Result of the final norm of a decode step, with the logits."""

    def __init__(self, values: Floats, product: Product, logits: Floats) -> None:
        """Take the product of the output layer, and its result, (rows, vocabulary)."""
        super().__init__(values)
        self.product = product
        self.logits = logits


def multiplied(product: Product, x: mx.array) -> mx.array:
    """Multiply an array (..., n) by a matrix, immediately."""
    if isinstance(x, NormedOutput) and x.product is product:
        return ReadableArray(x.logits.reshape(*x.shape[:-1], -1))
    products = product(rows_of(x))
    return mx.array(products.reshape(*x.shape[:-1], products.shape[-1]))


def rows_of(x: mx.array) -> Floats:
    """Evaluate an array (..., n) and return it as contiguous rows (rows, n)."""
    if isinstance(x, ReadableArray):
        return np.ascontiguousarray(x.host.reshape(-1, x.shape[-1]))
    return np.ascontiguousarray(np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1]))


EXPERTS = "mlx_lm.models.switch_layers.QuantizedSwitchLinear"
"""Qualified name of mlx-lm's class for the linear layers of all experts."""
MOST_EXPERTS = 8
"""Assumed maximum number of experts per token."""


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is the linear layers of experts and can be packed."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    return name == EXPERTS and can_multiply(module, dimensions=3)


def packed_experts(module: nn.Module, *, exact: bool) -> PackedExperts:
    """Return a packed replacement of a module for which `are_experts` is true."""
    experts = range(len(module.weight))
    matrices = [packed_matrix(module, expert) for expert in experts]
    biases = [padded_bias(module.bias[x]) if "bias" in module else None for x in experts]
    return PackedExperts(matrices, biases, exact=exact)


class PackedExperts(PackedModule):
    """Linear layers of experts with packed weights, computed immediately."""

    def __init__(
        self, matrices: list[PackedMatrix], biases: list[Floats | None], *, exact: bool
    ) -> None:
        vectors = {f"bias {expert}": bias for expert, bias in enumerate(biases)}
        super().__init__(matrices, exact=exact, vectors=vectors)
        self._products = [
            Product(matrix, bias, exact=exact)
            for matrix, bias in zip(matrices, biases, strict=True)
        ]
        used = min(len(matrices), MOST_EXPERTS)
        self.packed_row_bytes //= len(matrices)
        self.packed_row_bytes = used * (self.packed_row_bytes + self._products[0].row_bytes)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Multiply rows by the weights of their experts.

        Args:
            x: (..., rows, n), whose leading axes are broadcast to those of `indices`.
            indices: index of the expert for each element of the leading axes, (...).
            sorted_indices: ignored; for compatibility with mlx-lm's class.
        """
        experts = np.asarray(indices)
        rows: Floats = np.asarray(x.astype(mx.float32))
        by_expert = np.broadcast_to(rows, (*experts.shape, *rows.shape[-2:]))
        result = np.empty((*by_expert.shape[:-1], self.packed_width), np.float32)
        for expert in np.unique(experts):
            places = np.nonzero(experts == expert)
            chosen = np.ascontiguousarray(by_expert[places])
            products = self._products[int(expert)](chosen.reshape(-1, rows.shape[-1]))
            result[places] = products.reshape(*chosen.shape[:-1], self.packed_width)
        return mx.array(result)
