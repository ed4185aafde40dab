"""Compiled products of queries with key centers; see `key_centers`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.plugins.cpu.compiled import FOUR


@cache
def _factor_loop() -> Any:
    """Compile the factors of one query: cosines, then sines."""
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
def _turn_loop() -> Any:
    """Compile the sums of the blocks' rotations for four queries, two rows at a time."""
    from numba import njit

    @njit(nogil=True, fastmath={"contract"})
    def turn(factors, table, start, sums):  # type: ignore[no-untyped-def]
        blocks = sums.shape[1]
        first, second, third, fourth = sums[0], sums[1], sums[2], sums[3]
        for row in range(0, factors.shape[1], 2):
            x, y = table[row, start : start + blocks], table[row + 1, start : start + blocks]
            a, b, c, d = factors[0, row], factors[1, row], factors[2, row], factors[3, row]
            e, f = factors[0, row + 1], factors[1, row + 1]
            g, h = factors[2, row + 1], factors[3, row + 1]
            for block in range(blocks):
                first[block] += a * x[block] + e * y[block]
                second[block] += b * x[block] + f * y[block]
                third[block] += c * x[block] + g * y[block]
                fourth[block] += d * x[block] + h * y[block]

    return turn


@cache
def center_loop() -> Any:
    """Compile the scores of blocks by one table of rotations; see `Rotation.sums`.

    The sum of a block has a fixed order.
    """
    from numba import njit

    factor, turn, together = _factor_loop(), _turn_loop(), FOUR

    @njit(nogil=True)
    def score(queries, vectors, one, other, still, table, start, at, count, scores):  # type: ignore[no-untyped-def]
        heads, m, _ = queries.shape
        factors = np.zeros((together, 2 * len(one)), np.float32)
        sums = np.zeros((together, count), np.float32)
        for group in range(0, heads * m, together):  # of all heads: they have one table
            queries_here = min(together, heads * m - group)
            for lane in range(queries_here):
                head, number = divmod(group + lane, m)
                query, vector = queries[head, number], vectors[head]
                sums[lane] = factor(query, vector, one, other, still, factors[lane])
            turn(factors, table, start, sums)
            for lane in range(queries_here):
                head, number = divmod(group + lane, m)
                scores[head, number, at : at + count] = sums[lane]

    return score
