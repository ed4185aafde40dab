"""Compiled job of a decode step that selects the blocks which each row reads in one layer.

It writes the selected tokens of each row and KV head as spans of their own, with consecutive
columns. The job of `ordered_loops` then attends to them like to sequences of one KV head.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.key_index import BITS, MOST_SUM
from penstock.kv.codecs.turbo import STEPS, padded
from penstock.plugins.cpu.attending_loops import PLACES
from penstock.plugins.cpu.center_loops import center_loop
from penstock.plugins.cpu.choosing_loops import choose_loop
from penstock.plugins.cpu.compiled import pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.compiled_jobs import array_at, table_at

CODES = 16
"""Codes of the key index in a word."""
BEYOND = 2**62
"""First column of the span after the last one, which no row reads."""


class ChoiceTable(IntEnum):
    """Entries of the table of a selection job; addresses are of contiguous arrays."""

    THREADS = 0
    BARRIER = 1
    YIELD = 2
    QUERIES = 3
    """(rows, heads, key_dim) float32, already scaled."""
    ROWS = 4
    HEADS = 5
    KV_HEADS = 6
    SPANS = 7
    """(spans, 6), see `AttendTable`: those of all tokens."""
    SPAN_COUNT = 8
    INDEX = 9
    """(spans, 7, 2): see `segment_addresses`; only the addresses of the index are read."""
    FIRSTS = 10
    """(sequences + 1,): index of each sequence's first span, and the end."""
    SEQUENCES = 11
    WIDTH = 12
    """Rows per sequence."""
    CHOICES = 13
    """(rows, 4): the first block with recent tokens, or 0 to read all tokens; the number of blocks
    to select; visible columns, first and end."""
    KEY_BYTES = 14
    VALUE_BYTES = 15
    """Bytes of a key and of a value."""
    MODEL_QUERIES = 16
    """(rows, stride) float32: in the first columns the queries of the model, not scaled."""
    STRIDE = 17
    SIGNS = 18
    """(n,) float32: see `signs_of`."""
    FACTOR = 19
    """Address of `query_factor`."""
    CENTERS = 20
    """(kv_heads, key_dim) float32: see `KeyCenters.vectors`; 0 without centers."""
    PAIRS = 21
    PARTNERS = 22
    """(pairs,) each: both channels of each rotated pair."""
    PAIR_COUNT = 23
    STILL = 24
    """Channels that are not rotated."""
    STILL_COUNT = 25
    TURNS = 26
    """(tiles, 2 * pairs, TILE_BLOCKS) float32: see `Rotation.turns`."""
    TILE_COUNT = 27
    FAR_TURNS = 28
    """(n, 2 * pairs) float32."""
    FAR_COUNT = 29
    READ = 30
    """(rows, kv_heads, most, 6): the result, spans of each row and KV head."""
    MOST = 31
    SEEN = 32
    """(rows, kv_heads, 2): the result, visible columns of these spans."""


CHOICE_WORDS = len(ChoiceTable)


def query_factor(key_dim: int, scale: float) -> np.float32:
    """Return what rotated queries are multiplied by, see `KeyIndex.whole_queries`."""
    n = padded(key_dim)
    return np.float32(scale * STEPS[BITS] / math.sqrt(n & -n))


@cache
def choice_job(key_dim: int) -> int:
    """Compile the job of `ChoiceTable` for keys of this size; return its address."""
    return function_address(f"choose {key_dim}", partial(_compile_choice, key_dim))


