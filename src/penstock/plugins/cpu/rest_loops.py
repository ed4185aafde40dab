"""Compiled loop for approximate attention to unselected blocks; see `choice_loops`.

Keys are stored in the index as signs, and scored by lookup tables. A table has the sums of a query
for all 256 values of a byte of signs, with four queries packed into a word, so that one lookup per
byte scores a token for four queries. Values are converted to floats a few tokens at a time, and
summed like exact ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS, HALF_NOISE
from penstock.kv.codecs.turbo import STEPS
from penstock.kv.numpy_arrays import Floats
from penstock.plugins.cpu.attending_loops import mix_loop
from penstock.plugins.cpu.attention_tiles import FLOAT_BYTES
from penstock.plugins.cpu.compiled import exp_loop, half_bits_loop, pointer

BLOCKS_AT_ONCE = 64
"""Number of blocks whose weights are in memory at once."""
CODES = 16
"""Number of 2-bit codes per word."""
LANES = 4
"""Number of queries of a KV head whose sums are packed into one 64-bit word."""
LANE_BITS = 16
MOST = 2 ** (LANE_BITS - 1) - 1
"""Maximum sum of the absolute values of a query's integers."""
HIDDEN = np.int64(-(2**63) + 2**47 + 2**31 + 2**15)
"""Half of every lane's range, added so that lanes can be read as unsigned integers."""


def units_of(x: Floats) -> Floats:
    """Return the scale from each query (heads, m, n) to integers, (heads, m, 1)."""
    total = np.abs(x).sum(axis=-1, keepdims=True)
    # Rounding may add half a unit to each number.
    units: Floats = np.maximum(total, 1e-30) / np.float32(MOST - x.shape[-1] / 2)
    return units


@cache
def _fill_loop() -> Any:
    """Compile the construction of the lookup tables of one head's queries."""
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
def _sum_loop(words: int) -> Any:
    """Compile the score of a token for four queries, by lookups in their table."""
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
def _widen_loop(words: int) -> Any:
    """Compile the conversion of tokens' codes to floats, not yet scaled."""
    from numba import carray, njit, uint32

    address_of = pointer()
    codes = (np.arange(256)[:, None] >> np.arange(0, 8, 2)) & 3
    numbers = ((codes - 1.5) * STEPS[2]).astype(np.float32)

    @njit(nogil=True)
    def widen(address, tokens, wide):  # type: ignore[no-untyped-def]
        held = carray(address_of(address), (tokens, words), np.uint32)
        for token in range(tokens):
            into = wide[token]
            for word in range(words):
                code = held[token, word]
                for octet in range(4):
                    four = numbers[code & uint32(255)]
                    place = CODES * word + 4 * octet
                    for number in range(4):
                        into[place + number] = four[number]
                    code >>= uint32(8)

    return widen


@cache
def _lane_loops(words: int) -> tuple[Any, Any]:
    """Compile the scores of tokens for four queries, and the extraction of one query's scores."""
    from numba import float32, njit

    sum_up, hidden = _sum_loop(words), int(HIDDEN)
    lanes_of, half = LANES, float32(2 ** (LANE_BITS - 1))

    @njit(nogil=True)
    def add(table, signs, totals):  # type: ignore[no-untyped-def]
        for token in range(len(signs)):
            totals[token] = sum_up(table, signs, token) + hidden

    @njit(nogil=True)
    def spread(lanes, into):  # type: ignore[no-untyped-def]
        for token in range(len(into)):
            into[token] = float32(lanes[lanes_of * token]) - half

    return add, spread


