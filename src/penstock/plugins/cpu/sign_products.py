"""Products with sign vectors on the CPU, from lookup tables."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kv.numpy_arrays import Floats

Octets: TypeAlias = npt.NDArray[np.uint8]
Sums: TypeAlias = npt.NDArray[np.int64]
Halves: TypeAlias = npt.NDArray[np.uint16]
"""Sums of one lane, or bits of float16."""

LANES = 4
"""Number of queries of a KV head whose sums are packed into one 64-bit word."""
LANE_BITS = 16
LEVELS = 31
"""Number of levels for a row's size relative to the largest in its block."""
MOST = 2 ** (LANE_BITS - 1) // LEVELS
"""Maximum sum of a row's values that stays in its lane when multiplied by the levels."""
MOST_ALONE = 2 ** (LANE_BITS - 1) - 1
"""Maximum sum without multiplication by levels."""
HIDDEN = np.int64(-(2**63) + 2**47 + 2**31 + 2**15)
"""Half of every lane's range, added so that lanes compare as unsigned integers."""
STEP = 8
"""Difference of two float16, read as integers, up to which they have the same level."""
LEVELS_BELOW = np.rint(LEVELS * 2.0 ** (-(np.arange(1024) * STEP + STEP / 2) / 1024)).astype(
    np.int64
)
"""Level of a size, by its distance below the largest; float16 bits grow like logarithms."""
BLOCKS_AT_ONCE = 1_024
"""Blocks of a head processed together, so that they fit into the CPU's cache."""


def best_by_block(x: Floats, codes: Octets, sizes: npt.NDArray[np.float16], block: int) -> Floats:
    """Return the largest product of each block of rows, which are sign vectors with a size.

    The values of four queries become integers packed into a word. Their sums for all 256 values of
    an octet are tabulated. A row is then n / 8 lookups, each adding for all four queries.

    Args:
        x: queries, (heads, m, n).
        codes: (heads, rows, n / 8), one bit per value; 1 is plus; whole blocks.
        sizes: size of each row, (heads, rows), not negative.
        block: number of rows per block.

    Returns:
        Array (heads, m, rows / block); not finite for a block with a size that is not.
    """
    heads, m, _ = x.shape
    whole, units = _packed(x)
    tables = _tables(whole)
    blocks = codes.shape[1] // block
    best = np.empty((heads, tables.shape[1] * LANES, blocks), np.float32)
    largest = np.empty((heads, blocks), np.uint16)
    for head in range(heads):
        for first in range(0, blocks, BLOCKS_AT_ONCE):
            batch = slice(first, min(first + BLOCKS_AT_ONCE, blocks))
            rows = slice(batch.start * block, batch.stop * block)
            levels, largest[head, batch] = _levels(sizes[head, rows], block)
            octets = _by_place(codes[head, rows], block)
            best[head, :, batch] = _largest(tables[head], octets, levels)
    return products(best[:, :m], largest, units)


def products(best: Floats, largest: Halves, units: Floats) -> Floats:
    """Return products from the blocks' best sums, which are offset by half of a lane's range.

    Args:
        best: integers, (heads, m, blocks).
        largest: bits of each block's largest size, (heads, blocks).
        units: units of the integers, (heads, m, 1).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        steps = largest.view(np.float16).astype(np.float32) / LEVELS
        scaled: Floats = (best - 2 ** (LANE_BITS - 1)) * steps[:, None] * units
    return scaled


def units_of(x: Floats, most: int = MOST) -> Floats:
    """Return the unit of each query's integers, (heads, m, 1).

    Args:
        x: (heads, m, n).
        most: maximum sum of a row's values.
    """
    total = np.abs(x).sum(axis=-1, keepdims=True)
    # Rounded, each number may be half a unit more.
    units: Floats = np.maximum(total, 1e-30) / np.float32(most - x.shape[-1] / 2)
    return units


def _packed(x: Floats) -> tuple[Sums, Floats]:
    """Return queries as integers, four per word, and their units.

    Args:
        x: (heads, m, n).

    Returns:
        Arrays (heads, words, n / 8, 8) and (heads, m, 1).
    """
    heads, m, n = x.shape
    words = -(-m // LANES)
    units = units_of(x)
    whole = np.zeros((heads, words * LANES, n), np.int64)
    whole[:, :m] = np.rint(np.nan_to_num(x / units))
    shifts = LANE_BITS * np.arange(LANES)[:, None]
    together = (whole.reshape(heads, words, LANES, n) << shifts).sum(axis=2)
    return together.reshape(heads, words, n // 8, 8), units


def _tables(octets: Sums) -> Sums:
    """Return the sums for all values of octets, (heads, words, n / 8, 256)."""
    tables = np.empty((*octets.shape[:-1], 256), np.int64)
    tables[..., 0] = -octets.sum(axis=-1)
    for bit in range(8):
        known, more = slice(1 << bit), slice(1 << bit, 2 << bit)
        np.add(tables[..., known], 2 * octets[..., bit : bit + 1], out=tables[..., more])
    return tables


def _levels(sizes: npt.NDArray[np.float16], block: int) -> tuple[Sums, Halves]:
    """Return the levels of rows, (block, blocks), and the bits of each block's largest size."""
    bits = sizes.view(np.uint16).reshape(-1, block).T
    largest = bits.max(axis=0)
    below = np.minimum((largest - bits) // STEP, len(LEVELS_BELOW) - 1)
    return LEVELS_BELOW.take(below), largest


def _by_place(codes: Octets, block: int) -> Octets:
    """Return codes ordered by their position in the block, (block, blocks, octets)."""
    rows, octets = codes.shape
    row = codes.view(np.dtype((np.void, octets))).reshape(rows // block, block)
    return np.ascontiguousarray(row.T).view(np.uint8).reshape(block, -1, octets)


def _largest(tables: Sums, octets: Octets, levels: Sums) -> Halves:
    """Return the largest sum of each block's rows, offset by half of the range, (m, blocks)."""
    tops = []
    more = np.empty(levels.shape, np.int64)
    for table in tables:
        sums = table[0].take(octets[..., 0])
        for number in range(1, octets.shape[-1]):
            sums += table[number].take(octets[..., number], out=more, mode="clip")
        sums *= levels
        sums += HIDDEN
        lanes = sums.view(np.uint16).reshape(*levels.shape, LANES)
        tops.append(lanes.max(axis=0).T)
    return np.concatenate(tops)