@cache
def _whole_loop(key_dim: int) -> Any:
    """Compile the rotation of queries, rounded to whole numbers; see `KeyIndex.whole_queries`."""
    from numba import float32, njit

    n = padded(key_dim)
    size, inverse = n & -n, np.float32(1 / (MOST_SUM // n))

    @njit(nogil=True)
    def rotate(queries, signs, factor, whole, units):  # type: ignore[no-untyped-def]
        for query in range(len(whole)):
            row, largest = whole[query], float32(0)
            for number in range(key_dim):
                row[number] = queries[query * key_dim + number] * signs[number]
            for number in range(key_dim, n):
                row[number] = 0
            half = 1
            while half < size:
                for first in range(0, n, 2 * half):
                    for number in range(first, first + half):
                        one, other = row[number], row[number + half]
                        row[number], row[number + half] = one + other, one - other
                half *= 2
            for number in range(n):
                row[number] *= factor
                largest = max(largest, abs(row[number]))
            worth = largest * inverse
            for number in range(n):  # a query of zeros has no direction
                row[number] = np.rint(row[number] / worth) if worth > 0 else float32(np.nan)
            units[query, 0] = worth * float32(0.5)

    return rotate


def _compile_choice(key_dim: int) -> Any:
    from numba import carray, cfunc, njit, types

    words = padded(key_dim) // CODES
    rotate, choose, score = _whole_loop(key_dim), choose_loop(words), center_loop()
    table_of, address_of, array, entries = table_at(), pointer(), array_at(), CHOICE_WORDS
    block, first_blocks, n, beyond = BLOCK_TOKENS, FIRST_BLOCKS, padded(key_dim), BEYOND
    index_rows = PLACES + 1
    (THREADS, _, _, QUERIES, ROWS, HEADS, KV_HEADS, SPANS, SPAN_COUNT, INDEX, FIRSTS, SEQUENCES,
     WIDTH, CHOICES, KEY_BYTES, VALUE_BYTES, MODEL_QUERIES, STRIDE, SIGNS, FACTOR, CENTERS, PAIRS,
     PARTNERS, PAIR_COUNT, STILL, STILL_COUNT, TURNS, TILE_COUNT, FAR_TURNS, FAR_COUNT, READ, MOST,
     SEEN) = map(int, ChoiceTable)  # fmt: skip

    @njit(nogil=True)
    def add_run(spans, head, token, until, key_bytes, value_bytes, into, count, column):  # type: ignore[no-untyped-def]
        """Append the tokens `token..until - 1` of a sequence; return the number of spans."""
        span = 0
        while token < until:
            while spans[span, 5] + spans[span, 4] <= token:
                span += 1
            tokens = min(until, spans[span, 5] + spans[span, 4]) - token
            behind = token - spans[span, 5]
            keys = spans[span, 0] + head * spans[span, 1] + behind * key_bytes
            values = spans[span, 2] + head * spans[span, 3] + behind * value_bytes
            last = count - 1
            if (
                count
                and into[last, 0] + into[last, 4] * key_bytes == keys
                and (into[last, 2] + into[last, 4] * value_bytes == values)
            ):
                into[last, 4] += tokens
            else:
                into[count, 0], into[count, 1] = keys, 0
                into[count, 2], into[count, 3] = values, 0
                into[count, 4], into[count, 5] = tokens, column
                count += 1
            token, column = token + tokens, column + tokens
        return count

    @njit(nogil=True)
    def add_all(spans, head, into):  # type: ignore[no-untyped-def]
        """Copy all spans of a sequence; return the number of spans."""
        for span in range(len(spans)):
            into[span, 0], into[span, 1] = spans[span, 0] + head * spans[span, 1], 0
            into[span, 2], into[span, 3] = spans[span, 2] + head * spans[span, 3], 0
            into[span, 4], into[span, 5] = spans[span, 4], spans[span, 5]
        return len(spans)

    @njit(nogil=True)
    def center_scores(table, queries, head, stop, scores):  # type: ignore[no-untyped-def]
        """Write what the index leaves out of the scores of blocks; see `Rotation.sums`."""
        if table[CENTERS] == 0:
            scores[:] = 0
            return
        pairs = table[PAIR_COUNT]
        vectors = array(table[CENTERS] + 4 * key_dim * head, 1, key_dim)
        one, other = table_of(table[PAIRS], pairs), table_of(table[PARTNERS], pairs)
        still = table_of(table[STILL], table[STILL_COUNT])
        tiles = carray(address_of(table[TURNS]), (table[TILE_COUNT], 2 * pairs, block), np.float32)
        far = array(table[FAR_TURNS], table[FAR_COUNT], 2 * pairs)
        score(queries, vectors, one, other, still, tiles, far, 0, scores)

    @njit(nogil=True)
    def select(table, spans, index, row, head, stop, count):  # type: ignore[no-untyped-def]
        """Return the selected blocks of a row and KV head, (1, count)."""
        group = table[HEADS] // table[KV_HEADS]
        place = table[QUERIES] + 4 * key_dim * (row * table[HEADS] + head * group)
        queries = carray(address_of(place), (1, group, key_dim), np.float32)
        whole, units = np.empty((1, group, n), np.float32), np.empty((1, group, 1), np.float32)
        place = table[MODEL_QUERIES] + 4 * (row * table[STRIDE] + key_dim * head * group)
        rotate(
            array(place, 1, group * key_dim)[0], array(table[SIGNS], 1, n)[0],
            array(table[FACTOR], 1, 1)[0, 0], whole[0], units[0],
        )  # fmt: skip
        centers = np.empty((1, group, stop), np.float32)
        center_scores(table, queries, head, stop, centers)
        starts = np.empty(len(spans) + 1, np.int64)
        for span in range(len(spans)):
            starts[span] = spans[span, 5]
        starts[len(spans)] = spans[len(spans) - 1, 5] + spans[len(spans) - 1, 4]
        chosen = np.empty((1, count), np.int64)
        choose(whole, units, centers, index, starts, head, stop, chosen)
        return chosen

    @njit(nogil=True)
    def read_of(table, spans, index, choice, row, head, into, seen):  # type: ignore[no-untyped-def]
        """Write the spans that a row and KV head reads, and their visible columns."""
        stop, selected, first, end = choice
        if stop == 0:
            count = add_all(spans, head, into)
            seen[0], seen[1] = first, end
        else:
            chosen = select(table, spans, index, row, head, stop, selected)[0]
            sizes = table[KEY_BYTES], table[VALUE_BYTES]
            column = first_blocks * block
            count = add_run(spans, head, 0, column, sizes[0], sizes[1], into, 0, 0)
            for number in range(selected):
                token = chosen[number] * block
                count = add_run(
                    spans, head, token, token + block, sizes[0], sizes[1], into, count, column
                )
                column += block
            count = add_run(spans, head, stop * block, end, sizes[0], sizes[1], into, count, column)
            seen[0], seen[1] = 0, column + end - stop * block
        if count < len(into):
            for number in range(5):
                into[count, number] = 0
            into[count, 5] = beyond

    def job(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, entries)
        rows, kv_heads, most = table[ROWS], table[KV_HEADS], table[MOST]
        spans = carray(address_of(table[SPANS]), (table[SPAN_COUNT], 6), np.int64)
        index = carray(address_of(table[INDEX]), (table[SPAN_COUNT], index_rows, 2), np.int64)
        firsts = table_of(table[FIRSTS], table[SEQUENCES] + 1)
        choices = carray(address_of(table[CHOICES]), (rows, 4), np.int64)
        into = carray(address_of(table[READ]), (rows * kv_heads, most, 6), np.int64)
        seen = carray(address_of(table[SEEN]), (rows * kv_heads, 2), np.int64)
        for item in range(thread, rows * kv_heads, table[THREADS]):
            row, head = item // kv_heads, item % kv_heads
            first, end = firsts[row // table[WIDTH]], firsts[row // table[WIDTH] + 1]
            choice = choices[row, 0], choices[row, 1], choices[row, 2], choices[row, 3]
            read_of(
                table, spans[first:end], index[first:end], choice, row, head, into[item],
                seen[item],
            )  # fmt: skip

    return cfunc(types.void(types.int64, types.int64))(job)
