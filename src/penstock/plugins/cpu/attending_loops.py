"""Compiled attention to selected blocks, without copying them; see `choice_loops`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.plugins.cpu.attention_tiles import HALF_BYTES, widen_function
from penstock.plugins.cpu.compiled import FOUR, SUMS, exp_loop, pointer

PLACES = 6
"""Index, among a span's addresses, of the places of spilled blocks; 0 if none is spilled."""


@cache
def list_loop() -> Any:
    """Compile the listing of the blocks that a head reads: first, selected and recent ones."""
    from numba import njit

    first = FIRST_BLOCKS

    @njit(nogil=True)
    def list_all(chosen, recent, blocks):  # type: ignore[no-untyped-def]
        own = len(chosen)
        for place in range(len(blocks)):
            blocks[place] = place if place < first else place - first - own + recent
        for place in range(own):
            blocks[first + place] = chosen[place]

    return list_all


@cache
def locate_loop() -> Any:
    """Compile the lookup of places and checksums of spilled blocks.

    Blocks that are in memory have the place -1.
    """
    from numba import carray, njit

    address_of, list_all = pointer(), list_loop()
    block, row = BLOCK_TOKENS, PLACES

    @njit(nogil=True)
    def locate(sides, starts, first_head, chosen, recent, places, checksums):  # type: ignore[no-untyped-def]
        heads, count = places.shape
        blocks = np.empty(count, np.int64)
        for head in range(heads):
            list_all(chosen[head], recent, blocks)
            span = 0
            for place in range(count):
                token = blocks[place] * block
                while starts[span + 1] <= token:
                    span += 1
                places[head, place] = -1
                if sides[span, row, 0] == 0:
                    continue
                of = sides[span, :, 0] + (first_head + head) * sides[span, :, 1]
                column = (token - starts[span]) // block
                places[head, place] = carray(address_of(of[row] + 4 * column), 1, np.int32)[0]
                for side in range(2):
                    held = carray(address_of(of[side] + 8 * column), 1, np.uint64)
                    checksums[head, place, side] = held[0]

    return locate


@cache
def _runs_loop(key_dim: int, value_dim: int) -> Any:
    """Compile the lookup of the tokens of blocks, as runs of tokens in one span.

    A run is the addresses of its keys and values, its column among all tokens read, and its length.
    The caller gives the addresses of spilled blocks.
    """
    from numba import njit

    block, row = BLOCK_TOKENS, PLACES

    @njit(nogil=True)
    def find(sides, starts, head, blocks, spilled, nbytes, runs):  # type: ignore[no-untyped-def]
        count = span = 0
        for place in range(len(blocks)):
            token = blocks[place] * block
            stop = min(token + block, starts[-1])
            while token < stop:
                while starts[span + 1] <= token:
                    span += 1
                end, column = min(stop, starts[span + 1]), token - starts[span]
                at = sides[span]
                keys, values = at[0, 0] + head * at[0, 1], at[1, 0] + head * at[1, 1]
                if at[row, 0] != 0:
                    keys, values = spilled[place, 0], spilled[place, 1]
                    column = token - blocks[place] * block
                runs[count, 0] = keys + column * (key_dim * nbytes)
                runs[count, 1] = values + column * (value_dim * nbytes)
                runs[count, 2] = place * block + token - blocks[place] * block
                runs[count, 3] = end - token
                count, token = count + 1, end
        return count

    return find


@cache
def _floats_loop() -> Any:
    """Compile access to keys or values as float32, converted to a copy if they are float16."""
    from numba import njit

    widen, half_bytes = widen_function(), HALF_BYTES

    @njit(nogil=True)
    def floats(address, count, nbytes, space):  # type: ignore[no-untyped-def]
        if nbytes != half_bytes:
            return address
        widen((address, space.ctypes.data, count))
        return np.int64(space.ctypes.data)

    return floats


