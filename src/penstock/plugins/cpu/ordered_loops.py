"""Compiled attention with a fixed summation order; see `ordered_attention`."""

from __future__ import annotations

from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np

from penstock.kv.numpy_arrays import Integers
from penstock.plugins.cpu.attention_tiles import (
    BLOCK_TOKENS,
    FLOAT_BYTES,
    MAXIMUM,
    PREFETCHED_BYTES,
    QUERIES,
    TOTAL,
    UNSEEN,
    merge_function,
    mix_function,
    padded,
    score_function,
    state_floats,
    weigh_function,
)
from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.compiled_jobs import barrier, table_at

QUERIES_OF_ITEM = 32
"""Maximum number of queries of an item, which read a block while it is in the CPU cache."""
BLOCKS_OF_WAVE = 16
"""Number of blocks whose states are in memory at once, if threads divide a query's blocks."""
SEEN_FLOATS = 4 * QUERIES_OF_ITEM
"""Size in floats of a thread's buffer for the visible columns of an item's queries, int64."""
ITEMS_OF_THREAD = 4
"""Maximum number of items per thread for which threads divide the blocks of each item."""
ITEMS_DIVIDED = 16
"""Maximum number of items per thread for which items are made smaller to be dealt out evenly."""


class AttendTable(IntEnum):
    """Table entries of an attention job; addresses are of contiguous arrays."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    QUERIES = 3
    """Scaled queries, (rows, heads, key_dim) float32."""
    ROWS = 4
    HEADS = 5
    KV_HEADS = 6
    SPANS = 7
    """Spans, (spans, 6): address of the first key, bytes between heads, both for values, number of
    tokens, and column of the first token."""
    SPAN_COUNT = 8
    FIRSTS = 9
    """Index of each sequence's first span, and the end, (sequences + 1,)."""
    SEQUENCES = 10
    SEEN = 11
    """First and end of the visible columns of each row, (rows, 2)."""
    WIDTH = 12
    """Number of rows per sequence."""
    MIXED = 13
    """Result, (rows, heads, value_dim) float32."""
    SPACE = 14
    """Buffer of `space_floats` float32."""
    KEPT = 15
    """Number of first columns that are visible to all rows in addition."""


ATTEND_WORDS = len(AttendTable)


def attend_tables(spans: Integers, firsts: Integers, rows: int, width: int) -> Integers:
    """Return the tables of an attention job of each layer, (layers, words), not yet complete.

    Args:
        spans: spans of each layer, (layers, spans, 6), which the caller must keep alive.
        firsts: index of each sequence's first span, and the end; must be kept alive, too.
        rows: number of rows.
        width: number of rows per sequence.
    """
    tables = np.zeros((len(spans), ATTEND_WORDS), np.int64)
    tables[:, AttendTable.ROWS] = rows
    starts = spans.ctypes.data + np.arange(len(spans)) * spans.strides[0]
    tables[:, AttendTable.SPANS], tables[:, AttendTable.SPAN_COUNT] = starts, spans.shape[1]
    tables[:, AttendTable.FIRSTS] = firsts.ctypes.data
    tables[:, AttendTable.SEQUENCES] = len(firsts) - 1
    tables[:, AttendTable.WIDTH] = width
    return tables


def space_floats(key_dim: int, value_dim: int, threads: int) -> int:
    """Return the number of floats of working memory of a job."""
    state = QUERIES * state_floats(value_dim)
    groups = QUERIES_OF_ITEM // QUERIES
    of_thread = groups * (QUERIES * padded(key_dim) + state) + QUERIES * BLOCK_TOKENS + state
    of_thread += SEEN_FLOATS
    of_waves = BLOCKS_OF_WAVE * threads * ITEMS_OF_THREAD * state
    return threads * of_thread + (of_waves if threads > 1 else 0)


@cache
def ordered_loop(
    key_dim: int, value_dim: int, soft_cap: float = 0.0, nbytes: int = FLOAT_BYTES
) -> int:
    """Compile attention for the given sizes and return the job's address.

    Args:
        key_dim: size of a key.
        value_dim: size of a value.
        soft_cap: logit soft-capping, soft_cap x tanh(score / soft_cap); 0 for none.
        nbytes: bytes of an element: 4 for float32; 2 for float16, for sizes divisible by `LANES`.
    """
    return function_address(
        f"attend {key_dim} {value_dim} {soft_cap} {nbytes}",
        partial(_compile_ordered, key_dim, value_dim, soft_cap, nbytes),
    )


