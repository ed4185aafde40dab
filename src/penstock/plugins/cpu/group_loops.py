"""Compiled choice and attention of a prompt's groups of positions; see `chunk_choice`.

All queries of a group, of all heads that share keys, read the same blocks. So these are copied, a
tile of tokens at a time, and multiplied with 16 queries at once.

A vector holds one number of 16 queries, a lane each, so that no sum crosses lanes: a key's or
value's number is multiplied with all of them at once. Lanes do not depend on each other, and tokens
are added in order, so results do not depend on which queries are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.rotations import Rotation
from penstock.config.defaults import ATTEND_GROUP_TOKENS
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.plugins.cpu.attending_loops import PLACES, list_loop
from penstock.plugins.cpu.attention_tiles import (
    HALF_BYTES,
    LANES,
    UNSEEN,
    Vectors,
    vector_function,
    widen_function,
)
from penstock.plugins.cpu.cached_loops import CachedLoop
from penstock.plugins.cpu.center_loops import center_loop
from penstock.plugins.cpu.choice_loops import SpanTable
from penstock.plugins.cpu.choosing_loops import choose_loop
from penstock.plugins.cpu.compiled import pointer

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


TILE_TOKENS = 3 * BLOCK_TOKENS
"""Tokens whose keys and values are in the processor's first cache at a time."""
TASKS_OF_THREAD = 3
"""Fewest tasks of a thread, so that none waits long for the other."""
GroupTask: TypeAlias = tuple[int, slice]
"""Index of a KV head, and indices of groups."""
GROUP_VECTORS = ATTEND_GROUP_TOKENS // LANES


@dataclass(frozen=True, slots=True)
class GroupQueries:
    """Queries of the groups of a chunk, on the host."""

    queries: Floats
    """Queries of the model, (n, heads, key_dim), scaled so that e^score is a weight."""
    first: int
    """Position of the first query."""
    groups: Integers
    """First and end of each group's queries, (groups, 2)."""
    asking: Floats
    """Queries that a group's choice is made for, (kv_heads, groups, m, key_dim), scaled."""
    whole: Floats
    """Whole numbers of these, see `KeyIndex.whole_queries`, (kv_heads, groups, m, n)."""
    units: Floats
    """Score of half a product with these, (kv_heads, groups, m, 1)."""
    stops: Integers
    """Index of each group's first block with recent tokens, (groups,)."""
    sinks: Floats | None
    """Attention sinks in base e, (heads,)."""
    nbytes: int
    """Bytes of a number of the keys and values."""


@dataclass(frozen=True, slots=True)
class GroupLoops:
    """Loops for keys and values of one size; all release the GIL."""

    key_dim: int
    value_dim: int
    words: int
    """Words of the index of a token's key."""
    _choose: CachedLoop
    _attend: CachedLoop

    def compile(self) -> None:
        """Load or compile all loops in advance; compiling takes some seconds."""
        self._choose.compile()
        self._attend.compile()

    def choose(
        self,
        queries: GroupQueries,
        spans: SpanTable,
        head: int,
        groups: slice,
        count: int,
        centers: tuple[Rotation, Floats] | None,
    ) -> Integers:
        """Select the best blocks of some groups for a KV head; return sorted indices, (n, count).

        Args:
            queries: queries of all groups.
            spans: locations of the indexed tokens.
            head: index of the KV head.
            groups: indices of the groups.
            count: number of blocks to select.
            centers: rotation, and the unrotated vectors of all heads, that the index leaves out.
        """
        stops = queries.stops[groups]
        chosen = np.empty((len(stops), count), np.int64)
        if centers is None:
            centers = Rotation.none(self.key_dim), np.zeros((head + 1, self.key_dim), np.float32)
        rotation, vectors = centers
        asked: list[npt.NDArray[Any]] = [
            x[head, groups] for x in (queries.whole, queries.units, queries.asking)
        ]
        turns = rotation.turns(int(stops.max()))
        turned: list[npt.NDArray[Any]] = [vectors[head : head + 1], *rotation.channels, *turns]
        self._choose(*asked, *turned, spans.sides, spans.starts, head, stops, chosen)
        return chosen

    def attend(
        self,
        queries: GroupQueries,
        spans: SpanTable,
        head: int,
        groups: slice,
        chosen: Integers,
        mixed: Floats,
        spilled: Integers | None = None,
    ) -> None:
        """Attend with the queries of some groups to what they read, for a KV head.

        Args:
            queries: queries of all groups.
            spans: spans of one dtype, the chunk's own tokens last.
            head: index of the KV head.
            groups: indices of the groups.
            chosen: their blocks, see `choose`.
            mixed: (n, heads, value_dim) float32, whose rows are written.
            spilled: addresses of the keys and values of spilled blocks among those that each group
                reads, in order, (n, blocks, 2); the caller keeps them alive.
        """
        if spilled is None:
            spilled = np.zeros((len(chosen), 0, 2), np.int64)
        heads = queries.queries.shape[1]
        sinks = np.full(heads, UNSEEN, np.float32) if queries.sinks is None else queries.sinks
        per_head = heads // len(queries.asking)
        rows = queries.queries, queries.first, queries.groups[groups]
        read = chosen, queries.stops[groups], spilled, spans.sides, spans.starts
        self._attend(*rows, *read, head, per_head, queries.nbytes, sinks, mixed)


