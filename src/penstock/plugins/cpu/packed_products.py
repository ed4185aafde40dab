"""Products with packed weights of 4, 5, 6 or 8 bits, by compiled loops over tiles.

Affine codes stay as they are: value = scale x code + offset, with a scale and an offset for a group
of columns. Floats of 4 bits (mxfp4) are looked up in a table, and then are such codes. Activations
are rounded in blocks of 32, to 16 bits (`packed`) or 24 (`packed-exact`, as near as float32
itself), in digits of 8 bits, which the processor multiplies with codes exactly. A product is that
of the codes times the scale, plus the sum of the rounded block times the offset. A row's result
does not depend on other rows, nor on the processor; see `tile_products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash

from penstock.memory.sizes import packed_matrix_bytes
from penstock.models.layer_seams import read_rows, skips_logits
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.layer_loops import PART_WORDS, PartTable, part_loops
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
"""Digits of 8 bits of an activation, in `packed` and in `packed-exact`."""
GROUPS = (32, 64, 128, 256)
"""Numbers of columns that may share a scale."""
WIDER = {2: 4, 3: 4, 4: 4, 5: 5, 6: 6, 8: 8}
"""Stored width of codes, by bits."""
FLOAT4_MODE = "mxfp4"
"""MLX's name of codes that are floats of 4 bits."""
FLOAT4_BIAS = 128
"""Exponent that is stored for a scale of 1, one more than usual: codes count twice."""
ALIGNMENT = 64
"""Alignment of tiles, in bytes."""
ACTIVATIONS = 2
"""Number of products of a row alive at once."""
TILES_TOGETHER = 256
"""Number of tiles that are packed at a time."""


