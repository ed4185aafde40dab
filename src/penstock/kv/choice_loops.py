"""Loops over an index and over chosen blocks where they lie, compiled for the CPU by Numba.

They take addresses: a sequence has many segments, and a call for each would take longer than its
work. Whoever calls keeps the arrays alive meanwhile. NumPy does the same in several passes where
Numba is not installed (`penstock[cpu]` brings it). The sums of an index are equal to the bit, and
so is the choice, but for blocks that are wanted equally up to rounding.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kv.sign_products import (
    HIDDEN,
    LANE_BITS,
    LANES,
    LEVELS,
    LEVELS_BELOW,
    Floats,
    units_of,
)

logger = logging.getLogger(__name__)
BLOCK_TOKENS = 16
"""Tokens that are chosen together."""
FIRST_BLOCKS = 1
"""First blocks, which are always read: many heads rest on them."""
CHOSEN = 1e30
"""Score of a block with a key too large for the index: above all others."""
Addresses: TypeAlias = npt.NDArray[np.int64]
_SUMS = {"reassoc", "contract"}
"""Liberties of the compiler: sums in any order, and products added without rounding."""


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Where one layer of consecutive tokens lies, in several spans."""

    starts: Addresses
    """Position of the first token of each span, and of the token behind the last, (spans + 1,)."""
    sides: Addresses
    """Addresses of each span's keys, values, and index, see `side_addresses`: (spans, 4, 2)."""


