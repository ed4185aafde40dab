"""Keys and values that rows of a step read, and that lie in a cold tier: one request a layer.

All that the rows choose of a layer's spilled sides is fetched together. These rows are then read as
others are, but their spilled sides are read from the bytes that were fetched. A row that reads all
of its tokens has a request of its own, and they are arrays then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.kv.attention_plan import DecodeRow, KVSpan
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import BLOCK_TOKENS, BlockList, RawBlocks, Spilled
from penstock.kv.columns import Side
from penstock.kv.selection import FIRST_TOKENS, Numbers, Selection

SIDES = (0, 1)
"""Keys and values."""


class LoadedBlocks:
    """Blocks of a row that were read; a `BlockReader` of just these.

    Args:
        lists: blocks of each side.
        raw: their bytes.
    """

    def __init__(self, lists: Sequence[BlockList], raw: Sequence[RawBlocks]) -> None:
        self._raw = list(raw)
        self._order = [np.argsort(_keys(of)) for of in lists]
        self._keys = [_keys(of)[order] for of, order in zip(lists, self._order, strict=True)]

    def fetch(self, wanted: Sequence[BlockList], *, chosen: bool) -> list[RawBlocks]:
        """Return the bytes of blocks; see `BlockReader`."""
        return [self._fetch(of) for of in wanted]

    def _fetch(self, of: BlockList) -> RawBlocks:
        keys, held = _keys(of), self._keys[of.side]
        at = np.searchsorted(held, keys)
        if len(keys) and not np.array_equal(held[np.minimum(at, len(held) - 1)], keys):
            raise AssertionError("a block is read that was not chosen")
        return self._raw[of.side][self._order[of.side][at]]


def _keys(of: BlockList) -> Numbers:
    """Return a number for each block of a side."""
    return (of.heads.astype(np.int64) << 32) + of.places


@dataclass(frozen=True, slots=True)
class _Choice:
    """Spilled spans of a row, and the blocks that it reads of them."""

    number: int
    row: DecodeRow
    spans: list[KVSpan]
    read: list[npt.NDArray[np.bool_]]
    """Whether each block of a span is read, (kv_heads, blocks)."""

    def listed(self, layer: int, side: int) -> BlockList:
        """List the blocks of one side."""
        lists = []
        for span, read in zip(self.spans, self.read, strict=True):
            held = span.segment.layers[layer][side]
            assert isinstance(held, Coded) and isinstance(held.codec, Spilled)
            heads, columns = (at.astype(np.int32) for at in np.nonzero(read))
            lists.append(held.codec.blocks(held, heads, columns))
        joined = (
            np.concatenate([getattr(of, name) for of in lists])
            for name in ("heads", "places", "checksums")
        )
        return BlockList(lists[0].layer, lists[0].side, *joined)


def loaded(
    selection: Selection, rows: Sequence[DecodeRow], blocks: Sequence[Numbers], layer: int
) -> list[DecodeRow]:
    """Read all that rows need of a layer and that is in a tier; return the rows that have it.

    Args:
        selection: how much is read.
        rows: those that choose.
        blocks: numbers of the blocks that each key head of a row reads, (kv_heads, blocks).
        layer: number of the layer.

    Raises:
        SpilledLost: see `BlockReader`.
    """
    choices = [
        _Choice(number, row, spans, [_read(selection, row, span, chosen) for span in spans])
        for number, (row, chosen) in enumerate(zip(rows, blocks, strict=True))
        if (spans := [span for span in row.parts if _codec(span, layer) is not None])
    ]
    if not choices:
        return list(rows)
    codec = _codec(choices[0].spans[0], layer)
    assert codec is not None
    lists = [choice.listed(layer, side) for choice in choices for side in SIDES]
    raw = codec.reader.fetch(lists, chosen=True)
    with_them = list(rows)
    for at, choice in enumerate(choices):
        own = slice(2 * at, 2 * at + 2)
        reader = LoadedBlocks(lists[own], raw[own])
        with_them[choice.number] = _with(choice.row, layer, _by(reader))
    return with_them


def _codec(span: KVSpan, layer: int) -> Spilled | None:
    """Return how a layer of a span is spilled; None if it is in memory."""
    keys = span.segment.layers[layer][0]
    return keys.codec if isinstance(keys, Coded) and isinstance(keys.codec, Spilled) else None


def _read(
    selection: Selection, row: DecodeRow, span: KVSpan, chosen: Numbers
) -> npt.NDArray[np.bool_]:
    """Tell which blocks of a span are read by each key head: first ones, chosen and recent ones."""
    begin, count = span.start // BLOCK_TOKENS, -(-span.columns // BLOCK_TOKENS)
    read = np.zeros((len(chosen), count), np.bool_)
    heads, at = np.nonzero((chosen >= begin) & (chosen < begin + count))
    read[heads, chosen[heads, at] - begin] = True
    read[:, : max(0, FIRST_TOKENS // BLOCK_TOKENS - begin)] = True
    read[:, max(0, selection.recent_start(row.position) // BLOCK_TOKENS - begin) :] = True
    return read


def whole(row: DecodeRow, layer: int) -> DecodeRow:
    """Read all of a row that is in a tier of a layer, in one request; return the row with it.

    Its next step reads these blocks again, unless this is the step of a first token.

    Raises:
        SpilledLost: see `BlockReader`.
    """
    sides = [
        (side.codec, side.take(0, -(-span.columns // BLOCK_TOKENS) * BLOCK_TOKENS))
        for span in row.parts
        for side in span.segment.layers[layer]
        if isinstance(side, Coded) and isinstance(side.codec, Spilled)
    ]
    if not sides:
        return row
    lists = [codec.all_blocks(side) for codec, side in sides]
    raw = sides[0][0].reader.fetch(lists, chosen=not row.whole)
    wide = (codec.wide(side, read) for (codec, side), read in zip(sides, raw, strict=True))
    return _with(row, layer, lambda side, codec: next(wide))


def _with(row: DecodeRow, layer: int, change: Callable[[Coded, Spilled], Side]) -> DecodeRow:
    """Return a row whose spilled sides of a layer are others, keys and values span by span."""

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
    """Return a function that lets another reader read a spilled side."""
    return lambda side, codec: replace(side, codec=replace(codec, reader=reader))


def wide_sides(keys: Coded, values: Coded) -> tuple[mx.array, mx.array]:
    """Dequantize keys and values of the same tokens; spilled ones are read in one request."""
    codecs = keys.codec, values.codec
    if not (isinstance(codecs[0], Spilled) and isinstance(codecs[1], Spilled)):
        return keys.dequantize(), values.dequantize()
    lists = [codecs[0].all_blocks(keys), codecs[1].all_blocks(values)]
    raw = codecs[0].reader.fetch(lists, chosen=False)
    return codecs[0].wide(keys, raw[0]), codecs[1].wide(values, raw[1])