@cache
def _meet_loop(words: int, value_words: int) -> Any:
    """Compile the scoring of unselected blocks with the index.

    Processes as many blocks as fit into the arrays. Writes the sums of all queries and the bits of
    the scales of key and value for each token; the address of the values' codes, the first column
    and the length of each run of tokens; and the index of each block. `place` is the next block,
    the number of selected blocks before it, and the index of its span.
    """
    from numba import carray, njit

    address_of, write_bits = pointer(), half_bits_loop()
    (add, spread), block, lanes_of = _lane_loops(words), BLOCK_TOKENS, LANES

    @njit(nogil=True)
    def meet(tables, sides, starts, head, chosen, stop, place, sums, bits, runs, blocks):  # type: ignore[no-untyped-def]
        number, own, at = place
        totals = np.empty(block, np.int64)
        lanes = totals.view(np.uint16)
        queries, most = sums.shape
        columns = count = 0
        while number < stop and columns + block <= most:
            if own < len(chosen) and chosen[own] == number:
                own, number = own + 1, number + 1
                continue
            blocks[columns // block] = number
            token, end = number * block, (number + 1) * block
            while token < end:
                while starts[at + 1] <= token:
                    at += 1
                side, column = sides[at], token - starts[at]
                run = min(end, starts[at + 1]) - token
                codes = side[:, 0] + head * side[:, 1]
                signs = carray(address_of(codes[2] + 4 * words * column), (run, words), np.uint32)
                sizes = carray(address_of(codes[3] + 2 * column), run, np.uint16)
                own_sizes = carray(address_of(codes[5] + 2 * column), run, np.uint16)
                for group in range(len(tables)):
                    add(tables[group], signs, totals)
                    for lane in range(min(lanes_of, queries - lanes_of * group)):
                        spread(lanes[lane:], sums[lanes_of * group + lane, columns : columns + run])
                write_bits(sizes, bits[0, columns : columns + run])
                write_bits(own_sizes, bits[1, columns : columns + run])
                runs[count, 0] = codes[4] + 4 * value_words * column
                runs[count, 1] = columns
                runs[count, 2] = run
                count, columns, token = count + 1, columns + run, token + run
            number += 1
        return (number, own, at), columns, count

    return meet


@cache
def rest_loop(words: int, value_words: int) -> Any:
    """Compile attention to unselected blocks, for keys and values of the given numbers of words."""
    from numba import float32, njit

    fill, exp, mix = _fill_loop(), exp_loop(), mix_loop(CODES * value_words)
    meet, widen = _meet_loop(words, value_words), _widen_loop(value_words)
    lanes, block, first = LANES, BLOCK_TOKENS, FIRST_BLOCKS
    most, dim = BLOCKS_AT_ONCE * BLOCK_TOKENS, CODES * value_words
    noise, bias, float_bytes = float32(HALF_NOISE), float32(2.0**112), FLOAT_BYTES
    infinite = float32(2.0**16)  # the converted bits of an infinite float16

    @njit(nogil=True)
    def score(sums, sizes, unit, above, center):  # type: ignore[no-untyped-def]
        top = float32(-np.inf)
        for token in range(len(sums)):
            size = sizes[token] * bias
            scored = size * (sums[token] * unit - above * size) + center
            sums[token] = scored if size < infinite else float32(-1e30)
            top = max(top, sums[token])
        return top

    @njit(nogil=True)
    def rest(  # type: ignore[no-untyped-def]
        x, units, squares, centers, sides, starts, first_head, chosen, stop, tops, totals, mixed
    ):  # fmt: skip
        heads, queries, _ = x.shape
        tables = np.empty((-(-queries // lanes), 4 * words, 256), np.int64)
        weights, bits = np.empty((queries, most), np.float32), np.empty((2, most), np.int32)
        sizes, runs = bits.view(np.float32), np.empty((most, 3), np.int64)
        blocks = np.empty(most // block, np.int64)
        wide, one = np.empty((block, dim), np.float32), np.empty((1, 4), np.int64)
        nothing = np.empty(0, np.float32)
        one[0, 1] = wide.ctypes.data
        for head in range(heads):
            fill(tables, x[head], units[head])
            place = (first, 0, 0)
            while place[0] < stop:
                place, columns, count = meet(
                    *(tables, sides, starts, first_head + head, chosen[head], stop, place),
                    *(weights, bits, runs, blocks),
                )
                for query in range(queries if columns else 0):
                    own, unit = weights[query, :columns], units[head, query, 0]
                    above, top = squares[head, query] * noise, tops[head, query]
                    for number in range(columns // block):
                        center = centers[head, query, blocks[number]]
                        at = slice(block * number, block * (number + 1))
                        top = max(top, score(own[at], sizes[0, at], unit, above, center))
                    shrunk = np.exp(tops[head, query] - top)
                    tops[head, query] = top
                    totals[head, query] = totals[head, query] * shrunk + exp(own, top)
                    mixed[head, query] *= shrunk
                    for column in range(columns):
                        own[column] *= sizes[1, column] * bias
                for number in range(count):
                    widen(runs[number, 0], runs[number, 2], wide)
                    one[0, 2:] = runs[number, 1:]
                    mix(weights, one, float_bytes, nothing, mixed[head])

    return rest
