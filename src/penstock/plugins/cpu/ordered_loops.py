"""Compiled attention with a fixed summation order; see `ordered_attention`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.plugins.cpu.compiled import SUMS, exp_loop, pointer

IN_ORDER = {"contract"}
"""Fast-math flags that keep the order of sums: fused multiply-add only."""


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
def ordered_loop(key_dim: int, value_dim: int, soft_cap: float = 0.0) -> Any:
    """Compile attention for keys and values of these sizes.

    The loop's arguments are queries (rows, heads, key_dim), already scaled; the number of KV heads;
    spans (spans, 5): address of the first key, bytes between heads, the same of the values, and
    number of tokens; the index of each sequence's first span, and the end; visible columns of each
    row, (rows, 2), first and end; rows per sequence; the first item of rows x heads, and the
    stride; and the result (rows, heads, value_dim).

    Args:
        key_dim: size of a key.
        value_dim: size of a value.
        soft_cap: logit soft-capping, soft_cap x tanh(score / soft_cap); 0 for none.
    """
    from numba import float32, njit

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

    return attend
