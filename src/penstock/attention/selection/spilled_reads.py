"""Reads of spilled KV, with one request to the tier per layer.

All spilled blocks that the rows selected in a layer are fetched together. Compiled loops read them
in the block cache; MLX's operations read copies. A row that reads all of its tokens has a request
of its own, which returns arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.joined_reads import read_sides
from penstock.attention.piece_reads import HostSide
from penstock.attention.selection.selection import FIRST_TOKENS, Numbers, Selection
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import (
    BLOCK_TOKENS,
    BlockList,
    BlockPairs,
    BlockReader,
    RawBlocks,
    Spilled,
    is_spilled,
)
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Integers
from penstock.kv.segment import ColumnRange, KVSpan

SIDES = (0, 1)
"""Keys and values."""


class LoadedBlocks(BlockReader):
    """Reader of blocks that were already loaded for a row."""

    def __init__(self, lists: Sequence[BlockList], raw: Sequence[RawBlocks]) -> None:
        self._raw = list(raw)
        self._order = [np.argsort(_keys(of)) for of in lists]
        self._keys = [_keys(of)[order] for of, order in zip(lists, self._order, strict=True)]

    def fetch(self, lists: Sequence[BlockList]) -> list[RawBlocks]:
        return [self._fetch(of) for of in lists]

    def _fetch(self, of: BlockList) -> RawBlocks:
        keys, loaded = _keys(of), self._keys[of.side]
        positions = np.searchsorted(loaded, keys)
        if len(keys) and not np.array_equal(loaded[np.minimum(positions, len(loaded) - 1)], keys):
            raise AssertionError("a block was read that was not selected")
        return self._raw[of.side][self._order[of.side][positions]]


def _keys(of: BlockList) -> Numbers:
    """Return a unique number for each block of a side."""
    return (of.heads.astype(np.int64) << 32) + of.places


@dataclass(frozen=True, slots=True)
class Located:
    """Locations of the blocks that consecutive KV heads read, including first and recent ones."""

    first_head: int
    places: npt.NDArray[np.int32]
    """Place of each block in the tier, or -1 for a block in memory, (heads, blocks)."""
    checksums: npt.NDArray[np.uint64]
    """Checksums of the keys and values of each spilled block, (heads, blocks, 2)."""


@dataclass(frozen=True, slots=True)
class _SpilledSides:
    """Spilled keys and values of a span in one layer."""

    span: KVSpan
    keys: Coded
    values: Coded

    @property
    def codecs(self) -> tuple[Spilled, Spilled]:
        """Codecs of the keys and of the values."""
        keys, values = self.keys.codec, self.values.codec
        assert isinstance(keys, Spilled) and isinstance(values, Spilled)
        return keys, values

    def pairs(self, read: npt.NDArray[np.bool_]) -> BlockPairs:
        """Return the key and value blocks that a mask (kv_heads, blocks) selects."""
        heads, columns = (axis.astype(np.int32) for axis in np.nonzero(read))
        sides = zip(self.codecs, (self.keys, self.values), strict=True)
        return BlockPairs.of(*(codec.blocks(side, heads, columns) for codec, side in sides))


def _spilled(row: DecodeRow, layer: int) -> Iterator[_SpilledSides]:
    for span in row.parts:
        keys, values = span.segment.layers[layer]
        if not (isinstance(keys, Coded) and isinstance(values, Coded)):
            continue
        if isinstance(keys.codec, Spilled):
            yield _SpilledSides(span, keys, values)


def has_spilled(row: DecodeRow, layer: int) -> bool:
    """Return whether any KV of a row in a layer is in a tier."""
    return any(is_spilled(span.segment.layers[layer][0]) for span in row.parts)


def loaded(
    selection: Selection, rows: Sequence[DecodeRow], blocks: Sequence[Numbers], layer: int
) -> list[DecodeRow]:
    """Load the spilled KV that rows need in a layer; return rows that read the loaded KV.

    Args:
        rows: rows with selective attention.
        blocks: indices of the blocks selected by each KV head of a row, (kv_heads, blocks).

    Raises:
        SpilledLost: see `BlockReader`.
    """
    with_them = list(rows)
    sides = {
        number: layer_sides
        for number, row in enumerate(rows)
        if (layer_sides := list(_spilled(row, layer)))
    }
    if not sides:
        return with_them
    pairs = []
    for number, layer_sides in sides.items():
        read = (_read(selection, rows[number], side.span, blocks[number]) for side in layer_sides)
        parts = [side.pairs(mask) for side, mask in zip(layer_sides, read, strict=True)]
        pairs.append(BlockPairs.joined(parts))
    hold = layer_sides[0].codecs[0].cache.hold(pairs)
    for index, number in enumerate(sides):
        reader = LoadedBlocks([pairs[index].side(side) for side in SIDES], hold.copied(index))
        with_them[number] = _with(rows[number], layer, _by(reader))
    return with_them


def _read(
    selection: Selection, row: DecodeRow, span: KVSpan, chosen: Numbers
) -> npt.NDArray[np.bool_]:
    """Return a mask of the blocks of a span that each KV head reads."""
    begin, count = span.start // BLOCK_TOKENS, -(-span.columns // BLOCK_TOKENS)
    read = np.zeros((len(chosen), count), np.bool_)
    heads, positions = np.nonzero((chosen >= begin) & (chosen < begin + count))
    read[heads, chosen[heads, positions] - begin] = True
    read[:, : max(0, FIRST_TOKENS // BLOCK_TOKENS - begin)] = True
    read[:, max(0, selection.recent_start(row.position) // BLOCK_TOKENS - begin) :] = True
    return read


@contextmanager
def held_for(
    rows: Sequence[DecodeRow], located: Sequence[Located], layer: int
) -> Iterator[list[Integers]]:
    """Load spilled blocks for compiled loops, and yield their addresses; a context manager.

    The addresses are valid within the `with` block. Blocks that exceed the cache's capacity are
    freed at its end.

    Args:
        rows: rows with spilled parts.
        located: blocks read by some of their KV heads, in any order.

    Yields:
        Addresses for `ChoiceLoops.attend`.

    Raises:
        SpilledLost: see `BlockReader`.
    """
    cache = next(entry.codecs[0].cache for row in rows for entry in _spilled(row, layer))
    inside = [entry.places >= 0 for entry in located]
    hold = cache.hold(
        [
            BlockPairs(
                layer,
                (np.nonzero(mask)[0] + entry.first_head).astype(np.int32),
                entry.places[mask],
                entry.checksums[mask],
            )
            for entry, mask in zip(located, inside, strict=True)
        ]
    )
    where = []
    for number, mask in enumerate(inside):
        where.append(np.zeros((*mask.shape, 2), np.int64))
        where[-1][mask] = hold.addresses(number)
    yield where
    del hold


def whole(row: DecodeRow, layer: int) -> DecodeRow:
    """Load all spilled KV of a row in a layer in one request; return a row that contains it.

    The blocks go through the block cache, except in the step after a prefill.

    Raises:
        SpilledLost: see `BlockReader`.
    """
    taken = []
    for entry in _spilled(row, layer):
        stop = -(-entry.span.columns // BLOCK_TOKENS) * BLOCK_TOKENS
        taken.append(
            replace(entry, keys=entry.keys.take(0, stop), values=entry.values.take(0, stop))
        )
    if not taken:
        return row
    sides = [
        pair
        for entry in taken
        for pair in zip(entry.codecs, (entry.keys, entry.values), strict=True)
    ]
    if row.whole:
        raw = sides[0][0].reader.fetch([codec.all_blocks(side) for codec, side in sides])
    else:
        pairs = [entry.pairs(np.ones(entry.keys.parts[0].shape[1:], np.bool_)) for entry in taken]
        hold = sides[0][0].cache.hold(pairs)
        raw = [side for number in range(len(pairs)) for side in hold.copied(number)]
    dequantized = (
        codec.as_array(side, read) for (codec, side), read in zip(sides, raw, strict=True)
    )
    return _with(row, layer, lambda side, codec: next(dequantized))


def _with(row: DecodeRow, layer: int, change: Callable[[Coded, Spilled], Side]) -> DecodeRow:
    """Return a row with `change` applied to its spilled keys and values in a layer, in order."""

    def changed(side: Side) -> Side:
        if not (isinstance(side, Coded) and isinstance(side.codec, Spilled)):
            return side
        return change(side, side.codec)

    parts = []
    for span in row.parts:
        layers = list(span.segment.layers)
        keys, values = layers[layer]
        layers[layer] = changed(keys), changed(values)
        parts.append(replace(span, segment=replace(span.segment, layers=tuple(layers))))
    return replace(row, parts=tuple(parts))


def _by(reader: LoadedBlocks) -> Callable[[Coded, Spilled], Side]:
    """Return a `change` for `_with` that sets the reader."""
    return lambda side, codec: replace(side, codec=replace(codec, reader=reader))


def wide_sides(
    ranges: Sequence[ColumnRange], layer: int, ops: CodeOps
) -> tuple[list[HostSide], list[HostSide]]:
    """Return keys and values of consecutive columns, dequantized, (kv_heads, columns, dim) each.

    Spilled KV is read in one request, and returned as NumPy arrays if it is float32.
    """
    lists, spilled = [], []
    sides: tuple[list[HostSide], list[HostSide]] = ([], [])
    for segment, start, stop in ranges:
        pair = segment.layers[layer]
        if not isinstance(pair[0], Coded) or not isinstance(pair[0].codec, Spilled):
            for into, (stored,) in zip(
                sides, read_sides([(segment, start, stop)], layer, ops), strict=True
            ):
                into.append(
                    stored.dequantize(ops).squeeze(0) if isinstance(stored, Coded) else stored
                )
            continue
        for into, side in zip(sides, pair, strict=True):
            assert isinstance(side, Coded) and isinstance(side.codec, Spilled)
            lists.append(side.codec.run(side, start, stop))
            columns = slice(start % BLOCK_TOKENS, start % BLOCK_TOKENS + stop - start)
            spilled.append((into, len(into), side, side.codec, columns))
            into.append(np.empty(0, np.float32))
    if lists:
        raw = spilled[0][3].reader.fetch(lists)
        for (into, index, side, codec, columns), blocks in zip(spilled, raw, strict=True):
            into[index] = codec.numbers(side, blocks)[:, columns]
    return sides
