"""Loops over an index and over chosen blocks where they lie, compiled for the CPU by Numba.

They take addresses: a sequence has many segments, and a call for each would take longer than its
work. Whoever calls keeps the arrays alive meanwhile. NumPy does the same in several passes where
Numba is not installed (`penstock[cpu]` brings it); the scores of blocks are equal to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kv.codecs.turbo import padded
from penstock.kv.sign_products import HIDDEN, LANES, LEVELS_BELOW, Floats, products, units_of

logger = logging.getLogger(__name__)
BLOCK_TOKENS = 16
"""Tokens that are chosen together."""
Addresses: TypeAlias = npt.NDArray[np.int64]
_SUMS = {"reassoc", "contract"}
"""Liberties of the compiler: sums in any order, and products added without rounding."""


@dataclass(frozen=True, slots=True)
class ArrayAddress:
    """One array of a layer, (kv_heads, tokens, numbers); a head's tokens lie in order, no gaps."""

    array: npt.NDArray[Any]
    """Kept while its address is used."""
    address: int
    apart: int
    """Bytes from one head to the next."""

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> ArrayAddress:
        """Find an array."""
        return cls(array, array.__array_interface__["data"][0], array.strides[0])


@dataclass(frozen=True, slots=True)
class SpanAddresses:
    """Consecutive tokens of one layer in several arrays."""

    held: Sequence[ArrayAddress]
    starts: Addresses
    """Position of the first token of each, and of the token behind the last, (n + 1,)."""
    addresses: Addresses
    """Addresses of the first token of each array and head, (n, kv_heads)."""

    @classmethod
    def of(cls, held: Sequence[ArrayAddress], starts: Sequence[int]) -> SpanAddresses:
        """Lay arrays one behind the other."""
        at = np.array([one.address for one in held], np.int64)[:, None]
        apart = np.array([one.apart for one in held], np.int64)[:, None]
        addresses = at + apart * np.arange(len(held[0].array))
        return cls(held, np.array(starts, np.int64), addresses)

    def of_heads(self, heads: slice) -> SpanAddresses:
        """Return the spans of some heads."""
        return SpanAddresses(self.held, self.starts, self.addresses[:, heads])