class PackedMatrix:
    """Quantized matrix in tiles of 16 rows, as `multiply_loop` reads it.

    Args:
        codes: codes as bytes, (rows, groups, columns of a group); rows are padded with zeros.
        scales: scales, (rows, groups), float16 or float32.
        offsets: offsets, (rows, groups), of the same dtype; not stored if they follow from a code
            of zero.
        bits: width of a stored code: 4, 5, 6 or 8.
        zero: code of zero: offsets are -zero x scale; 0 to store them.
        floats: whether codes are floats of 4 bits, which count as their `FLOAT4_CODES`.
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
        """Shape (tiles, groups, bytes): scales, offsets if stored, and codes of a tile's
        columns."""
        for first in range(0, tiles, TILES_TOGETHER):
            last = min(first + TILES_TOGETHER, tiles)
            rows = slice(first * TILE_ROWS, min(last * TILE_ROWS, self.rows))
            self._pack(first, last, codes[rows], scales[rows], offsets[rows])

    def _pack(self, first: int, last: int, codes: Array, scales: Array, offsets: Array) -> None:
        """Write some tiles."""
        count, groups = last - first, self.tiles.shape[1]
        into, start = self.tiles[first:last], 0
        for side in (scales,) if self.zero else (scales, offsets):
            by_row: Array = _padded(side, count).reshape(count, TILE_ROWS, groups)
            turned = np.ascontiguousarray(by_row.swapaxes(1, 2)).view(np.uint8)
            into[..., start : start + turned.shape[-1]] = turned
            start += turned.shape[-1]
        shape = (count, TILE_ROWS, groups, self.per_scale)
        by_tile: Array = _padded(codes, count)
        if self.bits == 8:
            fours = by_tile.reshape(*shape, 8, 4)
        else:  # four columns in the low halves of bytes, the next four in the high
            eights = by_tile.reshape(*shape, 4, 2, 4)
            fours = eights[..., 0, :] & 15 | eights[..., 1, :] << 4
        if self.bits in (5, 6):
            more = self.bits - 4
            high = by_tile.reshape(*shape, more, 8 // more, 4) >> 4 << _shifts(more)
            fours = np.concatenate([fours, np.bitwise_or.reduce(high, axis=-2)], axis=-2)
        into[..., start:] = fours.transpose(0, 2, 3, 4, 1, 5).reshape(count, groups, -1)

    @cached_property
    def digest(self) -> str:
        """Hash of the exact values and their layout."""
        shape = (self.rows, self.columns, self.bits, self.per_scale, self.scale_bytes)
        hashed = xxhash.xxh3_128(repr((shape, self.zero, self.floats)).encode())
        hashed.update(self.tiles.data)
        return hashed.hexdigest()

    def linear(self, digits: int, bias: Floats | None = None) -> list[int]:
        """Return the values of `LinearEntry`; the caller keeps the matrix and the bias alive.

        Args:
            digits: bytes of an activation.
            bias: (tiles x 16,), of `padded_bias`; None without one.
        """
        form = (self.bits, self.per_scale, self.scale_bytes, digits)
        function = multiply_loop(*form, floats=self.floats, zero=self.zero)
        tiles = len(self.tiles)
        bias_address = 0 if bias is None else rows_address(bias[None], tiles * TILE_ROWS)
        return [function, self.tiles.ctypes.data, tiles, self.columns // BLOCK, bias_address]

    def rows_of(self, tokens: Integers) -> Floats:
        """Return rows of the matrix as float32, (n, columns)."""
        tile, lane = tokens // TILE_ROWS, tokens % TILE_ROWS
        rows: Floats = self._codes_of(tile, lane).astype(np.float32)
        size = TILE_ROWS * self.scale_bytes
        scales, *offsets = (
            self.tiles[..., start : start + size].view(f"f{self.scale_bytes}")[tile, :, lane, None]
            for start in range(0, self._header_bytes, size)
        )
        rows *= scales
        rows += offsets[0] if offsets else np.float32(-self.zero) * scales
        return rows.reshape(len(tokens), self.columns)

    @property
    def _header_bytes(self) -> int:
        """Bytes of the scales and offsets of a tile's columns."""
        sides = 1 if self.zero else 2
        return sides * TILE_ROWS * int(self.scale_bytes)

    def _codes_of(self, tile: Integers, lane: Integers) -> Array:
        """Return the codes of rows of tiles as bytes, (n, groups, columns of a group)."""
        tiles, groups, _ = self.tiles.shape
        words = self.tiles[..., self._header_bytes :].view(np.uint32)
        by_lane = words.reshape(tiles, groups, words.shape[2] // TILE_ROWS, TILE_ROWS)
        stored = np.ascontiguousarray(by_lane[tile, :, :, lane]).view(np.uint8)
        shape = (len(tile), groups, self.per_scale)
        codes = stored.reshape(*shape, self.bits, 4)
        if self.bits != 8:
            codes, rest = codes[..., :4, :], codes[..., 4:, None, :]
            codes = np.stack([codes & 15, codes >> 4], axis=-2)
        if self.bits in (5, 6):
            more = self.bits - 4
            high = rest >> _shifts(more) & (2**more - 1)
            codes |= high.reshape(codes.shape) << 4
        if self.floats:
            codes = np.array(FLOAT4_CODES, np.uint8)[codes]
        return codes.reshape(len(tile), groups, self.columns // groups)


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Codes of an MLX module, converted to bytes when rows are taken."""

    weight: mx.array
    bits: int
    group: int
    """Columns that share a scale."""

    def __getitem__(self, rows: slice) -> Array:
        """Return the codes of rows, (n, groups, group) bytes."""
        part = self.weight[rows]
        groups = part.shape[1] * 32 // self.bits // self.group
        if self.bits in (4, 8):
            codes = np.asarray(part).view(np.uint8).reshape(len(part), groups, -1)
            return codes if self.bits == 8 else _halves(codes)
        ones = mx.ones((len(part), groups), mx.float32)
        numbers = mx.dequantize(part, ones, 0 * ones, group_size=self.group, bits=self.bits)
        codes = np.asarray(numbers.astype(mx.uint8))
        return codes.reshape(len(part), groups, self.group)


def can_multiply(module: nn.Module, *, dimensions: int = 2) -> bool:
    """Return whether a linear layer or an embedding has codes that can be multiplied directly.

    Weights have the given number of dimensions: 3 are those of experts.
    """
    if "scales" not in module or module.weight.ndim != dimensions:
        return False
    if module.group_size not in GROUPS:
        return False
    if module.mode == FLOAT4_MODE:
        return True
    return module.mode == "affine" and module.get("biases") is not None and module.bits in WIDER


def packed_matrix(module: nn.Module, rows: slice | int = slice(None)) -> PackedMatrix | None:
    """Return some rows of a module's matrix in tiles; None if it cannot be multiplied directly.

    Of a module with experts, `rows` is the number of one.
    """
    if not can_multiply(module, dimensions=3 if isinstance(rows, int) else 2):
        return None
    bits, floats = int(module.bits), module.mode == FLOAT4_MODE
    zero = FLOAT4_ZERO if floats else 2 ** (bits - 1)
    if floats:  # the scales are exponents
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
    """Return rows of a matrix; the matrix itself, and no copy, for all."""
    return matrix if rows == slice(None) else matrix[rows]


def _numbers(side: mx.array) -> Array:
    """Return scales or offsets as NumPy's numbers, in float16 or float32."""
    return np.asarray(side if side.dtype == mx.float16 else side.astype(mx.float32))


def _follow(offsets: Array, scales: Array, zero: int) -> bool:
    """Return whether all offsets are -zero x scale, as in symmetric forms of GGUF files."""
    factor = np.float32(-zero)
    return all(map(np.array_equal, offsets, (factor * row for row in scales)))


def _fits_half(numbers: Array) -> bool:
    """Return whether float16 has the exact values of some numbers, as those of GGUF files."""
    if numbers.dtype == np.float16:
        return True
    with np.errstate(over="ignore"):
        return np.array_equal(numbers.astype(np.float16), numbers)


def packed_bytes(module: nn.Module) -> int:
    """Return the most bytes of a module's matrix in tiles; float16 holds usual powers of two."""
    floats = module.mode == FLOAT4_MODE
    is_half = floats or (module.scales.dtype == module.biases.dtype == mx.float16)
    scale_bytes = 2 if is_half else 4
    *experts, rows, groups = module.scales.shape
    group = int(module.group_size)
    columns, stored = groups * group, 1 if floats else 2
    one = packed_matrix_bytes(rows, columns, module.bits, group, scale_bytes, sides=stored)
    return int(prod(experts)) * one


def _shifts(bits: int) -> Array:
    """Return the places of numbers of 1 or 2 bits in a byte, (numbers, 1)."""
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def _halves(codes: Array) -> Array:
    """Return the low and the high half of each byte, one after the other."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def _padded(rows: Array, tiles: int) -> Array:
    """Return rows with zeros behind them, for whole tiles."""
    missing = tiles * TILE_ROWS - len(rows)
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])


def _aligned(nbytes: int) -> Array:
    """Return an array of bytes that starts at a multiple of `ALIGNMENT`."""
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
    """Return the address of rows (n, columns) for compiled loops, which check nothing.

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
    """A compiled part of a layer, with its table.

    Args:
        function: address of the part, of `part_loops`.
        linears: entries of its linear layers.
        digits: bytes of an activation.
        columns: columns of the widest linear layer.
        entries: entries of the table that never change.
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
        """Bytes of a row of rounded activations with their scales."""
        return self.columns * self.digits + self.columns // BLOCK * 4 * SCALE_FLOATS

    def run(self, rows: int, width: int, entries: dict[PartTable, int], floats: int = 0) -> None:
        """Run the part on rows.

        Args:
            rows: number of rows.
            width: width of the layer's input, which is space for a thread's row, too.
            entries: addresses of inputs and results, which the caller keeps alive.
            floats: space for RESIDUAL and HIDDEN, a row's floats of both.
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
    """Module whose weights are in tiles, outside MLX's arrays.

    Its `repr` has a hash of all that its results depend on: fingerprints of models are made of it.
    """

    packed_bytes = 0
    """Bytes of the weights."""
    packed_row_bytes = 0
    """Bytes of a row's activations; logits do not count."""

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
            matrices: packed matrices, in a fixed order.
            exact: whether activations have 24 bits, not 16.
            vectors: biases and the weights of norms by name; None for one that is missing.
            settings: other values that results depend on, with an exact `repr`.
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
    """Product of rows with a matrix."""

    def __init__(self, matrix: PackedMatrix, bias: Floats | None, *, exact: bool) -> None:
        self.matrix = matrix
        self._bias = bias
        digits = EXACT if exact else ROUNDED
        entries = {PartTable.WIDTH: matrix.columns}
        linears = [matrix.linear(digits, bias)]
        self._job = Job(part_loops()[0], linears, digits, matrix.columns, entries)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in float32 and rounded."""
        return 4 * int(self.matrix.columns) + self._job.row_bytes

    def __call__(self, x: Floats) -> Floats:
        """Multiply rows (n, columns) float32, in C order, giving (n, rows of the matrix)."""
        stride = len(self.matrix.tiles) * TILE_ROWS
        result = np.empty((len(x), stride), np.float32)
        places = {
            PartTable.X: rows_address(x, self.matrix.columns),
            PartTable.RESULT: result.ctypes.data,
            PartTable.STRIDE: stride,
        }
        self._job.run(len(x), self.matrix.columns, places)
        return result[:, : self.matrix.rows]


class PackedLinear(PackedModule):
    """Linear layer with quantized weights, computed when called."""

    def __init__(self, matrix: PackedMatrix, bias: mx.array | None, *, exact: bool) -> None:
        padded = padded_bias(bias)
        super().__init__([matrix], exact=exact, vectors={"bias": padded})
        self._product = Product(matrix, padded, exact=exact)
        self.packed_row_bytes += self._product.row_bytes

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply (..., n) by the weights, giving (..., m), and add the bias."""
        return multiplied(self._product, x)


class PackedHead(PackedLinear):
    """Output layer of a model; logits are computed only where they are needed."""

    def __init__(self, matrix: PackedMatrix, bias: mx.array | None, *, exact: bool) -> None:
        super().__init__(matrix, bias, exact=exact)
        self.packed_row_bytes = 0

    def __call__(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of (..., n)."""
        if skips_logits():
            return no_logits(x, self.packed_width)
        return super().__call__(read_rows(x))


class PackedEmbedding(PackedModule):
    """Embedding that is the output layer, too."""

    def __init__(self, matrix: PackedMatrix, *, exact: bool) -> None:
        super().__init__([matrix], exact=exact)
        self.packed_row_bytes = ACTIVATIONS * 4 * matrix.columns
        self._product = Product(matrix, None, exact=exact)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (..., n) of tokens."""
        matrix = self._product.matrix
        rows = matrix.rows_of(np.asarray(tokens).reshape(-1))
        return mx.array(rows).reshape(*tokens.shape, matrix.columns)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of (..., n)."""
        if skips_logits():
            return no_logits(x, self.packed_width)
        return multiplied(self._product, read_rows(x))


def no_logits(x: mx.array, width: int) -> mx.array:
    """Return a placeholder for unused logits; it is not evaluated."""
    return mx.zeros((*x.shape[:-1], width))


def multiplied(product: Product, x: mx.array) -> mx.array:
    """Multiply an array (..., n) with a matrix, immediately."""
    products = product(rows_of(x))
    return mx.array(products).reshape(*x.shape[:-1], products.shape[-1])


def rows_of(x: mx.array) -> Floats:
    """Return an array (..., n) as rows (rows, n), evaluated, and copied if needed."""
    return np.ascontiguousarray(np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1]))
