"""Compiled parts of a decoder layer before and after attention.

Each is a job of `compiled_jobs`, whose table begins with the entries of `PartTable` and ends with
the linear layers, `LINEAR_WORDS` each. The threads divide rows where these are normalized and
rounded, and the rows of weight matrices in products.
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
"""Rows of activations multiplied with a part of the weights before the next ones."""


class LinearEntry(IntEnum):
    """Entries of a linear layer."""

    MULTIPLY = 0
    """Address of the function of `multiply_loop`."""
    WEIGHTS = 1
    TILES = 2
    BLOCKS = 3
    BIAS = 4
    """Address of the bias, (tiles x 16,) float32; 0 without one."""


LINEAR_WORDS = len(LinearEntry)


class PartTable(IntEnum):
    """Entries of the table of a part of a layer; addresses are of float32 arrays, 0 for none."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    ROWS = 3
    X = 4
    """Rows (rows, width): the layer's input."""
    WIDTH = 5
    DIGITS = 6
    """Bytes of an activation."""
    ROUNDED = 7
    """Address of space for rounded activations, (rows, digits, most columns) int8."""
    SCALES = 8
    """Space for their scales and sums, (rows, most blocks, 2)."""
    NORMED = 9
    """Space for a normalized row of each thread."""
    CONSTANTS = 10
    """Address of `Constant`."""
    NORM = 11
    """Weights of the norm before the first product, or of the one before the MLP."""
    RESULT = 12
    """(rows, stride): queries, keys and values, or the layer's output."""
    STRIDE = 13
    LINEARS = 14
    """Number of linear layers before attention."""
    Q_NORM = 15
    K_NORM = 16
    HEADS = 17
    KV_HEADS = 18
    DIM = 19
    KEYS = 20
    """First column of the keys in the result."""
    ANGLES = 21
    """Cosines and sines of the rows' positions, (2, rows, pairs); 0 to rotate nothing."""
    PAIRS = 22
    NEIGHBORS = 23
    """Whether a pair is two neighbors, and not of the two halves."""
    MIXED = 24
    """(rows, columns): output of attention."""
    RESIDUAL = 25
    """Space (rows, width)."""
    HIDDEN = 26
    """Space (2, rows, hidden): gate and up projection."""
    MIXED_NORM = 27
    LOWERED_NORM = 28
    GELU = 29
    """Whether the activation is the approximate GELU, and not SiLU."""


PART_WORDS = len(PartTable)


class Constant(IntEnum):
    """Numbers of a layer."""

    EPSILON = 0
    HEAD_EPSILON = 1
    RESIDUAL_FACTOR = 2


@cache
def round_loop() -> Any:
    """Compile the rounding of a row to digits of 8 bits with a scale for each block.

    Arguments: the row (columns,), its digits (digits, columns) int8, scales (blocks, 2), and the
    first block and one past the last.

    A block with an infinity or NaN gets a scale of NaN, and so do its products. One whose scale
    would be subnormal becomes zeros: its numbers are below 1e-31. No fast-math flag is set, so that
    bits are the same on every processor.
    """
    from numba import float32, int8, int32, njit

    block = BLOCK
    magnitude, infinity = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
    smallest, not_a_number = float32(np.finfo(np.float32).tiny), float32(np.nan)
    whole_from = float32(2**23)  # larger floats are whole numbers

    @njit(nogil=True)
    def nearest(number):  # type: ignore[no-untyped-def]
        """Return the nearest integer below 2^23, even for a tie; `np.rint` is not vectorized."""
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
            top_bits = int32(0)  # without their signs, floats are in the order of their bits
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
            half, lower_bits = int32(0), int32(0)  # digits have signs: lower ones are rounded away
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

    Arguments: the head (dim,), cosines and sines of the position (pairs,), and whether a pair is
    two neighbors, and not one number of each half.
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
    """Compile `gate = activation(gate) * up` in place: SiLU or the approximate GELU.

    Both are x times the logistic function: of x, or of 2 sqrt(2 / pi) (x + 0.044715 x^3).
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
    """Compile a thread's share of the product of rounded rows with a linear layer."""
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
        """Write to the result's columns first..last, and return them."""
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
    """Compile the rounding of a thread's rows, or of its share of each if there are too few."""
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
    """Compile a single product, and the parts before and after attention; return addresses."""
    multiply, before, behind = (
        function_address(f"part {name}", partial(_compile_part, name))
        for name in ("multiply", "before", "behind")
    )
    return multiply, before, behind


def _compile_part(name: str) -> Any:
    from numba import cfunc, types

    return cfunc(types.void(types.int64, types.int64))(_part_functions()[name])


@cache
def _part_functions() -> dict[str, Any]:
    """Return the functions of `part_loops`, to be compiled."""
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
        """Normalize a row's values, in space of the thread, and round it."""
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
        """Normalize a head, and rotate it."""
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
