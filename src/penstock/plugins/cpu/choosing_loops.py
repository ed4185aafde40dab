"""Compiled selection of blocks by the key index; see `choice_loops`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.plugins.cpu.compiled import exp_loop, half_bits_loop, pointer
from penstock.plugins.cpu.sign_products import HIDDEN, LANE_BITS, LANES


@cache
def fill_loop() -> Any:
    """Compile the construction of the tables for one head's queries; see `sign_products`."""
    from numba import int64, njit

    lanes = LANES

    @njit(nogil=True)
    def fill(tables, x, units):  # type: ignore[no-untyped-def]
        signed = np.empty(8, np.int64)
        for query in range(tables.shape[0]):
            for place in range(tables.shape[1]):
                table = tables[query, place]
                for bit in range(8):
                    signed[bit] = 0
                for lane in range(min(lanes, x.shape[0] - lanes * query)):
                    one = lanes * query + lane
                    for bit in range(8):
                        number = np.rint(x[one, 8 * place + bit] / units[one, 0])
                        if not np.isnan(number):
                            signed[bit] += int64(number) << int64(16 * lane)
                table[0] = 0
                for bit in range(8):
                    table[0] -= signed[bit]
                for bit in range(8):
                    for known in range(1 << bit):
                        table[(1 << bit) + known] = table[known] + 2 * signed[bit]

    return fill


@cache
def sum_loop(words: int) -> Any:
    """Compile the sum of a token's signs, looked up in the table of four queries."""
    from numba import int64, njit, uint32

    @njit(nogil=True)
    def sum_up(table, signs, token):  # type: ignore[no-untyped-def]
        total = int64(0)
        for word in range(words):
            code = signs[token, word]
            total += (
                table[4 * word, code & uint32(255)]
                + table[4 * word + 1, (code >> uint32(8)) & uint32(255)]
                + table[4 * word + 2, (code >> uint32(16)) & uint32(255)]
                + table[4 * word + 3, code >> uint32(24)]
            )
        return total

    return sum_up


@cache
def _sums_loop(words: int) -> Any:
    """Compile the sums of some tokens of a block, for four queries."""
    from numba import njit

    sum_up, hidden = sum_loop(words), int(HIDDEN)

    @njit(nogil=True)
    def sums_of(table, signs, sums):  # type: ignore[no-untyped-def]
        for token in range(len(sums)):
            sums[token] = sum_up(table, signs, token) + hidden

    return sums_of


@cache
def _best_loop(words: int) -> Any:
    """Compile the scores over an index with `words` words per token, for one head.

    A sum of whole numbers times a float16 is exact in float32; see `KeyIndex.products`.
    """
    from numba import carray, float32, njit

    address_of, sums_of, write_bits = pointer(), _sums_loop(words), half_bits_loop()
    block, lanes_of, half = BLOCK_TOKENS, LANES, float32(2 ** (LANE_BITS - 1))

    @njit(nogil=True)
    def best(tables, sides, starts, head, first, into):  # type: ignore[no-untyped-def]
        sums = np.empty(block, np.int64)
        lanes = sums.view(np.uint16).reshape(block, lanes_of)
        halves, bits = np.empty(block, np.uint16), np.empty(block, np.int32)
        sizes = bits.view(np.float32)
        at = 0
        for number in range(into.shape[1]):
            start = (first + number) * block
            while starts[at + 1] <= start:
                at += 1
            span, done = at, 0
            while done < block:
                column = start + done - starts[span]
                run = min(block - done, starts[span + 1] - start - done)
                address = sides[span, 3, 0] + head * sides[span, 3, 1] + 2 * column
                held = carray(address_of(address), run, np.uint16)
                for token in range(run):
                    halves[done + token] = held[token]
                span, done = span + 1, done + run
            write_bits(halves, bits)
            for token in range(block):
                sizes[token] *= float32(2.0**112)
            for query in range(len(tables)):
                span, done = at, 0
                while done < block:
                    column = start + done - starts[span]
                    run = min(block - done, starts[span + 1] - start - done)
                    address = sides[span, 2, 0] + head * sides[span, 2, 1] + 4 * words * column
                    signs = carray(address_of(address), (run, words), np.uint32)
                    sums_of(tables[query], signs, sums[done : done + run])
                    span, done = span + 1, done + run
                for lane in range(lanes_of):
                    most = float32(-np.inf)
                    for token in range(block):
                        most = max(most, (float32(lanes[token, lane]) - half) * sizes[token])
                    into[lanes_of * query + lane, number] = most

    return best


@cache
def _select_loop() -> Any:
    """Compile the selection of the smallest of non-negative numbers."""
    from numba import int32, njit

    @njit(nogil=True)
    def count(bits, border):  # type: ignore[no-untyped-def]
        below = int32(0)
        for number in range(len(bits)):
            below += int32(bits[number] < border)
        return below

    @njit(nogil=True)
    def select(numbers, first, chosen):  # type: ignore[no-untyped-def]
        bits = numbers.view(np.int32)  # in the order of the numbers
        border = int32(0)
        for bit in range(30, -1, -1):
            higher = border | (int32(1) << int32(bit))
            if count(bits, higher) < len(chosen):
                border = higher
        equal, place = len(chosen) - count(bits, border), 0
        for number in range(len(bits)):
            if bits[number] < border or (bits[number] == border and equal > 0):
                equal -= bits[number] == border
                chosen[place] = first + number
                place += 1

    return select


@cache
def choose_loop(words: int) -> Any:
    """Compile the selection of blocks by an index with `words` words per token."""
    from numba import float32, njit

    fill, best, exp, select = fill_loop(), _best_loop(words), exp_loop(), _select_loop()
    lanes, first = LANES, FIRST_BLOCKS

    @njit(nogil=True)
    def choose(x, units, centers, sides, starts, first_head, stop, chosen):  # type: ignore[no-untyped-def]
        heads, queries, _ = x.shape
        ones = np.ones((queries, 1), np.float32)
        blocks, groups = stop - first, -(-queries // lanes)
        tables = np.empty((groups, 4 * words, 256), np.int64)
        sums = np.empty((groups * lanes, blocks), np.float32)
        scores, weights = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        lacks = np.empty(blocks, np.float32)
        for head in range(heads):
            fill(tables, x[head], ones)
            best(tables, sides, starts, first_head + head, first, sums)
            for number in range(blocks):
                lacks[number] = np.inf
            for query in range(queries):
                unit = units[head, query, 0]
                top = float32(-np.inf)
                for number in range(blocks):
                    score = sums[query, number] * unit
                    score += centers[head, query, number]
                    scores[number] = weights[number] = score
                    top = max(top, score)
                total = top + np.log(exp(weights, top))
                for number in range(blocks):
                    lacks[number] = min(lacks[number], max(total - scores[number], float32(0)))
            select(lacks, first, chosen[head])

    return choose