def item_groups(groups: int, heads: int, threads: int) -> int:
    """Return how many groups of `QUERIES` queries make an item, so that threads end together.

    Items are dealt out in turn.

    Args:
        groups: number of groups of a KV head.
        heads: number of KV heads of all sequences.
        threads: number of threads.
    """
    largest = min(groups, QUERIES_OF_ITEM // QUERIES)
    best, least = largest, heads * groups + 1
    for size in range(largest, 0, -1):
        items = (groups + size - 1) // size
        if threads == 1 or heads * items > ITEMS_DIVIDED * threads:
            break
        longest = 0
        for thread in range(threads):
            total = 0
            for item in range(thread, heads * items, threads):
                total += min(size, groups - item % items * size)
            longest = max(longest, total)
        if longest < least:
            best, least = size, longest
    return best


def _compile_ordered(key_dim: int, value_dim: int, soft_cap: float, nbytes: int) -> Any:
    from numba import carray, cfunc, njit, types

    score, weigh = score_function(key_dim, nbytes), weigh_function(soft_cap)
    mix, merge = mix_function(value_dim, nbytes), merge_function(value_dim)
    table_of, address_of, words, wait = table_at(), pointer(), ATTEND_WORDS, barrier()
    block_tokens, together, most_queries = BLOCK_TOKENS, QUERIES, QUERIES_OF_ITEM
    key_bytes, value_bytes, key_width = nbytes * key_dim, nbytes * value_dim, padded(key_dim)
    state_width, value_width = state_floats(value_dim), padded(value_dim)
    maximum, of_total = value_width + MAXIMUM, value_width + TOTAL
    state_bytes, nothing = 4 * state_width, np.float32(UNSEEN)
    prefetched = PREFETCHED_BYTES
    wave, items_of_thread, seen_bytes = BLOCKS_OF_WAVE, ITEMS_OF_THREAD, 4 * SEEN_FLOATS
    groups_of_item = njit(nogil=True)(item_groups)
    (THREADS, _, _, OF_QUERIES, ROWS, HEADS, KV_HEADS, SPANS, SPAN_COUNT, FIRSTS, SEQUENCES, SEEN,
     WIDTH, MIXED, SPACE, KEPT) = map(int, AttendTable)  # fmt: skip

    # Array methods and assignments between arrays would need Numba at run time.
    @njit(nogil=True)
    def first_seen(seen):  # type: ignore[no-untyped-def]
        column = seen[0, 0]
        for place in range(1, len(seen)):
            column = min(column, seen[place, 0])
        return column

    @njit(nogil=True)
    def last_seen(seen):  # type: ignore[no-untyped-def]
        column = seen[0, 1]
        for place in range(1, len(seen)):
            column = max(column, seen[place, 1])
        return column

    @njit(nogil=True)
    def clear(state, queries):  # type: ignore[no-untyped-def]
        """Reset the states of queries."""
        numbers = carray(address_of(state), (queries, state_width), np.float32)
        numbers[:] = 0
        numbers[:, maximum] = nothing

    @njit(nogil=True)
    def bytes_ahead(spans, span, end, key_head, column, place, token_bytes, side):  # type: ignore[no-untyped-def]
        """Return the distance in bytes from a column's keys or values to those to prefetch.

        They lie `prefetched` bytes further on or, near the end of a span, two spans later: those of
        selected blocks are short.
        """
        later = span + 2
        if (spans[span, 5] + spans[span, 4] - column) * token_bytes > prefetched:
            return prefetched
        if later < end and spans[later, 4] > 0:
            return spans[later, side] + key_head * spans[later, side + 1] - place
        return 0

    @njit(nogil=True)
    def attend_block(queries, seen, kept, spans, span, end, key_head, block, weights, state):  # type: ignore[no-untyped-def]
        """Compute the states of four queries for a block; `state` must be reset.

        Return the span from which to search for the next block.
        """
        first = block * block_tokens
        last = min(first + block_tokens, last_seen(seen))
        while span + 1 < end and spans[span, 5] + spans[span, 4] <= first:
            span += 1
        first_span = span
        while span < end and spans[span, 5] < last:
            start = max(first, spans[span, 5])
            count = min(last, spans[span, 5] + spans[span, 4]) - start
            keys = spans[span, 0] + key_head * spans[span, 1]
            keys += (start - spans[span, 5]) * key_bytes
            ahead = bytes_ahead(spans, span, end, key_head, start, keys, key_bytes, 0)
            score((queries, keys, count, weights + 4 * (start - first), ahead))
            span += 1
        for query in range(together):
            weigh(
                (
                    weights + 4 * query * block_tokens,
                    max(seen[query, 0] - first, 0),
                    seen[query, 1] - first,
                    max(kept - first, 0),
                    state + query * state_bytes + 4 * maximum,
                )
            )
        span = first_span
        while span < end and spans[span, 5] < last:
            start = max(first, spans[span, 5])
            count = min(last, spans[span, 5] + spans[span, 4]) - start
            values = spans[span, 2] + key_head * spans[span, 3]
            values += (start - spans[span, 5]) * value_bytes
            ahead = bytes_ahead(spans, span, end, key_head, start, values, value_bytes, 2)
            mix((weights + 4 * (start - first), values, count, state, ahead))
            span += 1
        return first_span

    @njit(nogil=True)
    def take_queries(table, sequence, key_head, first, count, copied, seen):  # type: ignore[no-untyped-def]
        """Copy queries of a KV head and their visible columns, repeating the last query."""
        rows, heads, width = table[ROWS], table[HEADS], table[WIDTH]
        queries = carray(address_of(table[OF_QUERIES]), (rows, heads, key_dim), np.float32)
        columns = carray(address_of(table[SEEN]), (rows, 2), np.int64)
        into = carray(address_of(copied), (len(seen), key_width), np.float32)
        group = heads // table[KV_HEADS]
        for place in range(len(seen)):
            query = first + min(place, count - 1)
            row = sequence * width + query // group
            head = key_head * group + query % group
            for number in range(key_dim):
                into[place, number] = queries[row, head, number]
            for number in range(key_dim, key_width):
                into[place, number] = 0
            seen[place, 0], seen[place, 1] = columns[row, 0], columns[row, 1]

    @njit(nogil=True)
    def write(table, sequence, key_head, first, count, state):  # type: ignore[no-untyped-def]
        """Write the normalized results of queries."""
        rows, heads, width = table[ROWS], table[HEADS], table[WIDTH]
        mixed = carray(address_of(table[MIXED]), (rows, heads, value_dim), np.float32)
        states = carray(address_of(state), (count, state_width), np.float32)
        group = heads // table[KV_HEADS]
        for place in range(count):
            query = first + place
            into = mixed[sequence * width + query // group, key_head * group + query % group]
            total = states[place, of_total]
            for number in range(value_dim):
                into[number] = states[place, number] / total

    @njit(nogil=True)
    def sees_nothing(seen, kept, block):  # type: ignore[no-untyped-def]
        """Return whether no column of a block is visible to the queries."""
        column = block * block_tokens
        if last_seen(seen) <= column:
            return True
        return first_seen(seen) >= column + block_tokens and kept <= column

    @njit(nogil=True)
    def attend_item(table, spans, firsts, item, size, space, seen):  # type: ignore[no-untyped-def]
        """Attend with up to `size` groups of four queries of a sequence and KV head."""
        kv_heads = table[KV_HEADS]
        queries = table[WIDTH] * (table[HEADS] // kv_heads)
        items = (queries + size * together - 1) // (size * together)
        first = item % items * size * together
        key_head, sequence = item // items % kv_heads, item // items // kv_heads
        count = min(size * together, queries - first)
        groups = (count + together - 1) // together
        take_queries(table, sequence, key_head, first, count, space, seen[: groups * together])
        states = space + 4 * most_queries * key_width
        weights = states + most_queries * state_bytes
        own = weights + 4 * together * block_tokens
        clear(states, groups * together)
        seen = seen[: groups * together]
        kept = table[KEPT]
        begin = 0 if kept > 0 else first_seen(seen) // block_tokens
        blocks = (last_seen(seen) + block_tokens - 1) // block_tokens
        span, end = firsts[sequence], firsts[sequence + 1]
        for block in range(begin, blocks):
            following = span
            for group in range(groups):
                visible = seen[group * together : (group + 1) * together]
                if sees_nothing(visible, kept, block):
                    continue
                clear(own, together)
                following = attend_block(
                    space + 4 * group * together * key_width, visible, kept, spans, span, end,
                    key_head, block, weights, own,
                )  # fmt: skip
                for query in range(together):
                    into = states + (group * together + query) * state_bytes
                    merge((into, own + query * state_bytes))
            span = following
        write(table, sequence, key_head, first, count, states)

    @njit(nogil=True)
    def attend_divided(table, address, spans, firsts, units, space, shared, seen):  # type: ignore[no-untyped-def]
        """Attend with few queries, whose blocks are divided between threads."""
        thread_count, kv_heads = table[THREADS], table[KV_HEADS]
        thread = seen[0, 0]
        queries = table[WIDTH] * (table[HEADS] // kv_heads)
        groups = (queries + together - 1) // together
        states = space + 4 * most_queries * key_width
        weights = states + most_queries * state_bytes
        visible = seen[:together]
        all_seen = carray(address_of(table[SEEN]), (table[ROWS], 2), np.int64)
        most = (last_seen(all_seen) + block_tokens - 1) // block_tokens
        waited = 0
        clear(states, most_queries)
        for begin in range(0, most, wave):
            stop = min(begin + wave, most)
            work = units * (stop - begin)
            for number in range(thread, work, thread_count):
                unit, block = number // (stop - begin), begin + number % (stop - begin)
                first = unit % groups * together
                key_head, sequence = unit // groups % kv_heads, unit // groups // kv_heads
                count = min(together, queries - first)
                take_queries(table, sequence, key_head, first, count, space, visible)
                state = shared + number * together * state_bytes
                clear(state, together)
                if sees_nothing(visible, table[KEPT], block):
                    continue
                attend_block(space, visible, table[KEPT], spans, firsts[sequence],
                             firsts[sequence + 1], key_head, block, weights, state)  # fmt: skip
            waited = wait(address, thread_count, waited)
            for unit in range(thread, units, thread_count):
                into = states + unit // thread_count * together * state_bytes
                for block in range(stop - begin):
                    state = shared + (unit * (stop - begin) + block) * together * state_bytes
                    for query in range(together):
                        merge((into + query * state_bytes, state + query * state_bytes))
            waited = wait(address, thread_count, waited)
        for unit in range(thread, units, thread_count):
            first = unit % groups * together
            key_head, sequence = unit // groups % kv_heads, unit // groups // kv_heads
            into = states + unit // thread_count * together * state_bytes
            write(table, sequence, key_head, first, min(together, queries - first), into)

    def job(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        threads, kv_heads, sequences = table[THREADS], table[KV_HEADS], table[SEQUENCES]
        spans = carray(address_of(table[SPANS]), (table[SPAN_COUNT], 6), np.int64)
        firsts = carray(address_of(table[FIRSTS]), (sequences + 1,), np.int64)
        queries = table[WIDTH] * (table[HEADS] // kv_heads)
        of_thread = 4 * (most_queries * key_width + together * block_tokens)
        of_thread += (most_queries + together) * state_bytes + seen_bytes
        space, shared = table[SPACE] + thread * of_thread, table[SPACE] + threads * of_thread
        seen = carray(address_of(space), (most_queries, 2), np.int64)
        space += seen_bytes
        units = sequences * kv_heads * ((queries + together - 1) // together)
        columns = carray(address_of(table[SEEN]), (table[ROWS], 2), np.int64)
        longest = last_seen(columns)
        if threads > 1 and longest > block_tokens and units <= threads * items_of_thread:
            seen[0, 0] = thread
            attend_divided(table, address, spans, firsts, units, space, shared, seen)
            return
        groups, heads = (queries + together - 1) // together, sequences * kv_heads
        size = groups_of_item(groups, heads, threads)
        for item in range(thread, heads * ((groups + size - 1) // size), threads):
            attend_item(table, spans, firsts, item, size, space, seen)

    return cfunc(types.void(types.int64, types.int64))(job)
