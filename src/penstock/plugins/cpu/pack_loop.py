"""Compiled packing of MLX's codes in tiles, as `tile_products` reads them, and of rows back."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.compiled_jobs import table_at
from penstock.plugins.cpu.tile_products import TILE_ROWS


class PackTable(IntEnum):
    """Entries of the table of a job that packs a matrix."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    CODES = 3
    """Address of (rows, groups, blocks of a group, bits) words of 32 bits: a stream of codes,
    lowest bits first."""
    SCALES = 4
    """Address of (rows, groups) numbers."""
    OFFSETS = 5
    """The same; 0 for offsets that are not stored."""
    TILES = 6
    """Address of the tiles, of which each byte is written."""
    ROWS = 7
    GROUPS = 8
    PER_SCALE = 9
    """Blocks of a group."""
    BITS = 10
    """Bits of a code of MLX, 2 to 8."""
    STORED = 11
    """Bits of a code in tiles: 4, 5, 6 or 8."""
    SCALE_BYTES = 12
    """Bytes of a scale, and of an offset: 2 or 4."""


@cache
def pack_loop() -> int:
    """Compile the job of `PackTable`; return its address."""
    return function_address("pack", _compile_pack)


def _compile_pack() -> Any:
    from numba import carray, cfunc, int64, njit, types

    table_of, address_of, words, lanes = table_at(), pointer(), len(PackTable), TILE_ROWS
    (THREADS, _, _, CODES, SCALES, OFFSETS, TILES, ROWS, GROUPS, PER_SCALE, BITS, STORED,
     SCALE_BYTES) = map(int, PackTable)  # fmt: skip
    low_halves, single, word_bits, half_bytes = 0x0F0F0F0F, 0x01010101, 32, 2
    fours, narrow, wide = 8, 4, 8  # fours of columns in a block; bits of codes

    @njit(nogil=True, inline="always")
    def four(codes, start, number, bits):  # type: ignore[no-untyped-def]
        """Return four codes of a block, one a byte."""
        first = 4 * number * bits
        place, shift = start + first // word_bits, first % word_bits
        stream = int64(codes[place])
        if shift + 4 * bits > word_bits:
            stream |= int64(codes[place + 1]) << word_bits
        stream >>= shift
        mask = (1 << bits) - 1
        return (
            stream & mask
            | (stream >> bits & mask) << 8
            | (stream >> 2 * bits & mask) << 16
            | (stream >> 3 * bits & mask) << 24
        )

    @njit(nogil=True)
    def write(codes, start, bits, tiles, place, stored):  # type: ignore[no-untyped-def]
        """Write the codes of a block of a row, in the layout of `tile_products`."""
        if stored == wide:
            for number in range(fours):
                tiles[place + number * lanes] = four(codes, start, number, bits)
            return
        for number in range(narrow):  # four columns in the low halves of bytes, four in the high
            low = four(codes, start, 2 * number, bits)
            high = four(codes, start, 2 * number + 1, bits)
            tiles[place + number * lanes] = low & low_halves | (high & low_halves) << narrow
        more = stored - narrow
        if more > 0:
            together, mask = fours // more, single * ((1 << more) - 1)
            for number in range(more):
                bits_of_all = 0
                for part in range(together):
                    code = four(codes, start, number * together + part, bits)
                    bits_of_all |= (code >> narrow & mask) << more * part
                tiles[place + (narrow + number) * lanes] = bits_of_all

    def pack(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        rows, groups, per_scale = table[ROWS], table[GROUPS], table[PER_SCALE]
        bits, stored, is_half = table[BITS], table[STORED], table[SCALE_BYTES] == half_bytes
        sides = 2 if table[OFFSETS] else 1
        header = sides * lanes * table[SCALE_BYTES] // 4
        record = header + lanes * per_scale * stored
        count = (rows + lanes - 1) // lanes
        codes = carray(address_of(table[CODES]), (rows * groups * per_scale * bits,), np.uint32)
        tiles = carray(address_of(table[TILES]), (count * groups * record,), np.uint32)
        halves = carray(address_of(table[TILES]), (2 * count * groups * record,), np.uint16)
        for side in range(sides):
            numbers = table[SCALES] if side == 0 else table[OFFSETS]
            whole = carray(address_of(numbers), (rows * groups,), np.uint32)
            half = carray(address_of(numbers), (rows * groups,), np.uint16)
            for tile in range(thread, count, table[THREADS]):
                for group in range(groups):
                    place = (tile * groups + group) * record
                    for lane in range(lanes):
                        row = tile * lanes + lane
                        number = row * groups + group
                        if is_half:
                            into = 2 * place + side * lanes + lane
                            halves[into] = half[number] if row < rows else 0
                        else:
                            into = place + side * lanes + lane
                            tiles[into] = whole[number] if row < rows else 0
        for tile in range(thread, count, table[THREADS]):
            for group in range(groups):
                place = (tile * groups + group) * record + header
                for lane in range(lanes):
                    row = tile * lanes + lane
                    for block in range(per_scale):
                        into = place + block * stored * lanes + lane
                        if row < rows:
                            start = ((row * groups + group) * per_scale + block) * bits
                            write(codes, start, bits, tiles, into, stored)
                        else:
                            for word in range(stored):
                                tiles[into + word * lanes] = 0

    return cfunc(types.void(types.int64, types.int64))(pack)


class RowTable(IntEnum):
    """Entries of the table of a job that converts rows of a packed matrix to float32."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    TILES = 3
    """Address of the tiles."""
    GROUPS = 4
    PER_SCALE = 5
    """Blocks of a group."""
    STORED = 6
    """Bits of a code in tiles: 4, 5, 6 or 8."""
    SCALE_BYTES = 7
    """Bytes of a scale, and of an offset: 2 or 4."""
    ZERO = 8
    """Code that represents 0; 0 if offsets are stored."""
    VALUES = 9
    """Address of the float32 value of each code, (256,)."""
    ROWS = 10
    """Address of the numbers of the rows, (count,)."""
    COUNT = 11
    RESULT = 12
    """Address of (count, columns) float32."""


@cache
def row_loop() -> int:
    """Compile the job of `RowTable`; return its address."""
    return function_address("rows", _compile_rows)


def _compile_rows() -> Any:
    from numba import carray, cfunc, float32, njit, types

    table_of, address_of, words, lanes = table_at(), pointer(), len(RowTable), TILE_ROWS
    (THREADS, _, _, TILES, GROUPS, PER_SCALE, STORED, SCALE_BYTES, ZERO, VALUES, ROWS, COUNT,
     RESULT) = map(int, RowTable)  # fmt: skip
    narrow, wide, block, half_bytes = 4, 8, 32, 2
    fraction_bits, rebias, most_exponent = 10, 127 - 15, 31  # float16 to float32
    smallest = float32(2.0**-24)

    @njit(nogil=True)
    def float_of(half):  # type: ignore[no-untyped-def]
        """Convert the bits of a float16."""
        exponent, fraction = half >> fraction_bits & most_exponent, half & 0x3FF
        if exponent == 0:
            number = float32(fraction) * smallest
        else:
            exponent = 255 if exponent == most_exponent else exponent + rebias
            number = np.int32(exponent << 23 | fraction << 13).view(np.float32)
        return -number if half & 0x8000 else number

    @njit(nogil=True)
    def code(tiles, place, column, stored):  # type: ignore[no-untyped-def]
        """Return the code of a column of a block; see `write` in `_compile_pack`."""
        shift = 8 * (column % 4)
        four = column // 4
        if stored == wide:
            return tiles[place + four * lanes] >> shift & 0xFF
        number = tiles[place + four // 2 * lanes] >> shift >> narrow * (four % 2) & 0xF
        more = stored - narrow
        if more > 0:
            together = block // 4 // more
            bits = tiles[place + (narrow + four // together) * lanes] >> shift
            number |= (bits >> more * (four % together) & ((1 << more) - 1)) << narrow
        return number

    def rows_of(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        groups, per_scale, stored = table[GROUPS], table[PER_SCALE], table[STORED]
        is_half, zero = table[SCALE_BYTES] == half_bytes, table[ZERO]
        header = (1 if zero else 2) * lanes * table[SCALE_BYTES] // 4
        record = header + lanes * per_scale * stored
        columns = groups * per_scale * block
        numbers = carray(address_of(table[ROWS]), (table[COUNT],), np.int64)
        values = carray(address_of(table[VALUES]), (256,), np.float32)
        result = carray(address_of(table[RESULT]), (table[COUNT], columns), np.float32)
        for row in range(thread, table[COUNT], table[THREADS]):
            tile, lane = numbers[row] // lanes, numbers[row] % lanes
            start = table[TILES] + 4 * tile * groups * record
            tiles = carray(address_of(start), (groups * record,), np.uint32)
            halves = carray(address_of(start), (2 * groups * record,), np.uint16)
            floats = carray(address_of(start), (groups * record,), np.float32)
            for group in range(groups):
                place = group * record
                if is_half:
                    scale = float_of(np.int64(halves[2 * place + lane]))
                else:
                    scale = floats[place + lane]
                if zero:
                    offset = -float32(zero) * scale
                elif is_half:
                    offset = float_of(np.int64(halves[2 * place + lanes + lane]))
                else:
                    offset = floats[place + lanes + lane]
                for number in range(per_scale):
                    from_place = place + header + number * stored * lanes + lane
                    into = (group * per_scale + number) * block
                    for column in range(block):
                        of_column = code(tiles, from_place, column, stored)
                        product = values[np.int64(of_column)] * scale
                        result[row, into + column] = product + offset

    return cfunc(types.void(types.int64, types.int64))(rows_of)
