"""Vector code of attention of many queries to the same tokens; see `group_loops`.

A vector holds one number of 16 queries, a lane each, so that no sum crosses lanes: a key's or
value's number is multiplied with all of them at once. Lanes do not depend on each other, and tokens
are added in order, so results do not depend on which queries are computed together.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.plugins.cpu.attention_tiles import LANES, UNSEEN, Vectors, vector_function

TOKENS_TOGETHER = 6
"""Keys, or numbers of a value, that are multiplied together: 12 registers of 8 numbers hold the
sums."""
TOP, TOTAL, FACTOR, MIXED = 0, 1, 2, 3
"""Vectors of the state of 16 queries: largest score, sum of weights, factor that the last tile
gave to what was before it, and from there on the mixed values."""


def state_vectors(value_dim: int) -> int:
    """Return the number of vectors of a state."""
    return MIXED + value_dim


@cache
def score_function(key_dim: int) -> Any:
    """Return a function that multiplies 16 queries with keys.

    Its arguments: addresses of the queries, (key_dim, LANES), of the keys, (n, key_dim), and of the
    scores, (n, LANES), all float32; and how many times `TOKENS_TOGETHER` keys there are.
    """

    def body(of: Vectors, queries: Any, keys: Any, scores: Any, count: Any) -> None:
        from numba.core import cgutils

        builder = of.builder
        with cgutils.for_range(builder, count) as loop:
            first = builder.mul(loop.index, of.number(TOKENS_TOGETHER))
            start = of.offset(keys, builder.mul(first, of.number(key_dim)))
            into = of.offset(scores, builder.mul(first, of.number(LANES)))
            sums = [
                cgutils.alloca_once_value(builder, of.every(0.0)) for _ in range(TOKENS_TOGETHER)
            ]
            with cgutils.for_range(builder, of.number(key_dim)) as inner:
                x = of.load(of.offset(queries, builder.mul(inner.index, of.number(LANES))))
                place = of.offset(start, inner.index)
                for key, total in enumerate(sums):
                    number = of.spread(of.load_float(of.offset(place, key * key_dim)))
                    builder.store(of.fused(number, x, builder.load(total)), total)
            for key, total in enumerate(sums):
                of.store(builder.load(total), of.offset(into, key * LANES))

    return vector_function(4, body)


@cache
def weigh_function() -> Any:
    """Return a function that turns scores of 16 queries into weights.

    Its arguments: addresses of the scores, (n, LANES) float32, and of the tokens' positions, (n,)
    int32; n; and addresses of the queries' positions, (LANES,) int32, and of their state.
    """

    def body(of: Vectors, scores: Any, tokens: Any, n: Any, lanes: Any, state: Any) -> None:
        from numba.core import cgutils

        builder = of.builder
        positions = builder.bitcast(of.load(lanes), of.ints)
        before = of.load(of.offset(state, TOP * LANES))
        top = cgutils.alloca_once_value(builder, before)
        with cgutils.for_range(builder, n) as loop:
            place = of.offset(scores, builder.mul(loop.index, of.number(LANES)))
            token = of.spread(of.load_float(of.offset(tokens, loop.index)))
            seen = builder.icmp_signed("<=", builder.bitcast(token, of.ints), positions)
            score = builder.select(seen, of.load(place), of.every(UNSEEN))
            of.store(score, place)
            builder.store(of.greater(score, builder.load(top)), top)
        largest = builder.load(top)
        factor = of.exp(builder.fsub(before, largest))
        total = builder.fmul(of.load(of.offset(state, TOTAL * LANES)), factor)
        total = cgutils.alloca_once_value(builder, total)
        with cgutils.for_range(builder, n) as loop:
            place = of.offset(scores, builder.mul(loop.index, of.number(LANES)))
            score = of.load(place)
            weight = of.exp(builder.fsub(score, largest))
            unseen = builder.fcmp_ordered("<=", score, of.every(UNSEEN))
            weight = builder.select(unseen, of.every(0.0), weight)
            of.store(weight, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        for place, value in ((TOP, largest), (TOTAL, builder.load(total)), (FACTOR, factor)):
            of.store(value, of.offset(state, place * LANES))

    return vector_function(5, body)


@cache
def mix_function(value_dim: int) -> Any:
    """Return a function that adds weighted values to the state of 16 queries.

    Its arguments: addresses of the weights, (n, LANES), and of the values, (n, value_dim), float32;
    n; and the address of the state.
    """

    def body(of: Vectors, weights: Any, values: Any, n: Any, state: Any) -> None:
        from numba.core import cgutils

        builder = of.builder
        factor = of.load(of.offset(state, FACTOR * LANES))
        for first in range(0, value_dim, TOKENS_TOGETHER):
            numbers = range(first, min(first + TOKENS_TOGETHER, value_dim))
            places = [of.offset(state, (MIXED + number) * LANES) for number in numbers]
            sums = [
                cgutils.alloca_once_value(builder, builder.fmul(of.load(place), factor))
                for place in places
            ]
            with cgutils.for_range(builder, n) as loop:
                weight = of.load(of.offset(weights, builder.mul(loop.index, of.number(LANES))))
                value = of.offset(values, builder.mul(loop.index, of.number(value_dim)))
                for number, total in zip(numbers, sums, strict=True):
                    spread = of.spread(of.load_float(of.offset(value, number)))
                    builder.store(of.fused(spread, weight, builder.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                of.store(builder.load(total), place)

    return vector_function(4, body)
