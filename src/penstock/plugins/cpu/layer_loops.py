"""Compiled parts of a decoder layer before and after attention.

Each is a job of `compiled_jobs`, whose table consists of the entries of `PartTable` and of the
linear layers, `LINEAR_WORDS` each. Normalization and rounding are divided between threads by rows
of activations, products by rows of weights.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np

from penstock.plugins.cpu.compiled import SUMS, pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.compiled_jobs import array_at, barrier, call, table_at
from penstock.plugins.cpu.tile_products import BLOCK, SCALE_FLOATS, TILE_ROWS

ROWS_TOGETHER = 64
"""Number of rows of activations that are multiplied in one pass over the weights."""


class LinearEntry(IntEnum):
    """Entries that describe one linear layer in the table of a compiled decoder layer."""

    MULTIPLY = 0
    """Address of the function of `multiply_loop`."""
    WEIGHTS = 1
    TILES = 2
    BLOCKS = 3
    BIAS = 4
    """Address of the bias, (tiles x 16,) float32; 0 if there is none."""


LINEAR_WORDS = len(LinearEntry)


class PartTable(IntEnum):
    """Table entries of a part of a layer; addresses are of float32 arrays, or 0 for none."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    ROWS = 3
    X = 4
    """The layer's input, (rows, width)."""
    WIDTH = 5
    DIGITS = 6
    """Number of bytes of an activation."""
    ROUNDED = 7
    """Buffer for rounded activations, (rows, digits, columns) int8."""
    SCALES = 8
    """Buffer for scales and sums of rounded activations, (rows, blocks, 2)."""
    NORMED = 9
    """Buffer for a normalized row of each thread."""
    CONSTANTS = 10
    """The numbers of `Constant`."""
    NORM = 11
    """Weights of the norm before attention, or before the MLP."""
    RESULT = 12
    """Queries, keys and values, (rows, stride), or the layer's output, (rows, width)."""
    STRIDE = 13
    LINEARS = 14
    """Number of linear layers of the part before attention."""
    Q_NORM = 15
    K_NORM = 16
    HEADS = 17
    KV_HEADS = 18
    DIM = 19
    KEYS = 20
    """First column of the keys in the result."""
    ANGLES = 21
    """Cosines and sines of the rows' positions, (2, rows, pairs); 0 for no RoPE."""
    PAIRS = 22
    NEIGHBORS = 23
    """Whether the values of a rotated pair are adjacent, instead of half a row apart."""
    MIXED = 24
    """Output of attention, (rows, columns)."""
    RESIDUAL = 25
    """Buffer for the input of the MLP before its norm, (rows, width)."""
    HIDDEN = 26
    """Buffer for gate and up projection, (2, rows, hidden)."""
    MIXED_NORM = 27
    LOWERED_NORM = 28
    GELU = 29
    """Whether the activation is approximate GELU instead of SiLU."""


PART_WORDS = len(PartTable)


class Constant(IntEnum):
    """Indices of a layer's constants."""

    EPSILON = 0
    HEAD_EPSILON = 1
    RESIDUAL_FACTOR = 2


