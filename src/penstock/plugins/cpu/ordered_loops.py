"""Compiled attention with a fixed summation order; see `ordered_attention`."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from penstock.plugins.cpu.compiled import SUMS, exp_loop, pointer
from penstock.plugins.cpu.compiled_cache import function_address
from penstock.plugins.cpu.compiled_jobs import table_at

IN_ORDER = {"contract"}
"""Fast-math flags that keep the order of sums: fused multiply-add only."""


class AttendTable(IntEnum):
    """Entries of the table of an attention job; addresses are of contiguous arrays."""

    THREADS = 0
    BARRIER = 1
    LEAVE = 2
    QUERIES = 3
    """(rows, heads, key_dim) float32, already scaled."""
    ROWS = 4
    HEADS = 5
    KV_HEADS = 6
    SPANS = 7
    """(spans, 5): address of the first key, bytes between heads, the same of the values, and number
    of tokens."""
    SPAN_COUNT = 8
    FIRSTS = 9
    """(sequences + 1,): the index of each sequence's first span, and the end."""
    SEQUENCES = 10
    SEEN = 11
    """(rows, 2): visible columns of each row, first and end."""
    WIDTH = 12
    """Rows per sequence."""
    MIXED = 13
    """(rows, heads, value_dim) float32: the result."""


ATTEND_WORDS = len(AttendTable)


@cache
def _score_loop(key_dim: int) -> Any:
    """Compile the products of one query with keys, with a fixed order of summation."""
    from numba import carray, float32, njit

    address_of = pointer()

    @njit(nogil=True, fastmath=SUMS)
    def score(query, address, scores):  # type: ignore[no-untyped-def]
        keys = carray(address_of(address), (len(scores), key_dim), np.float32)
        for token in range(len(scores)):
            total = float32(0)
            for number in range(key_dim):
                total += query[number] * keys[token, number]
            scores[token] = total

    return score


@cache
def _mix_loop(value_dim: int) -> Any:
    """Compile the sum of weighted values, token by token."""
    from numba import carray, njit

    address_of = pointer()

    @njit(nogil=True, fastmath=IN_ORDER)
    def mix(weights, address, mixed):  # type: ignore[no-untyped-def]
        tokens = len(weights)
        values = carray(address_of(address), (tokens, value_dim), np.float32)
        four = tokens - tokens % 4
        for token in range(0, four, 4):
            for number in range(value_dim):
                total = mixed[number] + weights[token] * values[token, number]
                total = total + weights[token + 1] * values[token + 1, number]
                total = total + weights[token + 2] * values[token + 2, number]
                mixed[number] = total + weights[token + 3] * values[token + 3, number]
        for token in range(four, tokens):
            for number in range(value_dim):
                mixed[number] = mixed[number] + weights[token] * values[token, number]

    return mix


@cache
def ordered_loop(key_dim: int, value_dim: int, soft_cap: float = 0.0) -> int:
    """Compile attention for keys and values of these sizes; return the job's address.

    Args:
        key_dim: size of a key.
        value_dim: size of a value.
        soft_cap: logit soft-capping, soft_cap x tanh(score / soft_cap); 0 for none.
    """
    from numba import carray, cfunc, float32, njit, types

    score, mix, exp = _score_loop(key_dim), _mix_loop(value_dim), exp_loop()
    capped, cap = soft_cap > 0, float32(soft_cap)
    key_bytes, value_bytes = 4 * key_dim, 4 * value_dim

    @njit(nogil=True)
    def attend(queries, kv_heads, spans, firsts, seen, width, item, step, mixed):  # type: ignore[no-untyped-def]
        rows, heads, _ = queries.shape
        scores = np.empty(seen[:, 1].max(), np.float32)
        while item < rows * heads:
            row, head = item // heads, item % heads
            sequence, key_head = row // width, head * kv_heads // heads
            start, limit = seen[row]
            column, span = 0, firsts[sequence]
            while column < limit:
                tokens = min(spans[span, 4], limit - column)
                hidden = max(start - column, 0)
                if hidden < tokens:
                    keys = spans[span, 0] + key_head * spans[span, 1] + hidden * key_bytes
                    score(queries[row, head], keys, scores[column + hidden : column + tokens])
                column, span = column + tokens, span + 1
            if capped:
                for place in range(start, limit):
                    scores[place] = cap * np.tanh(scores[place] / cap)
            top = scores[start]
            for place in range(start, limit):
                top = max(top, scores[place])
            total = exp(scores[start:limit], top)
            into = mixed[row, head]
            into[:] = 0
            column, span = 0, firsts[sequence]
            while column < limit:
                tokens = min(spans[span, 4], limit - column)
                hidden = max(start - column, 0)
                if hidden < tokens:
                    values = spans[span, 2] + key_head * spans[span, 3] + hidden * value_bytes
                    mix(scores[column + hidden : column + tokens], values, into)
                column, span = column + tokens, span + 1
            into /= total
            item += step

    table_of, address_of, words = table_at(), pointer(), ATTEND_WORDS
    (threads, _, _, of_queries, rows, heads, kv_heads, spans, span_count, firsts, sequences, seen,
     width, mixed) = map(int, AttendTable)  # fmt: skip

    def job(thread, address):  # type: ignore[no-untyped-def]
        table = table_of(address, words)
        n, count = table[rows], table[heads]
        attend(
            carray(address_of(table[of_queries]), (n, count, key_dim), np.float32),
            table[kv_heads],
            carray(address_of(table[spans]), (table[span_count], 5), np.int64),
            carray(address_of(table[firsts]), (table[sequences] + 1,), np.int64),
            carray(address_of(table[seen]), (n, 2), np.int64),
            table[width],
            thread,
            table[threads],
            carray(address_of(table[mixed]), (n, count, value_dim), np.float32),
        )

    return function_address(
        f"attend {key_dim} {value_dim} {soft_cap}",
        lambda: cfunc(types.void(types.int64, types.int64))(job),
    )
