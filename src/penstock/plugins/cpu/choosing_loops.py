"""Compiled selection of blocks with the key index; see `choice_loops`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS, LEAST_SHARE
from penstock.plugins.cpu.compiled import exp_loop, pointer
from penstock.plugins.cpu.index_products import QUERIES, SHIFTS, block_product


@cache
def _pack_loop(words: int) -> Any:
    """Compile the packing of one head's queries into bytes; see `index_products`."""
    from numba import int32, int64, njit, uint32

    @njit(nogil=True)
    def pack(whole, packed, less):  # type: ignore[no-untyped-def]
        for query in range(len(whole)):
            total = int64(0)
            for word in range(words):
                for shift in range(SHIFTS):
                    group = uint32(0)
                    for octet in range(4):
                        number = whole[query, 16 * word + 4 * octet + shift]
                        if not np.isnan(number):
                            total += int64(number)
                            group |= uint32(int64(number) & 255) << uint32(8 * octet)
                    packed[query, shift, word] = group
            less[query] = int32(3 * total)

    return pack


@cache
def _best_loop(words: int) -> Any:
    """Compile the scoring of one head's blocks, from the first on, by `words` words per token.

    A product of an integer sum and a float16 is exact in float32; see `KeyIndex.products`.
    """
    from numba import carray, njit

    address_of, block = pointer(), BLOCK_TOKENS
    (most, fewer, one), (four, two, single) = QUERIES, (block_product(words, n) for n in QUERIES)
    query_bytes = 4 * SHIFTS * words

    @njit(nogil=True)
    def best(packed, less, sides, starts, head, into):  # type: ignore[no-untyped-def]
        queries, stride = into.shape[0], into.strides[0]
        own_codes, own_sizes = np.empty((block, words), np.uint32), np.empty(block, np.uint16)
        x, off, out = packed.ctypes.data, less.ctypes.data, into.ctypes.data
        at = 0
        for number in range(into.shape[1]):
            start = number * block
            while starts[at + 1] <= start:
                at += 1
            column = start - starts[at]
            codes = sides[at, 2, 0] + head * sides[at, 2, 1] + 4 * words * column
            sizes = sides[at, 3, 0] + head * sides[at, 3, 1] + 2 * column
            if starts[at + 1] < start + block:  # in several spans: copied together
                span, done = at, 0
                while done < block:
                    column = start + done - starts[span]
                    run = min(block - done, starts[span + 1] - start - done)
                    codes = sides[span, 2, 0] + head * sides[span, 2, 1] + 4 * words * column
                    sizes = sides[span, 3, 0] + head * sides[span, 3, 1] + 2 * column
                    held = carray(address_of(codes), (run, words), np.uint32)
                    held_sizes = carray(address_of(sizes), run, np.uint16)
                    own_codes[done : done + run] = held
                    own_sizes[done : done + run] = held_sizes
                    span, done = span + 1, done + run
                codes, sizes = own_codes.ctypes.data, own_sizes.ctypes.data
            query, place = 0, out + 4 * number
            while query + most <= queries:
                four(codes, sizes, x + query * query_bytes, off + 4 * query, place, stride)
                query, place = query + most, place + most * stride
            if query + fewer <= queries:
                two(codes, sizes, x + query * query_bytes, off + 4 * query, place, stride)
                query, place = query + fewer, place + fewer * stride
            if query + one <= queries:
                single(codes, sizes, x + query * query_bytes, off + 4 * query, place, stride)

    return best


@cache
def _select_loop() -> Any:
    """Compile the selection of the indices of the largest of non-negative numbers."""
    from numba import int32, njit

    @njit(nogil=True)
    def count(bits, border):  # type: ignore[no-untyped-def]
        above = int32(0)
        for number in range(len(bits)):
            above += int32(bits[number] > border)
        return above

    @njit(nogil=True)
    def select(numbers, first, chosen):  # type: ignore[no-untyped-def]
        bits = numbers.view(np.int32)  # ordered like the numbers
        size, border = len(bits) // max(1, len(chosen)), int32(2**31 - 1)
        for part in range(len(chosen)):  # at least so many numbers reach `border`
            top = int32(0)
            for number in range(part * size, (part + 1) * size):
                top = max(top, bits[number])
            border = min(border, top)
        places, held = np.empty(len(bits), np.int32), 0
        for number in range(len(bits)):
            places[held] = number
            held += bits[number] >= border
        values, border = bits[places[:held]], int32(0)
        for bit in range(30, -1, -1):
            higher = border | (int32(1) << int32(bit))
            if count(values, higher - int32(1)) >= len(chosen):
                border = higher
        equal, place = len(chosen) - count(values, border), 0
        for number in range(held):
            if values[number] > border or (values[number] == border and equal > 0):
                equal -= values[number] == border
                chosen[place] = first + places[number]
                place += 1

    return select


@cache
def choose_loop(words: int) -> Any:
    """Compile the selection of blocks with an index of `words` words per token."""
    from numba import float32, njit

    pack, best, exp, select = _pack_loop(words), _best_loop(words), exp_loop(), _select_loop()
    first, least = FIRST_BLOCKS, float32(LEAST_SHARE)

    @njit(nogil=True)
    def choose(whole, units, centers, sides, starts, first_head, stop, chosen):  # type: ignore[no-untyped-def]
        heads, queries, _ = whole.shape
        packed, less = np.empty((queries, SHIFTS, words), np.uint32), np.empty(queries, np.int32)
        sums = np.empty((queries, stop), np.float32)
        weights, shares = np.empty(stop, np.float32), np.empty(stop, np.float32)
        for head in range(heads):
            pack(whole[head], packed, less)
            best(packed, less, sides, starts, first_head + head, sums)
            for number in range(stop):
                shares[number] = 0
            for query in range(queries):
                unit = units[head, query, 0]
                top = float32(-np.inf)
                for number in range(stop):
                    score = sums[query, number] * unit
                    score += centers[head, query, number]
                    weights[number] = score
                    top = max(top, score)
                share = float32(1) / exp(weights, top)
                for number in range(stop):
                    shares[number] += weights[number] * share
            for number in range(stop):
                shares[number] += least
            select(shares[first:], first, chosen[head])

    return choose