@cache
def round_loop() -> Any:
    """Compile the quantization of a row to 8-bit digits, with a scale per block.

    Arguments: the row, (columns,); results, digits (digits, columns) int8 and scales and sums
    (blocks, 2); the first block, and the block to stop at.

    A block with an infinity or NaN gets the scale NaN, so that its products are NaN. A block whose
    scale would be subnormal is rounded to zeros. No fast-math flag is set, so that results are
    bit-identical on all processors.
    """
    from numba import float32, int8, int32, njit

    block = BLOCK
    magnitude, infinity = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
    smallest, not_a_number = float32(np.finfo(np.float32).tiny), float32(np.nan)
    whole_from = float32(2**23)  # larger floats are integers

    @njit(nogil=True)
    def nearest(number):  # type: ignore[no-untyped-def]
        """Round a number below 2^23, ties to even; `np.rint` is not vectorized."""
        shift = whole_from if number >= 0 else -whole_from
        return int32((number + shift) - shift)

    @njit(nogil=True)
    def rounded(row, digits, scales, first, last):  # type: ignore[no-untyped-def]
        count = len(digits)
        most = float32(127)
        for _ in range(1, count):
            most *= float32(256)
        row_bits = row.view(np.int32)
        for number in range(first, last):
            start, end = number * block, (number + 1) * block
            values, bits = row[start:end], row_bits[start:end]
            top_bits = int32(0)  # absolute values have the order of their bits
            for place in range(len(bits)):
                top_bits = max(top_bits, int32(bits[place] & magnitude))
            if top_bits >= infinity:
                scales[number, 0] = scales[number, 1] = not_a_number
                continue
            top = np.int32(top_bits).view(np.float32)
            scale, factor = top / most, float32(0)
            if scale < smallest:
                scale = float32(0)
            else:
                factor = most / top
            total = int32(0)
            for place in range(len(values)):
                total += nearest(values[place] * factor)
            half, lower_bits = int32(0), int32(0)  # digits are signed, and higher ones rounded
            for digit in range(count - 1, -1, -1):
                of_digit = digits[digit, start:end]
                for place in range(len(values)):
                    value = int32(nearest(values[place] * factor) + half)
                    of_digit[place] = int8(value >> lower_bits)
                half = int32(int32(half << 8) + int32(128))
                lower_bits += int32(8)
            scales[number, 0] = scale
            scales[number, 1] = scale * float32(total)

    return rounded


@cache
def _norm_loop() -> Any:
    """Compile RMSNorm of a row."""
    from numba import float32, njit

    @njit(nogil=True, fastmath=SUMS)
    def norm(row, weights, epsilon, result):  # type: ignore[no-untyped-def]
        total = float32(0)
        for place in range(len(row)):
            total += row[place] * row[place]
        factor = float32(1) / np.sqrt(total / float32(len(row)) + epsilon)
        for place in range(len(row)):
            result[place] = row[place] * factor * weights[place]

    return norm


@cache
def rotate_loop() -> Any:
    """Compile RoPE of a head in place.

    Arguments: the head, (dim,), cosines and sines of the position, (pairs,), and whether the values
    of a pair are adjacent, instead of half a head apart.
    """
    from numba import njit

    @njit(nogil=True)
    def rotate(side, cosines, sines, neighbors):  # type: ignore[no-untyped-def]
        pairs = len(cosines)
        step, other = (2, 1) if neighbors else (1, pairs)
        for pair in range(pairs):
            one, two = side[step * pair], side[step * pair + other]
            side[step * pair] = one * cosines[pair] - two * sines[pair]
            side[step * pair + other] = two * cosines[pair] + one * sines[pair]

    return rotate


@cache
def _activation_loop() -> Any:
    """Compile `gate = activation(gate) * up` in place, for SiLU and approximate GELU.

    Both are x times the logistic function, of x or of 2 sqrt(2 / pi) (x + 0.044715 x^3).
    """
    from numba import float32, int32, njit

    log2_e, log_2 = float32(1 / math.log(2)), float32(math.log(2))
    gelu_factor = float32(2 * math.sqrt(2 / math.pi))

    @njit(nogil=True, fastmath=SUMS)
    def activate(gate, up, gelu):  # type: ignore[no-untyped-def]
        for place in range(len(gate)):
            x = gate[place]
            inner = x
            if gelu:
                inner = gelu_factor * (x + float32(0.044715) * x * x * x)
            inner = min(max(-inner, float32(-87)), float32(87))
            power = np.rint(inner * log2_e)
            rest = inner - power * log_2
            exp = float32(1 / 720) * rest + float32(1 / 120)
            exp = exp * rest + float32(1 / 24)
            exp = exp * rest + float32(1 / 6)
            exp = exp * rest + float32(0.5)
            exp = exp * rest + float32(1)
            exp = exp * rest + float32(1)
            bits = (int32(power) + int32(127)) << int32(23)
            exp *= np.int32(bits).view(np.float32)
            gate[place] = x / (float32(1) + exp) * up[place]

    return activate


