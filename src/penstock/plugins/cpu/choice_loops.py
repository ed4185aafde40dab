"""Loops for selective attention without copies of KV, compiled for the CPU by Numba.

They take addresses, because a call per segment would cost more than its work. Callers must keep the
arrays alive. Without Numba (extra `cpu`), MLX's operations are used instead. Both compute equal
sums over the index and so select the same blocks, except among blocks whose scores differ only by
the rounding of products with centers and of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.rest_reads import Sinks
from penstock.attention.selection.spilled_reads import Located
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import is_spilled
from penstock.kv.codecs.turbo import padded
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.kv.segment import Segment
from penstock.plugins.cpu.attending_loops import PLACES, attend_loop, locate_loop
from penstock.plugins.cpu.attention_tiles import FLOAT_BYTES, LANES, converts_halves
from penstock.plugins.cpu.cached_loops import CachedLoop
from penstock.plugins.cpu.center_loops import cached_center_loop
from penstock.plugins.cpu.choosing_loops import choose_loop
from penstock.plugins.cpu.compiled import has_numba
from penstock.plugins.cpu.rest_loops import CODES, rest_loop, units_of

Addresses: TypeAlias = Integers
INDEX_PARTS = 4
"""Maximum number of arrays of an index: codes and scales of keys and of values."""


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Addresses of consecutive tokens of one layer, in several spans."""

    starts: Addresses
    """Position of the first token of each span, and the end of the last, (spans + 1,)."""
    sides: Addresses
    """Addresses of each span's keys and values (checksums if spilled), index arrays, and places of
    spilled blocks, (spans, 7, 2); see `side_addresses`."""

    @property
    def is_spilled(self) -> bool:
        """Whether any KV is spilled."""
        return bool(self.sides[:, PLACES, 0].any())

    def read_blocks(self, chosen: Addresses, recent: int) -> int:
        """Return the number of blocks that a head reads: first, selected and recent ones."""
        last = (int(self.starts[-1]) - 1) // BLOCK_TOKENS
        return FIRST_BLOCKS + int(chosen.shape[1]) + last + 1 - recent


