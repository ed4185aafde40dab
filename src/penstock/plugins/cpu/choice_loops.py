"""Loops over an index and over chosen blocks where they lie, compiled for the CPU by Numba.

They take addresses: a sequence has many segments, and a call for each would take longer than its
work. Whoever calls keeps the arrays alive meanwhile. NumPy does the same in several passes where
Numba is not installed (the extra `cpu` brings it). The sums of an index are equal to the bit, and
so is the choice, but for blocks that are wanted equally up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.rest_reads import Sinks
from penstock.attention.selection.rotations import Rotation
from penstock.attention.selection.spilled_reads import Located
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import is_spilled
from penstock.kv.codecs.turbo import padded
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.kv.segment import Segment
from penstock.plugins.cpu.attending_loops import PLACES, attend_loop, locate_loop
from penstock.plugins.cpu.center_loops import center_loop
from penstock.plugins.cpu.choosing_loops import choose_loop
from penstock.plugins.cpu.compiled import has_numba
from penstock.plugins.cpu.rest_loops import CODES, rest_loop
from penstock.plugins.cpu.sign_products import LEVELS_BELOW, MOST_ALONE, units_of

Addresses: TypeAlias = Integers
INDEX_PARTS = 4
"""Parts of an index, at most: codes and sizes of keys, and of values."""


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Where one layer of consecutive tokens lies, in several spans."""

    starts: Addresses
    """Position of the first token of each span, and of the token behind the last, (spans + 1,)."""
    sides: Addresses
    """Addresses of each span's keys and values, or their checksums if they are spilled; of its
    index's parts, and of the places of what is spilled, see `side_addresses`: (spans, 7, 2)."""

    @property
    def is_spilled(self) -> bool:
        """Whether keys and values of some tokens are in a tier."""
        return bool(self.sides[:, PLACES, 0].any())

    def read_blocks(self, chosen: Addresses, recent: int) -> int:
        """Return how many blocks a head reads: first, chosen and recent ones."""
        last = (int(self.starts[-1]) - 1) // BLOCK_TOKENS
        return FIRST_BLOCKS + int(chosen.shape[1]) + last + 1 - recent