@cache
def _product_loop() -> Any:
    """Compile a thread's share of the product of rounded rows and a linear layer."""
    from numba import njit

    multiply, array = call(9), array_at()
    rows_together, block, tile_rows = ROWS_TOGETHER, BLOCK, TILE_ROWS
    scale_bytes = 4 * SCALE_FLOATS
    function, weights, tile_count = (
        int(LinearEntry.MULTIPLY),
        int(LinearEntry.WEIGHTS),
        int(LinearEntry.TILES),
    )
    block_count, bias_address = int(LinearEntry.BLOCKS), int(LinearEntry.BIAS)

    @njit(nogil=True)
    def product(linear, thread, threads, rows, digits, rounded, scales, result, stride):  # type: ignore[no-untyped-def]
        """Write the thread's columns of the result; return their first and end."""
        tiles, blocks = linear[tile_count], linear[block_count]
        first, last = tiles * thread // threads, tiles * (thread + 1) // threads
        for start in range(0, rows, rows_together):
            count = min(rows_together, rows - start)
            multiply(
                linear[function],
                (
                    linear[weights],
                    first,
                    last,
                    blocks,
                    rounded + start * digits * blocks * block,
                    scales + start * blocks * scale_bytes,
                    count,
                    result + 4 * start * stride,
                    stride,
                ),
            )
        first, last = first * tile_rows, last * tile_rows
        if linear[bias_address] != 0:
            bias = array(linear[bias_address], 1, last)[0]
            products = array(result, rows, stride)
            for row in range(rows):
                for place in range(first, last):
                    products[row, place] += bias[place]
        return first, last

    return product


