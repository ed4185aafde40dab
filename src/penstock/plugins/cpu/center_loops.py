"""Compiled products of queries with key centers; see `key_centers`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.attention.selection.rotations import TABLE_BLOCKS, TILE_BLOCKS
from penstock.plugins.cpu.cached_loops import CachedLoop
from penstock.plugins.cpu.index_products import QUERIES, center_product


@cache
def _factor_loop() -> Any:
    """Compile a query's factors of cosines and sines, and its product with unrotated values."""
    from numba import float32, njit

    @njit(nogil=True)
    def factor(query, vector, one, other, still, factors):  # type: ignore[no-untyped-def]
        pairs = len(one)
        for pair in range(pairs):
            a, b = one[pair], other[pair]
            factors[pair] = query[a] * vector[a] + query[b] * vector[b]
            factors[pairs + pair] = query[a] * vector[b] - query[b] * vector[a]
        same = float32(0)
        for place in still:
            same += query[place] * vector[place]
        return same

    return factor


@cache
def _tile_loop() -> Any:
    """Compile the products of a head's queries with a tile of the table."""
    from numba import njit

    (most, fewer, one), (four, two, single) = QUERIES, map(center_product, QUERIES)

    @njit(nogil=True)
    def multiply(tile, factors, added, out, stride):  # type: ignore[no-untyped-def]
        queries, rows = factors.shape
        x, start, query = factors.ctypes.data, added.ctypes.data, 0
        while query + most <= queries:
            four((tile, x + 4 * rows * query, start + 4 * query, out, stride, rows))
            query, out = query + most, out + most * stride
        if query + fewer <= queries:
            two((tile, x + 4 * rows * query, start + 4 * query, out, stride, rows))
            query, out = query + fewer, out + fewer * stride
        if query + one <= queries:
            single((tile, x + 4 * rows * query, start + 4 * query, out, stride, rows))

    return multiply


@cache
def center_loop() -> Any:
    """Compile the scoring of blocks with a table of rotations; see `Rotation.sums`.

    Sums have a fixed order.
    """
    from numba import njit

    factor, multiply = _factor_loop(), _tile_loop()
    lanes, blocks_each = TILE_BLOCKS, TABLE_BLOCKS

    @njit(nogil=True)
    def score(queries, vectors, one, other, still, table, turns, first, scores):  # type: ignore[no-untyped-def]
        heads, m, _ = queries.shape
        pairs, stop, stride = len(one), first + scores.shape[2], scores.strides[1]
        factors = np.empty((m, 2 * pairs), np.float32)
        turned, added = np.empty((m, 2 * pairs), np.float32), np.empty(m, np.float32)
        cut = np.empty((m, lanes), np.float32)
        tile_bytes, start = table.strides[0], table.ctypes.data
        for head in range(heads):
            own, out = scores[head], scores[head].ctypes.data
            for number in range(m):
                added[number] = factor(
                    queries[head, number], vectors[head], one, other, still, factors[number]
                )
            for far in range(first // blocks_each, (stop - 1) // blocks_each + 1):
                for number in range(m):
                    for pair in range(pairs):
                        along, across = factors[number, pair], factors[number, pairs + pair]
                        cosine, sine = turns[far, pair], turns[far, pairs + pair]
                        turned[number, pair] = along * cosine + across * sine
                        turned[number, pairs + pair] = across * cosine - along * sine
                for tile in range(len(table)):
                    block = far * blocks_each + tile * lanes
                    if block + lanes <= first or block >= stop:
                        continue
                    at = start + tile * tile_bytes
                    if first <= block and block + lanes <= stop:
                        multiply(at, turned, added, out + 4 * (block - first), stride)
                        continue
                    multiply(at, turned, added, cut.ctypes.data, cut.strides[0])
                    inside = max(first, block), min(stop, block + lanes)
                    own[:, inside[0] - first : inside[1] - first] = cut[
                        :, inside[0] - block : inside[1] - block
                    ]

    return score


@cache
def cached_center_loop() -> CachedLoop:
    """Return `center_loop` with cached machine code; see `Rotation.sums`."""
    return CachedLoop("score centers", "f3 f2 i1 i1 i1 f3 f2 i f3", center_loop)