@cache
def group_loops(key_dim: int, value_dim: int, signs: int) -> GroupLoops:
    """Return the loops for keys and values of a size, with `signs` signs of a key in the index."""
    words = signs // 32
    choose = CachedLoop(
        f"choose groups {words}",
        "f3 f3 f3 f2 i1 i1 i1 f3 f2 i3 i1 i i1 i2",
        partial(_choose_loop, words),
    )
    attend = CachedLoop(
        f"attend groups {key_dim} {value_dim}",
        "f3 i i2 i2 i1 i3 i3 i1 i i i f1 f3",
        partial(_attend_loop, key_dim, value_dim),
    )
    return GroupLoops(key_dim, value_dim, words, choose, attend)


def group_tasks(kv_heads: int, groups: int, threads: int) -> list[GroupTask]:
    """Divide the groups of all KV heads into tasks of about equal work, some for each thread."""
    parts = min(groups, -(-TASKS_OF_THREAD * threads // kv_heads))
    cuts = [groups * part // parts for part in range(parts + 1)]
    return [(head, slice(first, end)) for head in range(kv_heads) for first, end in pairwise(cuts)]


@cache
def _choose_loop(words: int) -> Any:
    """Compile the selection of blocks for groups, one after the other."""
    from numba import njit

    choose, center = choose_loop(words), center_loop()

    @njit(nogil=True)
    def choose_all(  # type: ignore[no-untyped-def]
        whole, units, asking, vectors, one, other, still, table, turns, sides, starts, head, stops,
        chosen,
    ):  # fmt: skip
        for group in range(len(chosen)):
            part, stop = slice(group, group + 1), stops[group]
            beside = np.empty((1, whole.shape[1], stop), np.float32)
            center(asking[part], vectors, one, other, still, table, turns, 0, beside)
            choose(whole[part], units[part], beside, sides, starts, head, stop, chosen[part])

    return choose_all


@cache
def _take_loop(key_dim: int, value_dim: int) -> Any:
    """Compile the copy of a block's tokens, up to `stop`, into a tile.

    It returns the tile's tokens, and the span from which to search for the next block.
    """
    from numba import carray, njit

    address_of, widen, half = pointer(), widen_function(), HALF_BYTES
    block_tokens, row = BLOCK_TOKENS, PLACES

    @njit(nogil=True)
    def take(spans, head, block, stop, span, nbytes, elsewhere, tile, tokens):  # type: ignore[no-untyped-def]
        (sides, starts), (keys, values, places) = spans, tile
        token = block * block_tokens
        end = min(token + block_tokens, stop)
        while token < end:
            while starts[span + 1] <= token:
                span += 1
            side, column = sides[span], token - starts[span]
            run = min(end, starts[span + 1]) - token
            key, value = side[0, 0] + head * side[0, 1], side[1, 0] + head * side[1, 1]
            if side[row, 0] != 0:
                key, value, column = elsewhere[0], elsewhere[1], token - block * block_tokens
            key += column * (key_dim * nbytes)
            value += column * (value_dim * nbytes)
            if nbytes == half:
                widen((key, keys[tokens:].ctypes.data, run * key_dim))
                widen((value, values[tokens:].ctypes.data, run * value_dim))
            else:
                keys[tokens : tokens + run] = carray(address_of(key), (run, key_dim), np.float32)
                held = carray(address_of(value), (run, value_dim), np.float32)
                values[tokens : tokens + run] = held
            for number in range(run):
                places[tokens + number] = token + number
            tokens, token = tokens + run, token + run
        return tokens, span

    return take


@cache
def _lane_loops(key_dim: int, value_dim: int) -> tuple[Any, Any]:
    """Compile the copy of a group's queries into lanes, and of its results out of them."""
    from numba import float32, njit

    lanes, vectors = LANES, GROUP_VECTORS
    top, of_total, of_mixed, unseen = TOP, TOTAL, MIXED, float32(UNSEEN)

    @njit(nogil=True)
    def take(queries, begin, end, head, per_head, sinks, panels, states):  # type: ignore[no-untyped-def]
        for repeat in range(per_head):
            sink = sinks[head * per_head + repeat]
            for vector in range(vectors):
                panel, state = panels[vectors * repeat + vector], states[vectors * repeat + vector]
                for lane in range(lanes):
                    query = queries[min(begin + lanes * vector + lane, end - 1)]
                    for number in range(key_dim):
                        panel[number, lane] = query[head * per_head + repeat, number]
                state[:] = 0
                state[top] = sink
                state[of_total] = float32(0) if sink == unseen else float32(1)

    @njit(nogil=True)
    def give(states, begin, end, head, per_head, mixed):  # type: ignore[no-untyped-def]
        for place in range(end - begin):
            vector, lane = place // lanes, place % lanes
            for repeat in range(per_head):
                state = states[vectors * repeat + vector]
                into = mixed[begin + place, head * per_head + repeat]
                for number in range(value_dim):
                    into[number] = state[of_mixed + number, lane] / state[of_total, lane]

    return take, give


@cache
def _attend_loop(key_dim: int, value_dim: int) -> Any:
    """Compile attention of groups to first, selected, recent and own tokens."""
    from numba import njit

    list_all, take_tokens = list_loop(), _take_loop(key_dim, value_dim)
    take_queries, give = _lane_loops(key_dim, value_dim)
    score, weigh, mix = score_function(key_dim), weigh_function(), mix_function(value_dim)
    block_tokens, tile, together = BLOCK_TOKENS, TILE_TOKENS, TOKENS_TOGETHER
    lanes, vectors, first_blocks = LANES, GROUP_VECTORS, FIRST_BLOCKS
    width = state_vectors(value_dim)

    @njit(nogil=True)
    def attend(  # type: ignore[no-untyped-def]
        queries, first, groups, chosen, stops, spilled, sides, starts, head, per_head, nbytes,
        sinks, mixed,
    ):  # fmt: skip
        panels = np.empty((per_head * vectors, key_dim, lanes), np.float32)
        states = np.empty((per_head * vectors, width, lanes), np.float32)
        keys = np.zeros((tile + together, key_dim), np.float32)
        values = np.empty((tile, value_dim), np.float32)
        weights = np.empty((tile + together, lanes), np.float32)
        positions, places = np.empty((vectors, lanes), np.int32), np.empty(tile, np.int32)
        nowhere = np.zeros(2, np.int64)
        for group in range(len(groups)):
            begin, end = groups[group]
            stop = first + end
            take_queries(queries, begin, end, head, per_head, sinks, panels, states)
            for place in range(vectors * lanes):
                positions[place // lanes, place % lanes] = first + min(begin + place, end - 1)
            used = (end - begin + lanes - 1) // lanes
            recent = stops[group]
            count = first_blocks + chosen.shape[1] + (stop - 1) // block_tokens + 1 - recent
            blocks = np.empty(count, np.int64)
            list_all(chosen[group], recent, blocks)
            span = tokens = 0
            for place in range(count):
                elsewhere = spilled[group, place] if spilled.shape[1] > 0 else nowhere
                tokens, span = take_tokens(
                    (sides, starts), head, blocks[place], stop, span, nbytes, elsewhere,
                    (keys, values, places), tokens,
                )  # fmt: skip
                if tokens + block_tokens <= tile and place + 1 < count:
                    continue
                rounds = (tokens + together - 1) // together
                for number in range(per_head * vectors):
                    if number % vectors >= used:
                        continue
                    x, state = panels[number].ctypes.data, states[number].ctypes.data
                    scores, seen = weights.ctypes.data, positions[number % vectors].ctypes.data
                    score((x, keys.ctypes.data, scores, rounds))
                    weigh((scores, places.ctypes.data, tokens, seen, state))
                    mix((scores, values.ctypes.data, tokens, state))
                tokens = 0
            give(states, begin, end, head, per_head, mixed)

    return attend


def held_spans(spans: SpanTable, end: int, addresses: Sequence[Integers]) -> SpanTable:
    """Return spans with a chunk's own tokens as the last one.

    Args:
        spans: locations of the tokens before the chunk.
        end: position after the chunk's last token.
        addresses: addresses of its keys, its values, and the parts of its index.
    """
    sides = np.zeros((1, *spans.sides.shape[1:]), np.int64)
    sides[0, : len(addresses)] = addresses
    return SpanTable(np.append(spans.starts, end), np.concatenate([spans.sides, sides]))