@cache
def _round_rows_loop() -> Any:
    """Compile the rounding of a thread's rows, or of its columns if there are too few rows."""
    from numba import carray, njit

    rounded_row, array, address_of = round_loop(), array_at(), pointer()
    block, floats = BLOCK, SCALE_FLOATS

    @njit(nogil=True)
    def round_rows(x, stride, columns, rows, digits, rounded, scales, thread, threads):  # type: ignore[no-untyped-def]
        first_row, step, first, last = thread, threads, 0, columns // block
        if rows < threads:
            first_row, step = 0, 1
            first, last = last * thread // threads, last * (thread + 1) // threads
        values = array(x, rows, stride)
        for row in range(first_row, rows, step):
            start = rounded + row * digits * columns
            into = carray(address_of(start), (digits, columns), np.int8)
            factors = array(scales + 4 * row * columns // block * floats, columns // block, floats)
            rounded_row(values[row], into, factors, first, last)

    return round_rows


@cache
def part_loops() -> tuple[int, int, int]:
    """Compile a product, and the parts before and after attention; return their addresses."""
    multiply, before, behind = (
        function_address(f"part {name}", partial(_compile_part, name))
        for name in ("multiply", "before", "behind")
    )
    return multiply, before, behind


@cache
def norm_job() -> int:
    """Compile RMSNorm of rows from `X` to `RESULT`; return its address."""
    return function_address("norm", _compile_norm)


def _compile_part(name: str) -> Any:
    from numba import cfunc, types

    return cfunc(types.void(types.int64, types.int64))(_part_functions()[name])


def _compile_norm() -> Any:
    from numba import cfunc, types

    norm, array, table_of, words, count = (
        _norm_loop(),
        array_at(),
        table_at(),
        PART_WORDS,
        len(Constant),
    )
    THREADS, ROWS, X, WIDTH = map(
        int, (PartTable.THREADS, PartTable.ROWS, PartTable.X, PartTable.WIDTH)
    )
    CONSTANTS, NORM, RESULT = map(int, (PartTable.CONSTANTS, PartTable.NORM, PartTable.RESULT))
    EPSILON = int(Constant.EPSILON)

    def normalize(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        rows, width = table[ROWS], table[WIDTH]
        x, result = array(table[X], rows, width), array(table[RESULT], rows, width)
        epsilon = array(table[CONSTANTS], 1, count)[0, EPSILON]
        weights = array(table[NORM], 1, width)[0]
        for row in range(thread, rows, table[THREADS]):
            norm(x[row], weights, epsilon, result[row])

    return cfunc(types.void(types.int64, types.int64))(normalize)


@cache
def _part_functions() -> dict[str, Any]:
    """Return the uncompiled functions of `part_loops`, by name."""
    from numba import carray, njit

    round_rows, rounded_row, norm = _round_rows_loop(), round_loop(), _norm_loop()
    rotate = rotate_loop()
    product, activate, wait = _product_loop(), _activation_loop(), barrier()
    array, table_of, address_of = array_at(), table_at(), pointer()
    block, floats, linear_words, part_words = BLOCK, SCALE_FLOATS, LINEAR_WORDS, PART_WORDS
    (_, _, _, ROWS, X, WIDTH, DIGITS, ROUNDED, SCALES, NORMED, CONSTANTS, NORM, RESULT, STRIDE,
     LINEARS, Q_NORM, K_NORM, HEADS, KV_HEADS, DIM, KEYS, ANGLES, PAIRS, NEIGHBORS, MIXED,
     RESIDUAL, HIDDEN, MIXED_NORM, LOWERED_NORM, GELU) = map(int, PartTable)  # fmt: skip
    EPSILON, HEAD_EPSILON, FACTOR = map(int, Constant)
    TILES, BLOCKS = int(LinearEntry.TILES), int(LinearEntry.BLOCKS)
    tile_rows, constants = TILE_ROWS, len(Constant)

    @njit(nogil=True)
    def norm_and_round(table, row, values, normed, width):  # type: ignore[no-untyped-def]
        """Normalize a row into the thread's buffer, and round it."""
        digits, blocks = table[DIGITS], width // block
        numbers = array(table[CONSTANTS], 1, constants)[0]
        norm(values, array(table[NORM], 1, width)[0], numbers[EPSILON], normed)
        start = table[ROUNDED] + row * digits * width
        into = carray(address_of(start), (digits, width), np.int8)
        factors = array(table[SCALES] + 4 * row * blocks * floats, blocks, floats)
        rounded_row(normed, into, factors, 0, blocks)

    def multiply(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, part_words + linear_words)
        threads, rows, digits = table[0], table[ROWS], table[DIGITS]
        round_rows(table[X], table[WIDTH], table[WIDTH], rows, digits, table[ROUNDED],
                   table[SCALES], thread, threads)  # fmt: skip
        wait(address, threads, 0)
        product(table[part_words:], thread, threads, rows, digits, table[ROUNDED], table[SCALES],
                table[RESULT], table[STRIDE])  # fmt: skip

    @njit(nogil=True)
    def finish_head(side, weights, epsilon, dim, table, angles, row):  # type: ignore[no-untyped-def]
        """Normalize and rotate a head, as far as the layer does so."""
        if weights != 0:
            norm(side, array(weights, 1, dim)[0], epsilon, side)
        if table[ANGLES] != 0:
            rotate(side, angles[row], angles[table[ROWS] + row], table[NEIGHBORS])

    def before(thread, address):  # type: ignore[no-untyped-def]
        linears = table_of(address, part_words)[LINEARS]
        table = table_of(address, part_words + linears * linear_words)
        threads, rows, width, digits = table[0], table[ROWS], table[WIDTH], table[DIGITS]
        x, normed = array(table[X], rows, width), array(table[NORMED], threads, width)
        for row in range(thread, rows, threads):
            norm_and_round(table, row, x[row], normed[thread], width)
        waited = wait(address, threads, 0)
        into = table[RESULT]
        for number in range(linears):
            linear = table[part_words + number * linear_words :]
            product(linear, thread, threads, rows, digits, table[ROUNDED], table[SCALES], into,
                    table[STRIDE])  # fmt: skip
            into += 4 * tile_rows * linear[TILES]
        if table[ANGLES] == 0 and table[Q_NORM] == 0 and table[K_NORM] == 0:
            return
        wait(address, threads, waited)
        sides = array(table[RESULT], rows, table[STRIDE])
        heads, dim, keys = table[HEADS], table[DIM], table[KEYS]
        angles = array(table[ANGLES], 2 * rows, table[PAIRS])
        epsilon = array(table[CONSTANTS], 1, constants)[0, HEAD_EPSILON]
        heads_of_row = heads + table[KV_HEADS]
        for item in range(thread, rows * heads_of_row, threads):
            row, head = item // heads_of_row, item % heads_of_row
            if head < heads:
                side = sides[row, head * dim : (head + 1) * dim]
                finish_head(side, table[Q_NORM], epsilon, dim, table, angles, row)
            else:
                start = keys + (head - heads) * dim
                side = sides[row, start : start + dim]
                finish_head(side, table[K_NORM], epsilon, dim, table, angles, row)

    def behind(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, part_words + 4 * linear_words)
        threads, rows, width, digits = table[0], table[ROWS], table[WIDTH], table[DIGITS]
        output, gate = table[part_words:], table[part_words + linear_words :]
        up, down = table[part_words + 2 * linear_words :], table[part_words + 3 * linear_words :]
        rounded, scales = table[ROUNDED], table[SCALES]
        numbers = array(table[CONSTANTS], 1, constants)[0]
        epsilon, factor = numbers[EPSILON], numbers[FACTOR]
        x, normed = array(table[X], rows, width), array(table[NORMED], threads, width)
        residual, result = array(table[RESIDUAL], rows, width), array(table[RESULT], rows, width)
        # Output projection of attention.
        columns = output[BLOCKS] * block
        round_rows(table[MIXED], columns, columns, rows, digits, rounded, scales, thread, threads)
        waited = wait(address, threads, 0)
        product(output, thread, threads, rows, digits, rounded, scales, table[RESIDUAL], width)
        waited = wait(address, threads, waited)
        for row in range(thread, rows, threads):
            added = residual[row]
            if table[MIXED_NORM] != 0:
                norm(added, array(table[MIXED_NORM], 1, width)[0], epsilon, added)
            for place in range(width):
                added[place] = x[row, place] + factor * added[place]
            norm_and_round(table, row, added, normed[thread], width)
        waited = wait(address, threads, waited)
        # Gate and up projection.
        hidden = gate[TILES] * tile_rows
        ups_address = table[HIDDEN] + 4 * rows * hidden
        first, last = product(gate, thread, threads, rows, digits, rounded, scales,
                              table[HIDDEN], hidden)  # fmt: skip
        product(up, thread, threads, rows, digits, rounded, scales, ups_address, hidden)
        gates, ups = array(table[HIDDEN], rows, hidden), array(ups_address, rows, hidden)
        for row in range(rows):
            activate(gates[row, first:last], ups[row, first:last], table[GELU])
        waited = wait(address, threads, waited)
        # Down projection.
        round_rows(table[HIDDEN], hidden, hidden, rows, digits, rounded, scales, thread, threads)
        waited = wait(address, threads, waited)
        first, last = product(down, thread, threads, rows, digits, rounded, scales,
                              table[RESULT], width)  # fmt: skip
        if table[LOWERED_NORM] == 0:
            for row in range(rows):
                for place in range(first, last):
                    result[row, place] = residual[row, place] + factor * result[row, place]
            return
        wait(address, threads, waited)
        for row in range(thread, rows, threads):
            lowered = result[row]
            norm(lowered, array(table[LOWERED_NORM], 1, width)[0], epsilon, lowered)
            for place in range(width):
                lowered[place] = residual[row, place] + factor * lowered[place]

    return {"multiply": multiply, "before": before, "behind": behind}
