"""Attention of a row to the blocks that it chose, with NumPy, on the CPU.

A choice waits for the queries anyway. From then on MLX's operations take longer than their work:
1,024 tokens chosen of 8,192 take 0.6 ms of CPU in a layer here, and 1.3 ms there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from penstock.kv import attention, backend
from penstock.kv.attention import LOG2_E
from penstock.kv.attention_plan import DecodeRow, KVSpan
from penstock.kv.choice_loops import BLOCK_TOKENS, ArrayAddress, ChoiceLoops, SpanAddresses
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import Spilled
from penstock.kv.columns import Side
from penstock.kv.joined_reads import read_sides
from penstock.kv.selection import (
    Numbers,
    Scores,
    SelectedKV,
    Selection,
    best_blocks,
    gather,
    halves,
    pieces,
)
from penstock.kv.spilled_reads import loaded
from penstock.kv.tails import Tails

Scratch: TypeAlias = dict[int, Scores]
"""Memory for the copies of keys and of values, by side; fresh pages take longer than copying."""
_Given: TypeAlias = tuple[int, DecodeRow, Numbers, Scores, int, Sequence[Scores], "Scores | None"]
"""A row's number, and the arguments of `attend`."""
ALONE = 2**17
"""Multiplications of a product that NumPy's BLAS does without threads, which would wait."""