@dataclass(frozen=True, slots=True)
class ChoiceLoops:
    """The loops for keys of one size; all let Python's lock go."""

    key_dim: int
    value_dim: int
    _best: Any
    _score: Any
    _mix: Any

    def compile(self) -> None:
        """Compile all loops now, not in a step: two seconds, and 180 MB for the compiler."""
        blocks = np.zeros((1, 1), np.int64)
        codes, sizes, keys, values = (
            SpanAddresses.of(
                [ArrayAddress.of(np.zeros((1, BLOCK_TOKENS, *rest), kind))], [0, BLOCK_TOKENS]
            )
            for kind, rest in (
                (np.uint32, [padded(self.key_dim) // 32]),
                (np.float16, []),
                (np.float32, [self.key_dim]),
                (np.float32, [self.value_dim]),
            )
        )
        self.best_by_block(np.zeros((1, 1, padded(self.key_dim)), np.float32), codes, sizes)
        scores = self.score(np.zeros((1, 1, self.key_dim), np.float32), keys, blocks)
        self.mix(scores, values, blocks)

    def best_by_block(self, x: Floats, codes: SpanAddresses, sizes: SpanAddresses) -> Floats:
        """Return the largest product of each block, (heads, m, blocks); see `sign_products`.

        Args:
            x: queries, (heads, m, n).
            codes: words of 32 signs.
            sizes: float16, one a token.
        """
        heads, m, _ = x.shape
        words = -(-m // LANES)
        units = units_of(x)
        blocks = int(codes.starts[-1]) // BLOCK_TOKENS
        best = np.empty((heads, words * LANES, blocks), np.uint16)
        largest = np.empty((heads, blocks), np.uint16)
        parts = codes.addresses, sizes.addresses, codes.starts
        self._best(x, units, *parts, LEVELS_BELOW, best, largest)
        return products(best[:, :m].astype(np.float32), largest, units)

    def score(self, queries: Floats, keys: SpanAddresses, blocks: Addresses) -> Floats:
        """Multiply queries with keys of blocks, (heads, m, blocks * BLOCK_TOKENS).

        Args:
            queries: (heads, m, dim).
            keys: float32.
            blocks: numbers of the blocks that each head reads, in order, (heads, n).

        Returns:
            A score for each token of the blocks; -inf for those that no array has.
        """
        heads, m, _ = queries.shape
        scores = np.full((heads, m, blocks.shape[1] * BLOCK_TOKENS), -np.inf, np.float32)
        self._score(queries, keys.addresses, keys.starts, blocks, scores)
        return scores

    def mix(self, weights: Floats, values: SpanAddresses, blocks: Addresses) -> Floats:
        """Mix values of blocks by the weights of their tokens, (heads, m, dim); see `score`."""
        mixed = np.zeros((*weights.shape[:2], self.value_dim), np.float32)
        self._mix(weights, values.addresses, values.starts, blocks, mixed)
        return mixed


def choice_loops(key_dim: int, value_dim: int) -> ChoiceLoops | None:
    """Return the loops for keys and values of a size; None where Numba cannot be imported."""
    if not _has_numba():
        return None
    loops = _best_loop(padded(key_dim) // 32), _score_loop(key_dim), _mix_loop(value_dim)
    return ChoiceLoops(key_dim, value_dim, *loops)


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
                signed[:] = 0
                for lane in range(min(lanes, x.shape[0] - lanes * query)):
                    one = lanes * query + lane
                    for bit in range(8):
                        number = np.rint(x[one, 8 * place + bit] / units[one, 0])
                        if not np.isnan(number):
                            signed[bit] += int64(number) << int64(16 * lane)
                table[0] = -signed.sum()
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
    """Return the loop over an index of so many words a token."""
    from numba import carray, njit, uint16

    pointer, fill, sum_up = _pointer(), _fill_loop(), _sum_loop(words)
    block, lanes_of = BLOCK_TOKENS, LANES

    @njit(nogil=True)
    def best(x, units, codes, sizes, starts, levels, into, largest):  # type: ignore[no-untyped-def]
        sums = np.empty(block, np.int64)
        lanes = sums.view(np.uint16).reshape(block, lanes_of)
        tables = np.empty((into.shape[1] // lanes_of, 4 * words, 256), np.int64)
        for head in range(x.shape[0]):
            fill(tables, x[head], units[head])
            at = 0
            for number in range(into.shape[2]):
                first = number * block
                while starts[at + 1] <= first:
                    at += 1
                span, done, top = at, 0, uint16(0)
                while done < block:
                    column = first + done - starts[span]
                    run = min(block - done, starts[span + 1] - first - done)
                    held = carray(pointer(sizes[span, head] + 2 * column), run, np.uint16)
                    for token in range(run):
                        top = max(top, held[token])
                    span, done = span + 1, done + run
                largest[head, number] = top
                for query in range(len(tables)):
                    span, done = at, 0
                    while done < block:
                        column = first + done - starts[span]
                        run = min(block - done, starts[span + 1] - first - done)
                        held = carray(pointer(sizes[span, head] + 2 * column), run, np.uint16)
                        address = codes[span, head] + 4 * words * column
                        signs = carray(pointer(address), (run, words), np.uint32)
                        sum_up(tables[query], signs, held, top, levels, sums[done:])
                        span, done = span + 1, done + run
                    for lane in range(lanes_of):
                        most = uint16(0)
                        for token in range(block):
                            most = max(most, lanes[token, lane])
                        into[head, lanes_of * query + lane, number] = most

    return best


@cache
def _score_loop(key_dim: int) -> Any:
    """Return the loop that multiplies queries with keys of this size."""
    from numba import carray, float32, njit

    pointer, block = _pointer(), BLOCK_TOKENS

    @njit(nogil=True, fastmath=_SUMS)
    def score(queries, keys, starts, blocks, scores):  # type: ignore[no-untyped-def]
        for head in range(blocks.shape[0]):
            span = 0
            for place in range(blocks.shape[1]):
                first = blocks[head, place] * block
                for token in range(max(first, starts[0]), min(first + block, starts[-1])):
                    while starts[span + 1] <= token:
                        span += 1
                    key = carray(
                        pointer(keys[span, head] + (token - starts[span]) * (key_dim * 4)),
                        key_dim,
                        np.float32,
                    )
                    for query in range(queries.shape[1]):
                        total = float32(0)
                        for number in range(key_dim):
                            total += queries[head, query, number] * key[number]
                        scores[head, query, place * block + token - first] = total

    return score


@cache
def _mix_loop(value_dim: int) -> Any:
    """Return the loop that mixes values of this size."""
    from numba import carray, njit

    pointer, block = _pointer(), BLOCK_TOKENS

    @njit(nogil=True, fastmath=_SUMS)
    def mix(weights, values, starts, blocks, mixed):  # type: ignore[no-untyped-def]
        for head in range(blocks.shape[0]):
            span = 0
            for place in range(blocks.shape[1]):
                first = blocks[head, place] * block
                token, stop = max(first, starts[0]), min(first + block, starts[-1])
                while token < stop:
                    while starts[span + 1] <= token:
                        span += 1
                    count = min(4, min(stop, starts[span + 1]) - token)
                    held = carray(
                        pointer(values[span, head] + (token - starts[span]) * (value_dim * 4)),
                        (count, value_dim),
                        np.float32,
                    )
                    column = place * block + token - first
                    for query in range(weights.shape[1]):
                        own = weights[head, query, column : column + count]
                        into = mixed[head, query]
                        if count == 4:
                            for number in range(value_dim):
                                into[number] += (
                                    own[0] * held[0, number]
                                    + own[1] * held[1, number]
                                    + own[2] * held[2, number]
                                    + own[3] * held[3, number]
                                )
                        else:
                            for one in range(count):
                                for number in range(value_dim):
                                    into[number] += own[one] * held[one, number]
                    token += count

    return mix