@dataclass(frozen=True, slots=True)
class ChoiceLoops:
    """Compiled loops for keys and values of one size; all release the GIL."""

    signs: int
    """Number of signs per token in the index."""
    key_dim: int
    value_dim: int
    _choose: CachedLoop
    _locate: CachedLoop
    _attend: CachedLoop
    _rest: CachedLoop | None

    def compile(self) -> None:
        """Load or compile all loops; compiling takes some seconds and 200 MB for the compiler."""
        for loop in (self._choose, self._locate, self._attend, self._rest, cached_center_loop()):
            if loop is not None:
                loop.compile()

    def choose(
        self,
        whole: Floats,
        units: Floats,
        spans: SpanTable,
        stop: int,
        count: int,
        first_head: int = 0,
        centers: Floats | None = None,
    ) -> Addresses:
        """Select the best blocks of each head and return their sorted indices, (heads, count).

        Args:
            whole: queries as integers, (heads, m, n), at most 127; see `KeyIndex.whole_queries`.
            units: factor of half of a product with these, (heads, m, 1).
            spans: addresses of the indexed tokens.
            stop: index after the last selectable block; the first ones are always read.
            count: number of blocks to select.
            first_head: index of the first head.
            centers: block scores of the key centers, not in the index, (heads, m, stop).
        """
        chosen, beside = np.empty((len(whole), count), np.int64), _centers(whole, stop, centers)
        where = spans.sides, spans.starts, first_head, stop
        self._choose(whole, units, beside, *where, chosen)
        return chosen

    def locate(
        self, spans: SpanTable, blocks: Addresses, recent: int, first_head: int = 0
    ) -> Located:
        """Return places and checksums of the spilled blocks among those that `attend` reads."""
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
        nbytes: int = FLOAT_BYTES,
    ) -> Floats:
        """Attend to the first, selected and recent blocks, giving (heads, m, value_dim).

        Args:
            queries: (heads, m, key_dim), scaled so that e^score is a weight.
            spans: spans of one dtype; the last one is the tail, with the new token.
            blocks: sorted indices of the selected blocks, (heads, n).
            recent: index of the first block with recent tokens.
            sinks: additional terms of the softmax.
            first_head: index of the first head.
            spilled: addresses of the keys and values of spilled blocks, in the order of `locate`,
                (heads, blocks, 2).
            nbytes: bytes of an element of the keys and values; see `bytes_of`.
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
        self._attend(queries, *where, nbytes, scores, spilled, mixed)
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
        """Attend to all unselected blocks with the keys and values of the index.

        Args:
            x: queries from `KeyIndex.transform_query`, (heads, m, signs).
            squares: squared norm of each query, (heads, m).
            spans: see `choose`.
            stop: see `choose`.
            blocks: sorted indices of the selected blocks, which are skipped, (heads, n).
            first_head: index of the first head.
            centers: see `choose`.

        Returns:
            Logarithm of the sum of the weights, (heads, m), and weighted mean of the values, still
                rotated as in the index, (heads, m, n).
        """
        heads, m, _ = x.shape
        tops, totals = np.full((heads, m), -np.inf, np.float32), np.zeros((heads, m), np.float32)
        mixed = np.zeros((heads, m, padded(self.value_dim)), np.float32)
        given = x, units_of(x), squares, _centers(x, stop, centers)
        where = spans.sides, spans.starts, first_head, blocks, stop
        assert self._rest is not None
        self._rest(*given, *where, tops, totals, mixed)
        with np.errstate(divide="ignore"):
            sums: Floats = tops + np.log(totals)
        mixed /= np.maximum(totals, np.finfo(np.float32).tiny)[..., None]
        return sums, mixed


def _centers(x: Floats, stop: int, centers: Floats | None) -> Floats:
    """Return `centers`, or zeros if None."""
    if centers is not None:
        return centers
    return np.zeros((*x.shape[:2], stop), np.float32)


def bytes_of(sides: Sequence[mx.array]) -> int:
    """Return the bytes of an element of keys and values; 0 if the loops cannot read them.

    They read float32, and float16 if the head size is a multiple of `LANES`.
    """
    (dtype, *others) = {side.dtype for side in sides}
    if others or dtype not in (mx.float32, mx.float16):
        return 0
    whole = all(side.shape[-1] % LANES == 0 for side in sides) and converts_halves()
    return 0 if dtype == mx.float16 and not whole else dtype.size


_NOWHERE = np.zeros(2, np.int64)


def side_addresses(array: npt.NDArray[Any] | None) -> Addresses:
    """Return the address of an array's first token and the bytes between heads; zeros for None.

    Args:
        array: (kv_heads, tokens, dim), contiguous per head, which the caller must keep alive.
    """
    if array is None:
        return _NOWHERE
    return np.array([array.__array_interface__["data"][0], array.strides[0]], np.int64)


def segment_addresses(segment: Segment) -> Addresses:
    """Return the addresses of each layer's keys, values and index, (layers, 7, 2).

    They are `side_addresses` of keys, values, four index arrays, and places of spilled blocks;
    zeros if missing or not readable by the loops. Spilled keys and values have the addresses of
    their checksums. The addresses are valid while the segment exists.
    """
    index = segment.index or (None,) * len(segment.layers)
    layers = [
        [*map(_address, layer), *index_addresses(coded), _place_address(layer[0])]
        for layer, coded in zip(segment.layers, index, strict=True)
    ]
    return np.array(layers, np.int64).reshape(-1, PLACES + 1, 2)


def _address(side: Side) -> Addresses:
    if is_spilled(side):
        return side_addresses(np.asarray(side.parts[0])[0])
    readable = isinstance(side, mx.array) and bytes_of((side,))
    return side_addresses(np.asarray(side)[0] if readable else None)


def _place_address(side: Side) -> Addresses:
    return side_addresses(np.asarray(side.parts[1])[0] if is_spilled(side) else None)


def index_addresses(coded: Coded | None) -> list[Addresses]:
    """Return the addresses of the parts of an index, see `side_addresses`."""
    parts = [] if coded is None else [np.asarray(part)[0] for part in coded.parts]
    return [side_addresses(part) for part in (*parts, *[None] * (INDEX_PARTS - len(parts)))]


def choice_loops(
    signs: int, key_dim: int, value_dim: int, *, with_values: bool = False
) -> ChoiceLoops | None:
    """Return the loops for keys and values of the given sizes; None without Numba."""
    if not has_numba():
        return None
    choose, locate, attend, rest = _cached_loops(signs // 32, key_dim, value_dim)
    loops = choose, locate, attend, rest if with_values else None
    return ChoiceLoops(signs, key_dim, value_dim, *loops)


@cache
def _cached_loops(words: int, key_dim: int, value_dim: int) -> tuple[CachedLoop, ...]:
    choose = CachedLoop(
        f"choose blocks {words}", "f3 f3 f3 i3 i1 i i i2", partial(choose_loop, words)
    )
    locate = CachedLoop("locate blocks", "i3 i1 i i2 i s2 u3", locate_loop)
    attend = CachedLoop(
        f"attend to blocks {key_dim} {value_dim}",
        "f3 i3 i1 i i2 i i f2 i3 f3",
        partial(attend_loop, key_dim, value_dim),
    )
    value_words = padded(value_dim) // CODES
    rest = CachedLoop(
        f"attend to the rest {words} {value_words}",
        "f3 f3 f2 f3 i3 i1 i i2 i f2 f2 f3",
        partial(rest_loop, words, value_words),
    )
    return choose, locate, attend, rest