def choose(
    selection: Selection,
    rows: Sequence[DecodeRow],
    numbers: Sequence[int],
    queries: mx.array,
    layer: int,
    tails: Tails,
    sinks: mx.array | None = None,
    scratch: Scratch | None = None,
) -> dict[int, mx.array | SelectedKV]:
    """Choose the blocks that rows read in a layer, and let them read those where that is quicker.

    Args:
        selection: how much is read.
        rows: of the step.
        numbers: those of them that choose.
        queries: of all rows, (b, heads, 1, dim), float32, scaled so that e^score is a weight.
        layer: number of the layer.
        tails: the pool, with the new tokens.
        sinks: see `attention.merged`, (heads,).
        scratch: of the step, for the copies of one row and layer after the other.

    Returns:
        By the number of the row, its attention, (1, heads, 1, value_dim), or the KV that it is to
        read.
    """
    heads, kv_heads = queries.shape[1], tails.shapes[layer].kv_heads
    choosing = [rows[number] for number in numbers]
    own = [tails.read_block(layer, row.slot, 1, row.tail + 1) for row in choosing]
    mx.eval(queries, own)
    by_row = np.asarray(queries).reshape(len(rows), kv_heads, heads // kv_heads, -1)
    asked = [by_row[number] for number in numbers]
    blocks = best_blocks(selection, choosing, asked, layer)
    choosing = loaded(selection, choosing, blocks, layer)
    below: Scores | None = None
    if sinks is not None:
        below = np.array(sinks / LOG2_E).reshape(kv_heads, -1)
    chosen: dict[int, mx.array | SelectedKV] = {}
    scratch = {} if scratch is None else scratch
    given: dict[int, Given] = {}
    for number, row, query, wanted, tail in zip(numbers, choosing, asked, blocks, own, strict=True):
        if _on_host(row, tails.shapes[layer].dtype, layer):
            sides = [_held(side) for side in tail]
            given[number] = Given(row, wanted, query, layer, sides, below)
        else:
            chosen[number] = gather(selection, row, wanted, layer)
    read = _read_all(selection, list(given.values()), scratch)
    for number, mixed in zip(given, read, strict=True):
        chosen[number] = mx.array(mixed.reshape(1, heads, 1, -1))
    return chosen


@dataclass(frozen=True, slots=True)
class Given:
    """A row that reads its choice in one layer, in memory, as float32."""

    row: DecodeRow
    blocks: Numbers
    """Numbers of the blocks that each key head reads, (kv_heads, blocks)."""
    queries: Scores
    """(kv_heads, m, dim), scaled so that e^score is a weight."""
    layer: int
    tail: Sequence[Scores]
    """Keys and values of the tail, the new token among them, (kv_heads, tokens, dim) each."""
    sinks: Scores | None
    """See `attention.merged`, in base e, (kv_heads, m)."""

    @property
    def loaded(self) -> bool:
        """Whether it reads blocks that were loaded from a tier."""
        sides = (part.segment.layers[self.layer][0] for part in self.row.parts)
        return any(isinstance(side, Coded) for side in sides)


def _read_all(selection: Selection, given: Sequence[Given], scratch: Scratch) -> list[Scores]:
    """Let rows read in both lanes: one row each, or half of the heads of a single one."""
    if not given:
        return []
    loops = selection.loops(given[0].queries.shape[2], given[0].tail[1].shape[2])
    if loops is None or any(one.loaded for one in given):
        return [attend(selection, one, scratch) for one in given]
    arrays: dict[int, tuple[ArrayAddress, ArrayAddress]] = {}
    rows = [ChosenSpans.of(selection, one, arrays) for one in given]
    device = backend.current()
    if len(rows) > 1:
        return device.divide(lambda row: row.attend(loops, slice(None)), rows)
    parts = device.divide(lambda heads: rows[0].attend(loops, heads), halves(len(rows[0].blocks)))
    return [np.concatenate(parts)]


@dataclass(frozen=True, slots=True)
class ChosenSpans:
    """All that one row reads in one layer, where it lies."""

    queries: Scores
    """(kv_heads, m, dim), scaled so that e^score is a weight."""
    blocks: Numbers
    """First, chosen and recent blocks, to the new token, (kv_heads, n)."""
    keys: SpanAddresses
    values: SpanAddresses
    sinks: Scores | None
    """Sinks of the heads in base e, (kv_heads, m)."""

    @classmethod
    def of(
        cls,
        selection: Selection,
        given: Given,
        arrays: dict[int, tuple[ArrayAddress, ArrayAddress]],
    ) -> ChosenSpans:
        """Find the arrays; those of segments that other rows read are in `arrays` already."""
        row, stop = given.row, given.row.position - given.row.tail
        first = selection.recent_start(row.position) // BLOCK_TOKENS
        recent = np.arange(first, row.position // BLOCK_TOKENS + 1)
        heads = len(given.blocks)
        blocks = [np.zeros((heads, 1), np.int64), given.blocks, np.tile(recent, (heads, 1))]
        held = []
        for part in row.parts:
            key = id(part.segment)
            if key not in arrays:
                both = part.segment.layers[given.layer]
                arrays[key] = ArrayAddress.of(_held(both[0])), ArrayAddress.of(_held(both[1]))
            held.append(arrays[key])
        held.append((ArrayAddress.of(given.tail[0]), ArrayAddress.of(given.tail[1])))
        starts = [*(part.start for part in row.parts), stop, row.position + 1]
        keys, values = (SpanAddresses.of([one[side] for one in held], starts) for side in (0, 1))
        return cls(given.queries, np.concatenate(blocks, axis=1), keys, values, given.sinks)

    def attend(self, loops: ChoiceLoops, heads: slice) -> Scores:
        """Attend with some key heads, (kv_heads, m, value_dim)."""
        blocks = self.blocks[heads]
        scores = loops.score(self.queries[heads], self.keys.of_heads(heads), blocks)
        weights, total = _weights(scores, None if self.sinks is None else self.sinks[heads])
        mixed: Scores = loops.mix(weights, self.values.of_heads(heads), blocks) / total
        return mixed


def attend_alone(
    selection: Selection,
    row: DecodeRow,
    queries: mx.array,
    scale: float,
    tail: Sequence[mx.array],
    sinks: mx.array | None = None,
) -> mx.array:
    """Let one row of one layer read its choice, (1, heads, 1, dim) -> (1, heads, 1, value_dim).

    Args:
        selection: how much is read.
        row: its parts have that layer alone.
        queries: as the model has them.
        scale: factor of the model's scores.
        tail: keys and values of the tail, (1, kv_heads, tokens, dim) each.
        sinks: as the model has them, (heads,).
    """
    heads, kv_heads = queries.shape[1], tail[0].shape[1]
    asked = attention.grouped(queries.astype(mx.float32) * scale, kv_heads)
    mx.eval(asked, *tail)
    wide = np.asarray(asked)
    (blocks,) = best_blocks(selection, [row], [wide], 0)
    if _on_host(row, tail[0].dtype, 0):
        sides = [_held(side) for side in tail]
        below = None if sinks is None else np.array(sinks.astype(mx.float32)).reshape(kv_heads, -1)
        (read,) = _read_all(selection, [Given(row, blocks, wide, 0, sides, below)], {})
        return mx.array(read.reshape(1, heads, 1, -1))
    choice = gather(selection, row, blocks, 0)
    first, recent = (read_sides(pieces, 0) for pieces in (choice.first, choice.recent))
    keys, values = (
        [*first[side], chosen, *recent[side], tail[side].squeeze(0)]
        for side, chosen in enumerate((choice.keys, choice.values))
    )
    stacked = attention.grouped(attention.in_base_2(queries, scale), kv_heads)
    part = backend.current().attend_decode(stacked, keys, values)
    sunk = None if sinks is None else sinks.astype(mx.float32).reshape(kv_heads, -1, 1) * LOG2_E
    merged = attention.ungrouped(attention.merged([part], sunk), 1, heads)
    return merged.astype(queries.dtype)


def _on_host(row: DecodeRow, dtype: mx.Dtype, layer: int) -> bool:
    """Tell whether NumPy is to read a row: all that it reads is in memory as float32."""
    if not backend.current().uses_numpy or dtype != mx.float32:
        return False
    sides = (side for part in row.parts for side in part.segment.layers[layer])
    return all(_is_float32(side) for side in sides)


def _is_float32(side: Side) -> bool:
    """Tell whether a side's numbers are float32, and there as they were computed."""
    if isinstance(side, Coded):
        return isinstance(side.codec, Spilled) and side.codec.dtype == mx.float32
    return isinstance(side, mx.array) and side.dtype == mx.float32


def attend(selection: Selection, given: Given, scratch: Scratch | None = None) -> Scores:
    """Let a row read the first tokens, the blocks chosen, and the recent ones, copied together.

    Args:
        selection: how much is read.
        given: the row.
        scratch: copies of the row before, which those of this one replace.

    Returns:
        (kv_heads, m, value_dim).
    """
    copies = {} if scratch is None else scratch
    keys, values = (_joined(selection, given, side, copies) for side in (0, 1))
    queries, sinks = given.queries, given.sinks
    weights, total = _weights(_by_columns(queries, keys), sinks)
    mixed: Scores = _mixed(weights, values) / total
    return mixed


def _weights(scores: Scores, sinks: Scores | None) -> tuple[Scores, Scores]:
    """Return weights in the place of scores (kv_heads, m, n), and their sums, (kv_heads, m, 1)."""
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[..., None])
    weights = np.exp(np.subtract(scores, top, out=scores), out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[..., None] - top)
    return weights, total


def _joined(selection: Selection, given: Given, side: int, scratch: Scratch) -> Scores:
    """Copy all that a row reads of one side together, (kv_heads, tokens, dim)."""
    row, blocks, layer, tail = given.row, given.blocks, given.layer, given.tail[side]
    stop = selection.recent_start(row.position)
    chosen = np.concatenate([np.zeros((len(blocks), 1), np.int64), blocks], axis=1)
    count = chosen.shape[1] * BLOCK_TOKENS
    recent = row.position - row.tail - stop
    joined = _empty(scratch, side, (len(blocks), count + recent + tail.shape[1], tail.shape[2]))
    spans = [(span, span.segment.layers[layer][side]) for span in row.parts if span.start < stop]
    _gather(joined[:, :count], spans, chosen)
    start = count
    for segment, first, last in pieces(row.parts, stop, row.position - row.tail):
        end = start + last - first
        joined[:, start:end] = _columns(segment.layers[layer][side], first, last)
        start = end
    joined[:, start:] = tail
    return joined


def _empty(scratch: Scratch, side: int, shape: tuple[int, int, int]) -> Scores:
    """Return an array in the scratch memory of a side, which grows if it must."""
    size = prod(shape)
    if side not in scratch or scratch[side].size < size:
        scratch[side] = np.empty(size, np.float32)
    return scratch[side][:size].reshape(shape)


def _held(side: object) -> Scores:
    held: Scores = np.asarray(side)[0]
    return held


def _columns(side: Side, first: int, last: int) -> Scores:
    """Return columns first..last-1 of a side, (kv_heads, columns, dim)."""
    if not isinstance(side, Coded):
        return _held(side)[:, first:last]
    span = side.codec.span
    begin = first // span * span
    wide = side.take(begin, -(-last // span) * span).dequantize()
    return _held(wide)[:, first - begin : last - begin]


def _gather(into: Scores, spans: Sequence[tuple[KVSpan, Side]], blocks: Numbers) -> None:
    """Copy each key head's blocks; see `selection.gather`."""
    heads, _, dim = into.shape
    grain = gcd(BLOCK_TOKENS, *(span.start for span, _ in spans))
    per_block = BLOCK_TOKENS // grain
    grains = (blocks[..., None] * per_block + np.arange(per_block)).reshape(heads, -1)
    for span, side in spans:
        if isinstance(side, Coded):
            _gather_loaded(into, span, side, blocks)
            continue
        held, whole = _held(side), span.columns // grain
        for head, numbers in enumerate(grains - span.start // grain):
            rows = held[head, : whole * grain].reshape(whole, grain * dim)
            out = into[head].reshape(-1, grain * dim)
            inside = (numbers >= 0) & (numbers < whole)
            if inside.all():
                rows.take(numbers, axis=0, out=out, mode="clip")
            else:
                out[inside] = rows.take(numbers[inside], axis=0)


def _gather_loaded(into: Scores, span: KVSpan, side: Coded, blocks: Numbers) -> None:
    """Copy each key head's blocks of a side that was loaded."""
    codec, own = side.codec, blocks - span.start // BLOCK_TOKENS
    assert isinstance(codec, Spilled)
    heads, at = np.nonzero((own >= 0) & (own < span.columns // BLOCK_TOKENS))
    of = codec.blocks(side, heads.astype(np.int32), own[heads, at].astype(np.int32))
    (raw,) = codec.reader.fetch([of], chosen=True)
    by_block = into.reshape(len(blocks), -1, BLOCK_TOKENS, into.shape[-1])
    by_block[heads, at] = raw.view(np.float32).reshape(-1, *by_block.shape[2:])


def _by_columns(queries: Scores, keys: Scores) -> Scores:
    """Multiply queries with keys, (kv_heads, m, tokens), in products without threads."""
    heads, m, dim = queries.shape
    tokens, step = keys.shape[1], max(1, ALONE // (m * dim))
    scores = np.empty((heads, m, tokens), np.float32)
    for start in range(0, tokens, step):
        columns = slice(start, start + step)
        np.matmul(queries, keys[:, columns].swapaxes(1, 2), out=scores[..., columns])
    return scores


def _mixed(weights: Scores, values: Scores) -> Scores:
    """Mix values by weights, (kv_heads, m, dim), in products without threads."""
    (_, m, tokens), dim = weights.shape, values.shape[2]
    step = max(1, ALONE // (m * dim))
    mixed = weights[..., :step] @ values[:, :step]
    for start in range(step, tokens, step):
        columns = slice(start, start + step)
        mixed += weights[..., columns] @ values[:, columns]
    return mixed