@cache
def _score_loop(key_dim: int) -> Any:
    """Compile the products of queries with keys, four queries at a time."""
    from numba import carray, float32, njit

    address_of, together, floats = pointer(), FOUR, _floats_loop()

    @njit(nogil=True, fastmath=SUMS)
    def score(queries, runs, nbytes, space, scores):  # type: ignore[no-untyped-def]
        count = len(queries)
        four = count - count % together
        for place_of_keys, _, column, tokens in runs:
            address = floats(place_of_keys, tokens * key_dim, nbytes, space)
            keys = carray(address_of(address), (tokens, key_dim), np.float32)
            for token in range(tokens):
                key, place = keys[token], column + token
                for query in range(0, four, together):
                    first = second = third = fourth = float32(0)
                    for number in range(key_dim):
                        first += queries[query, number] * key[number]
                        second += queries[query + 1, number] * key[number]
                        third += queries[query + 2, number] * key[number]
                        fourth += queries[query + 3, number] * key[number]
                    scores[query, place], scores[query + 1, place] = first, second
                    scores[query + 2, place], scores[query + 3, place] = third, fourth
                for query in range(four, count):
                    total = float32(0)
                    for number in range(key_dim):
                        total += queries[query, number] * key[number]
                    scores[query, place] = total

    return score


@cache
def mix_loop(value_dim: int) -> Any:
    """Compile the weighted sum of values."""
    from numba import carray, njit

    address_of, floats = pointer(), _floats_loop()

    @njit(nogil=True, fastmath=SUMS)
    def mix(weights, runs, nbytes, space, mixed):  # type: ignore[no-untyped-def]
        for _, place_of_values, column, tokens in runs:
            address = floats(place_of_values, tokens * value_dim, nbytes, space)
            held = carray(address_of(address), (tokens, value_dim), np.float32)
            for query in range(len(weights)):
                own, into = weights[query, column : column + tokens], mixed[query]
                four = tokens - tokens % 4
                for token in range(0, four, 4):
                    for number in range(value_dim):
                        into[number] += (
                            own[token] * held[token, number]
                            + own[token + 1] * held[token + 1, number]
                            + own[token + 2] * held[token + 2, number]
                            + own[token + 3] * held[token + 3, number]
                        )
                for token in range(four, tokens):
                    for number in range(value_dim):
                        into[number] += own[token] * held[token, number]

    return mix


@cache
def attend_loop(key_dim: int, value_dim: int) -> Any:
    """Compile attention to the first, selected and recent blocks."""
    from numba import njit

    list_all, find, exp = list_loop(), _runs_loop(key_dim, value_dim), exp_loop()
    score, mix = _score_loop(key_dim), mix_loop(value_dim)
    block, first = BLOCK_TOKENS, FIRST_BLOCKS

    @njit(nogil=True)
    def attend(queries, sides, starts, first_head, chosen, recent, nbytes, sinks, spilled, mixed):  # type: ignore[no-untyped-def]
        heads, count, _ = queries.shape
        read = first + chosen.shape[1] + (starts[-1] - 1) // block + 1 - recent
        blocks = np.empty(read, np.int64)
        runs = np.empty((len(blocks) + len(starts), 4), np.int64)
        weights = np.empty((count, len(blocks) * block), np.float32)
        totals = np.empty(count, np.float32)
        space = np.empty(block * max(key_dim, value_dim), np.float32)
        for head in range(heads):
            list_all(chosen[head], recent, blocks)
            run_count = find(sides, starts, first_head + head, blocks, spilled[head], nbytes, runs)
            columns = runs[run_count - 1, 2] + runs[run_count - 1, 3]
            score(queries[head], runs[:run_count], nbytes, space, weights)
            for query in range(count):
                scores = weights[query, :columns]
                top = sinks[head, query]
                for column in range(columns):
                    top = max(top, scores[column])
                sink = np.exp(sinks[head, query] - top)
                totals[query] = exp(scores, top) + sink
                mixed[head, query] *= sink
            mix(weights, runs[:run_count], nbytes, space, mixed[head])
            for query in range(count):  # normalize
                mixed[head, query] /= totals[query]

    return attend