@dataclass(frozen=True, slots=True)
class ChoiceLoops:
    """The loops for keys of one size; all let Python's lock go."""

    signs: int
    """Signs that the index has of a token."""
    key_dim: int
    value_dim: int
    _choose: Any
    _locate: Any
    _attend: Any
    _rest: Any

    def compile(self) -> None:
        """Compile all loops now, not in a step: some seconds, and 200 MB for the compiler."""
        held = [
            np.zeros((1, 2 * BLOCK_TOKENS, width), kind)
            for width, kind in (
                (self.key_dim, np.float32),
                (self.value_dim, np.float32),
                (self.signs // 32, np.uint32),
                (1, np.float16),
                (padded(self.value_dim) // CODES, np.uint32),
                (1, np.float16),
            )
        ]
        sides = np.array([side_addresses(array) for array in (*held, None)], np.int64)
        spans = SpanTable(np.array([0, 2 * BLOCK_TOKENS], np.int64), sides[None])
        blocks = self.choose(np.zeros((1, 1, self.signs), np.float32), spans, 2, 1)
        query = np.zeros((1, 1, self.key_dim), np.float32)
        self.locate(spans, blocks, 1)
        self.attend(query, spans, blocks, 1, None)
        Rotation.none(self.key_dim).sums(query, query[0], 0, 1, loop=center_loop())
        if self._rest is not None:
            squares = np.zeros((1, 1), np.float32)
            self.rest(np.zeros((1, 1, self.signs), np.float32), squares, spans, 2, blocks)

    def choose(
        self,
        x: Floats,
        spans: SpanTable,
        stop: int,
        count: int,
        first_head: int = 0,
        centers: Floats | None = None,
    ) -> Addresses:
        """Choose the best blocks of each head: their numbers, in order, (heads, count).

        Args:
            x: queries as `KeyIndex.transform_query` returns them, (heads, m, signs).
            spans: tokens whose index lies there.
            stop: number of the block behind those to choose from; the first are always read.
            count: blocks that are chosen.
            first_head: number of the first of the heads.
            centers: what the index leaves out of the scores of each block, (heads, m, blocks).
        """
        chosen, beside = np.empty((len(x), count), np.int64), _centers(x, stop, centers)
        where = spans.sides, spans.starts, first_head, stop
        self._choose(x, units_of(x), beside, *where, LEVELS_BELOW, chosen)
        return chosen

    def locate(
        self, spans: SpanTable, blocks: Addresses, recent: int, first_head: int = 0
    ) -> Located:
        """Find the blocks that `attend` reads, and that are spilled; see there."""
        shape = len(blocks), spans.read_blocks(blocks, recent)
        located = Located(first_head, np.empty(shape, np.int32), np.empty((*shape, 2), np.uint64))
        given = spans.sides, spans.starts, first_head, blocks, recent
        self._locate(*given, located.places, located.checksums)
        return located

    def attend(
        self,
        queries: Floats,
        spans: SpanTable,
        blocks: Addresses,
        recent: int,
        sinks: Sinks | None,
        first_head: int = 0,
        spilled: Addresses | None = None,
    ) -> Floats:
        """Read the first tokens, blocks, and recent tokens: (heads, m, value_dim).

        Args:
            queries: (heads, m, key_dim), scaled so that e^score is a weight.
            spans: float32; the last one is the tail, with the new token.
            blocks: numbers of the blocks that each head reads, in order, (heads, n).
            recent: number of the first block whose tokens are recent.
            sinks: what takes part in the softmax besides.
            first_head: number of the first of the heads.
            spilled: addresses of the keys and values of blocks that are spilled, in the order of
                `locate`, (heads, blocks, 2). Whoever has them there keeps them.
        """
        heads, m, _ = queries.shape
        if spilled is None:
            spilled = np.zeros((heads, 0, 2), np.int64)
        if sinks is None or sinks.values is None:
            mixed = np.zeros((heads, m, self.value_dim), np.float32)
        else:
            mixed = sinks.values.copy()
        scores = np.full((heads, m), -np.inf, np.float32) if sinks is None else sinks.scores
        where = spans.sides, spans.starts, first_head, blocks, recent
        self._attend(queries, *where, scores, spilled, mixed)
        return mixed

    def rest(
        self,
        x: Floats,
        squares: Floats,
        spans: SpanTable,
        stop: int,
        blocks: Addresses,
        first_head: int = 0,
        centers: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Read all blocks that were not chosen from the index, which has values.

        Args:
            x: see `choose`.
            squares: sum of the squares of each query's numbers, (heads, m).
            spans: see `choose`.
            stop: see `choose`.
            blocks: numbers of the blocks that are not read, in order, (heads, n).
            first_head: number of the first of the heads.
            centers: see `choose`.

        Returns:
            The logarithm of the sum of their weights, (heads, m), and their mean by these weights,
            rotated as the values of the index are, (heads, m, n).
        """
        heads, m, _ = x.shape
        tops, totals = np.full((heads, m), -np.inf, np.float32), np.zeros((heads, m), np.float32)
        mixed = np.zeros((heads, m, padded(self.value_dim)), np.float32)
        given = x, units_of(x, MOST_ALONE), squares, _centers(x, stop, centers)
        where = spans.sides, spans.starts, first_head, blocks, stop
        self._rest(*given, *where, (tops, totals), mixed)
        with np.errstate(divide="ignore"):
            sums: Floats = tops + np.log(totals)
        mixed /= np.maximum(totals, np.finfo(np.float32).tiny)[..., None]
        return sums, mixed


def _centers(x: Floats, stop: int, centers: Floats | None) -> Floats:
    """Return what is added to the scores of blocks."""
    if centers is not None:
        return centers
    return np.zeros((*x.shape[:2], stop - FIRST_BLOCKS), np.float32)


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


def segment_addresses(segment: Segment) -> Addresses:
    """Return where compiled loops find each layer's float32 keys and values, and its index.

    Addresses of keys, values, the parts of the index, and the places of what is spilled,
    (layers, 7, 2), see `side_addresses`; zeros for what is not there, or held in another form.
    Spilled keys and values have those of their checksums. They are valid as long as the segment is.
    """
    index = segment.index or (None,) * len(segment.layers)
    layers = [
        [*map(_address, layer), *_index_addresses(coded), _place_address(layer[0])]
        for layer, coded in zip(segment.layers, index, strict=True)
    ]
    return np.array(layers, np.int64).reshape(-1, PLACES + 1, 2)


def _address(side: Side) -> Addresses:
    if is_spilled(side):
        return side_addresses(np.asarray(side.parts[0])[0])
    is_float32 = isinstance(side, mx.array) and side.dtype == mx.float32
    return side_addresses(np.asarray(side)[0] if is_float32 else None)


def _place_address(side: Side) -> Addresses:
    return side_addresses(np.asarray(side.parts[1])[0] if is_spilled(side) else None)


def _index_addresses(coded: Coded | None) -> list[Addresses]:
    parts = [] if coded is None else [np.asarray(part)[0] for part in coded.parts]
    return [side_addresses(part) for part in (*parts, *[None] * (INDEX_PARTS - len(parts)))]


def choice_loops(
    signs: int, key_dim: int, value_dim: int, *, with_values: bool = False
) -> ChoiceLoops | None:
    """Return the loops for keys and values of a size; None where Numba cannot be imported."""
    if not has_numba():
        return None
    words = signs // 32
    rest = rest_loop(words, padded(value_dim) // CODES) if with_values else None
    loops = choose_loop(words), locate_loop(), attend_loop(key_dim, value_dim), rest
    return ChoiceLoops(signs, key_dim, value_dim, *loops)