@dataclass(frozen=True, slots=True)
class ChoiceLoops:
    """The loops for keys of one size; all let Python's lock go."""

    signs: int
    """Signs that the index has of a token."""
    key_dim: int
    value_dim: int
    _choose: Any
    _attend: Any

    def compile(self) -> None:
        """Compile all loops now, not in a step: some seconds, and 200 MB for the compiler."""
        held = [
            np.zeros((1, 2 * BLOCK_TOKENS, width), kind)
            for width, kind in (
                (self.key_dim, np.float32),
                (self.value_dim, np.float32),
                (self.signs // 32, np.uint32),
                (1, np.float16),
            )
        ]
        sides = np.array([side_addresses(array) for array in held], np.int64)
        spans = SpanTable(np.array([0, 2 * BLOCK_TOKENS], np.int64), sides[None])
        blocks = self.choose(np.zeros((1, 1, self.signs), np.float32), spans, 2, 1)
        self.attend(np.zeros((1, 1, self.key_dim), np.float32), spans, blocks, 1, None)

    def choose(
        self, x: Floats, spans: SpanTable, stop: int, count: int, first_head: int = 0
    ) -> Addresses:
        """Choose the best blocks of each head: their numbers, in order, (heads, count).

        Args:
            x: queries as `KeyIndex.transform_query` returns them, (heads, m, signs).
            spans: tokens whose index lies there.
            stop: number of the block behind those to choose from; the first are always read.
            count: blocks that are chosen.
            first_head: number of the first of the heads.
        """
        chosen = np.empty((len(x), count), np.int64)
        self._choose(
            x, units_of(x), spans.sides, spans.starts, first_head, stop, LEVELS_BELOW, chosen
        )
        return chosen

    def attend(
        self,
        queries: Floats,
        spans: SpanTable,
        blocks: Addresses,
        recent: int,
        sinks: Floats | None,
        first_head: int = 0,
    ) -> Floats:
        """Read the first tokens, blocks, and recent tokens: (heads, m, value_dim).

        Args:
            queries: (heads, m, key_dim), scaled so that e^score is a weight.
            spans: float32; the last one is the tail, with the new token.
            blocks: numbers of the blocks that each head reads, in order, (heads, n).
            recent: number of the first block whose tokens are recent.
            sinks: see `attention.merged`, in base e, (heads, m).
            first_head: number of the first of the heads.
        """
        heads, m, _ = queries.shape
        mixed = np.zeros((heads, m, self.value_dim), np.float32)
        below = np.full((heads, m), -np.inf, np.float32) if sinks is None else sinks
        self._attend(queries, spans.sides, spans.starts, first_head, blocks, recent, below, mixed)
        return mixed


_NOWHERE = np.zeros(2, np.int64)


def side_addresses(array: npt.NDArray[Any] | None) -> Addresses:
    """Return the address of an array's first token, and the bytes from one head to the next.

    Args:
        array: (kv_heads, tokens, numbers); a head's tokens lie in order, without gaps. None where
            there is none. Whoever reads it there keeps it alive.
    """
    if array is None:
        return _NOWHERE
    return np.array([array.__array_interface__["data"][0], array.strides[0]], np.int64)


def choice_loops(signs: int, key_dim: int, value_dim: int) -> ChoiceLoops | None:
    """Return the loops for keys and values of a size; None where Numba cannot be imported."""
    if not _has_numba():
        return None
    loops = _choose_loop(signs // 32), _attend_loop(key_dim, value_dim)
    return ChoiceLoops(signs, key_dim, value_dim, *loops)


@cache
def _has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError as error:  # it is not there, or does not go with this NumPy
        logger.info("choices are read by NumPy, not by compiled loops: %s", error)
        return False
    return True


@cache
def _pointer() -> Any:
    """Return a function for loops that takes a number for an address."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], cgutils.voidptr_t)

        return types.voidptr(types.int64), generate

    return pointer


@cache
def _fill_loop() -> Any:
    """Return the loop that fills the tables of one head's queries; see `sign_products`."""
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
    """Return the loop that sums some tokens of a block, by the table of four queries."""
    from numba import int64, njit, uint32

    hidden, last = int(HIDDEN), len(LEVELS_BELOW) - 1

    @njit(nogil=True)
    def sum_up(table, signs, held, top, levels, sums):  # type: ignore[no-untyped-def]
        for token in range(len(held)):
            total = int64(0)
            for word in range(words):
                code = signs[token, word]
                total += (
                    table[4 * word, code & uint32(255)]
                    + table[4 * word + 1, (code >> uint32(8)) & uint32(255)]
                    + table[4 * word + 2, (code >> uint32(16)) & uint32(255)]
                    + table[4 * word + 3, code >> uint32(24)]
                )
            lower = min((int64(top) - int64(held[token])) >> 3, last)
            sums[token] = total * levels[lower] + hidden

    return sum_up


@cache
def _best_loop(words: int) -> Any:
    """Return the loop over an index of so many words a token, for one head."""
    from numba import carray, njit, uint16

    pointer, sum_up = _pointer(), _sum_loop(words)
    block, lanes_of = BLOCK_TOKENS, LANES

    @njit(nogil=True)
    def best(tables, sides, starts, head, levels, first, into, largest):  # type: ignore[no-untyped-def]
        sums = np.empty(block, np.int64)
        lanes = sums.view(np.uint16).reshape(block, lanes_of)
        at = 0
        for number in range(into.shape[1]):
            start = (first + number) * block
            while starts[at + 1] <= start:
                at += 1
            span, done, top = at, 0, uint16(0)
            while done < block:
                column = start + done - starts[span]
                run = min(block - done, starts[span + 1] - start - done)
                address = sides[span, 3, 0] + head * sides[span, 3, 1] + 2 * column
                held = carray(pointer(address), run, np.uint16)
                for token in range(run):
                    top = max(top, held[token])
                span, done = span + 1, done + run
            largest[number] = top
            for query in range(len(tables)):
                span, done = at, 0
                while done < block:
                    column = start + done - starts[span]
                    run = min(block - done, starts[span + 1] - start - done)
                    address = sides[span, 3, 0] + head * sides[span, 3, 1] + 2 * column
                    held = carray(pointer(address), run, np.uint16)
                    address = sides[span, 2, 0] + head * sides[span, 2, 1] + 4 * words * column
                    signs = carray(pointer(address), (run, words), np.uint32)
                    sum_up(tables[query], signs, held, top, levels, sums[done:])
                    span, done = span + 1, done + run
                for lane in range(lanes_of):
                    most = uint16(0)
                    for token in range(block):
                        most = max(most, lanes[token, lane])
                    into[lanes_of * query + lane, number] = most

    return best


@cache
def _exp_loop() -> Any:
    """Return the loop that replaces numbers <= 0 by their exponentials, and returns the sum.

    In a form that the compiler can vectorize: a power of two by its bits, and a polynomial
    (Taylor's, up to x^6) for the rest of at most half a bit.
    """
    from numba import float32, int32, njit

    most, log2_e, log_2 = float32(-87), float32(1 / math.log(2)), float32(math.log(2))

    @njit(nogil=True, fastmath=_SUMS)
    def exp(values):  # type: ignore[no-untyped-def]
        powers = np.empty(len(values), np.int32)
        for number in range(len(values)):
            x = max(values[number], most)
            power = np.rint(x * log2_e)
            powers[number] = (int32(power) + int32(127)) << int32(23)
            rest = x - power * log_2
            sum_ = float32(1 / 720) * rest + float32(1 / 120)
            for part in (float32(1 / 24), float32(1 / 6), float32(0.5), float32(1), float32(1)):
                sum_ = sum_ * rest + part
            values[number] = sum_
        scales, total = powers.view(np.float32), float32(0)
        for number in range(len(values)):
            values[number] *= scales[number]
            total += values[number]
        return total

    return exp


@cache
def _select_loop() -> Any:
    """Return the loop that finds the smallest of some numbers, which are not negative."""
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
def _choose_loop(words: int) -> Any:
    """Return the loop that chooses blocks by an index of so many words a token."""
    from numba import float32, int32, njit

    fill, best, exp, select = _fill_loop(), _best_loop(words), _exp_loop(), _select_loop()
    lanes, first, half = LANES, FIRST_BLOCKS, float32(2 ** (LANE_BITS - 1))
    most, levels_of = float32(CHOSEN), float32(LEVELS)

    @njit(nogil=True)
    def choose(x, units, sides, starts, first_head, stop, levels, chosen):  # type: ignore[no-untyped-def]
        heads, queries, _ = x.shape
        blocks, groups = stop - first, -(-queries // lanes)
        tables = np.empty((groups, 4 * words, 256), np.int64)
        sums = np.empty((groups * lanes, blocks), np.uint16)
        largest = np.empty(blocks, np.uint16)
        bits = np.empty(blocks, np.int32)
        steps = bits.view(np.float32)
        scores, weights = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        lacks = np.empty(blocks, np.float32)
        for head in range(heads):
            fill(tables, x[head], units[head])
            best(tables, sides, starts, first_head + head, levels, first, sums, largest)
            for number in range(blocks):  # float16 to float32: another place, another bias
                bits[number] = int32(largest[number]) << int32(13)
            for number in range(blocks):
                steps[number] = steps[number] * float32(2.0**112) / levels_of
                if largest[number] >= 0x7C00:
                    steps[number] = np.inf
            for number in range(blocks):
                lacks[number] = np.inf
            for query in range(queries):
                unit = units[head, query, 0]
                top = float32(-np.inf)
                for number in range(blocks):
                    score = (float32(sums[query, number]) - half) * steps[number] * unit
                    score = score if np.isfinite(score) else most
                    scores[number] = score
                    top = max(top, score)
                for number in range(blocks):
                    weights[number] = scores[number] - top
                total = top + np.log(exp(weights))
                for number in range(blocks):
                    lacks[number] = min(lacks[number], max(total - scores[number], float32(0)))
            select(lacks, first, chosen[head])

    return choose


@cache
def _runs_loop(key_dim: int, value_dim: int) -> Any:
    """Return the loop that finds where the tokens of blocks lie: runs of one span.

    A run is the addresses of its keys and of its values, its column among all tokens read, and its
    tokens.
    """
    from numba import njit

    block = BLOCK_TOKENS

    @njit(nogil=True)
    def find(sides, starts, head, blocks, runs):  # type: ignore[no-untyped-def]
        count = span = 0
        for place in range(len(blocks)):
            token = blocks[place] * block
            stop = min(token + block, starts[-1])
            while token < stop:
                while starts[span + 1] <= token:
                    span += 1
                end, column = min(stop, starts[span + 1]), token - starts[span]
                at = sides[span]
                runs[count, 0] = at[0, 0] + head * at[0, 1] + column * (key_dim * 4)
                runs[count, 1] = at[1, 0] + head * at[1, 1] + column * (value_dim * 4)
                runs[count, 2] = place * block + token - blocks[place] * block
                runs[count, 3] = end - token
                count, token = count + 1, end
        return count

    return find


@cache
def _score_loop(key_dim: int) -> Any:
    """Return the loop that multiplies queries with keys of this size."""
    from numba import carray, float32, njit

    pointer = _pointer()

    @njit(nogil=True, fastmath=_SUMS)
    def score(queries, runs, scores):  # type: ignore[no-untyped-def]
        for address, _, column, tokens in runs:
            keys = carray(pointer(address), (tokens, key_dim), np.float32)
            for token in range(tokens):
                for query in range(len(queries)):
                    total = float32(0)
                    for number in range(key_dim):
                        total += queries[query, number] * keys[token, number]
                    scores[query, column + token] = total

    return score


@cache
def _mix_loop(value_dim: int) -> Any:
    """Return the loop that mixes values of this size."""
    from numba import carray, njit

    pointer = _pointer()

    @njit(nogil=True, fastmath=_SUMS)
    def mix(weights, runs, mixed):  # type: ignore[no-untyped-def]
        for _, address, column, tokens in runs:
            held = carray(pointer(address), (tokens, value_dim), np.float32)
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
def _attend_loop(key_dim: int, value_dim: int) -> Any:
    """Return the loop of attention to first, chosen and recent tokens of these sizes."""
    from numba import njit

    find, exp = _runs_loop(key_dim, value_dim), _exp_loop()
    score, mix = _score_loop(key_dim), _mix_loop(value_dim)
    block, first = BLOCK_TOKENS, FIRST_BLOCKS

    @njit(nogil=True)
    def attend(queries, sides, starts, first_head, chosen, recent, sinks, mixed):  # type: ignore[no-untyped-def]
        heads, count, _ = queries.shape
        own = chosen.shape[1]
        blocks = np.empty(first + own + (starts[-1] - 1) // block + 1 - recent, np.int64)
        for place in range(len(blocks)):
            blocks[place] = place if place < first else place - first - own + recent
        runs = np.empty((len(blocks) + len(starts), 4), np.int64)
        weights = np.empty((count, len(blocks) * block), np.float32)
        for head in range(heads):
            for place in range(own):
                blocks[first + place] = chosen[head, place]
            run_count = find(sides, starts, first_head + head, blocks, runs)
            columns = runs[run_count - 1, 2] + runs[run_count - 1, 3]
            score(queries[head], runs[:run_count], weights)
            for query in range(count):
                scores = weights[query, :columns]
                top = sinks[head, query]
                for column in range(columns):
                    top = max(top, scores[column])
                for column in range(columns):
                    scores[column] -= top
                total = exp(scores) + np.exp(sinks[head, query] - top)
                for column in range(columns):
                    scores[column] /= total
            mix(weights, runs[:run_count], mixed[head])

    return attend
