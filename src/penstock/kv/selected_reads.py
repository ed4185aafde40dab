"""Attention of a row to the blocks that it chose, on the CPU: by compiled loops, or by NumPy.

A choice waits for the queries anyway. From then on MLX's operations take longer than their work:
1,024 tokens chosen of 8,192 take 0.6 ms of CPU in a layer here, and 1.3 ms there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from penstock.kv import attention, backend, rest_reads
from penstock.kv.attention import LOG2_E
from penstock.kv.attention_plan import DecodeRow, KVSpan
from penstock.kv.choice_loops import (
    Addresses,
    ChoiceLoops,
    Located,
    Sinks,
    SpanTable,
    side_addresses,
)
from penstock.kv.choosing_loops import BLOCK_TOKENS
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import Spilled
from penstock.kv.columns import Side
from penstock.kv.joined_reads import read_sides
from penstock.kv.rest_reads import Rest
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
from penstock.kv.spilled_reads import held_for, loaded
from penstock.kv.tails import Tails

Scratch: TypeAlias = dict[int, Scores]
"""Memory for the copies of keys and of values, by side; fresh pages take longer than copying."""
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
    memory: StepMemory | None = None,
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
        memory: of the step.

    Returns:
        By the number of the row, its attention, (1, heads, 1, value_dim), or the KV that it is to
        read.
    """
    heads, kv_heads = queries.shape[1], tails.shapes[layer].kv_heads
    choosing = [rows[number] for number in numbers]
    own = [tails.read_block(layer, row.slot, 1, row.tail + 1) for row in choosing]
    mx.eval(queries, own)
    by_row = np.asarray(queries).reshape(len(rows), kv_heads, heads // kv_heads, -1)
    below: Scores | None = None
    if sinks is not None:
        below = np.array(sinks / LOG2_E).reshape(kv_heads, -1)
    memory = StepMemory() if memory is None else memory
    shape = tails.shapes[layer]
    asked = [
        Asked(row, number, by_row[number], layer, _on_host(tail), below)
        for number, row, tail in zip(numbers, choosing, own, strict=True)
    ]
    chosen: dict[int, mx.array | SelectedKV] = {}
    loops = selection.loops(shape.key_dim, shape.value_dim)
    looped = [one for one in asked if loops is not None and one.is_readable]
    for one, mixed in zip(looped, _read_all(selection, loops, looped, memory), strict=True):
        chosen[one.number] = mx.array(mixed.reshape(1, heads, 1, -1))
    apart = [one for one in asked if one.number not in chosen]
    blocks = _blocks(selection, loops, apart, memory)
    there = loaded(selection, [one.row for one in apart], blocks, layer)
    for one, row, wanted in zip(apart, there, blocks, strict=True):
        rest = _rest(selection, loops, one, wanted, memory)
        one = replace(one, row=row)
        if one.is_readable:
            mixed = attend(selection, one, wanted, rest, memory.scratch)
            chosen[one.number] = mx.array(mixed.reshape(1, heads, 1, -1))
        else:
            choice = gather(selection, row, wanted, layer)
            chosen[one.number] = choice if rest is None else replace(choice, rest=rest.partial())
    return chosen


@dataclass(slots=True)
class StepMemory:
    """What the layers of one step hand on to each other."""

    scratch: Scratch = field(default_factory=dict)
    """Memory for the copies of one row and layer after the other."""
    spans: dict[int, tuple[Addresses, Addresses]] = field(default_factory=dict)
    """Starts of each row's spans, and the sides of all layers, see `SpanTable`."""

    def table(self, asked: Asked) -> SpanTable:
        """Return where one layer of a row lies, its tail last."""
        row = asked.row
        if asked.number not in self.spans:
            ends = [*(part.start for part in row.parts), row.position - row.tail, row.position + 1]
            sides = [part.segment.addresses for part in row.parts]
            self.spans[asked.number] = (
                np.array(ends, np.int64),
                np.stack([*sides, np.zeros_like(sides[0])], axis=1),
            )
        starts, layers = self.spans[asked.number]
        sides = layers[asked.layer]
        for side, tail in enumerate(asked.tail):
            sides[-1, side] = side_addresses(tail)
        return SpanTable(starts, sides)


@dataclass(frozen=True, slots=True)
class Asked:
    """A row that reads its choice in one layer."""

    row: DecodeRow
    number: int
    """Place of the row in the step."""
    queries: Scores
    """(kv_heads, m, dim), scaled so that e^score is a weight."""
    layer: int
    tail: Sequence[Scores]
    """Keys and values of the tail, the new token among them, (kv_heads, tokens, dim) each; none if
    NumPy is not to read them."""
    sinks: Scores | None
    """See `attention.merged`, in base e, (kv_heads, m)."""

    @property
    def is_readable(self) -> bool:
        """Whether loops or NumPy are to read it: all of its numbers are float32, as computed."""
        sides = (side for part in self.row.parts for side in part.segment.layers[self.layer])
        return bool(self.tail) and all(map(_is_float32, sides))

    def choose(
        self, selection: Selection, loops: ChoiceLoops, met: Met, heads: slice
    ) -> ChosenBlocks:
        """Choose with some key heads, and read the rest if it is to be read; see `blocks`."""
        blocks = self.blocks(selection, loops, met, heads)
        recent = selection.recent_start(self.row.position) // BLOCK_TOKENS
        sinks = self.all_sinks(self.rest(selection, loops, met, blocks, heads), heads)
        return ChosenBlocks(self, met.spans, heads, blocks, recent, sinks)

    def rest(
        self, selection: Selection, loops: ChoiceLoops, met: Met, blocks: Numbers, heads: slice
    ) -> Rest | None:
        """Read what some key heads did not choose, if it is to be read; see `blocks`."""
        if not selection.index.with_values:
            return None
        stop = selection.recent_start(self.row.position) // BLOCK_TOKENS
        given = loops, self.queries[heads], met.x, met.spans, stop, blocks
        return rest_reads.read_by_loops(selection.index, *given, heads.start, met.centers)

    def all_sinks(self, rest: Rest | None, heads: slice = slice(None)) -> Sinks | None:
        """Return what takes part in the softmax beside what some key heads read exactly."""
        own = None if self.sinks is None else self.sinks[heads]
        if rest is not None:
            return rest.sinks(own)
        return None if own is None else Sinks(own)

    def blocks(self, selection: Selection, loops: ChoiceLoops, met: Met, heads: slice) -> Numbers:
        """Choose blocks with some key heads, (kv_heads, blocks).

        Args:
            selection: how much is read.
            loops: for keys of this size.
            met: these heads as they meet the index.
            heads: numbers of the key heads.
        """
        stop = selection.recent_start(self.row.position) // BLOCK_TOKENS
        given = met.x, met.spans, stop, selection.blocks(self.row.position)
        return loops.choose(*given, heads.start, met.centers)


@dataclass(frozen=True, slots=True)
class Met:
    """Some key heads of a row as they meet its index."""

    x: Scores
    """Queries as `ChoiceLoops.choose` takes them."""
    spans: SpanTable
    """Places of the row's tokens."""
    centers: Scores | None
    """Parts of the scores of each block that the index leaves out, (heads, m, blocks)."""

    @classmethod
    def of(cls, selection: Selection, asked: Asked, spans: SpanTable, heads: slice) -> Met:
        """Prepare some key heads of a row for compiled loops."""
        x = selection.index.transform_query(asked.queries[heads])
        given = asked.row, asked.queries, asked.layer, heads
        centers = selection.center_scores(*given, compiled=True)
        return cls(x, spans, centers)


@dataclass(frozen=True, slots=True)
class ChosenBlocks:
    """Blocks that some key heads of a row have chosen, for compiled loops to read."""

    asked: Asked
    spans: SpanTable
    heads: slice
    blocks: Numbers
    """(kv_heads, blocks)."""
    recent: int
    """Number of the first block whose tokens are recent."""
    sinks: Sinks | None

    def located(self, loops: ChoiceLoops) -> Located:
        """Find the blocks that it reads, and that are spilled."""
        return loops.locate(self.spans, self.blocks, self.recent, self.heads.start)

    def read(self, loops: ChoiceLoops, spilled: Addresses | None = None) -> Scores:
        """Attend, (kv_heads, m, value_dim); see `ChoiceLoops.attend`."""
        queries, first_head = self.asked.queries[self.heads], self.heads.start
        given = self.spans, self.blocks, self.recent, self.sinks
        return loops.attend(queries, *given, first_head, spilled)


def _read_all(
    selection: Selection, loops: ChoiceLoops | None, asked: Sequence[Asked], memory: StepMemory
) -> list[Scores]:
    """Let compiled loops choose and read: one row in each lane, or half of a single one's heads."""
    if loops is None or not asked:
        return []
    device, spans = backend.current(), [memory.table(one) for one in asked]
    every = slice(0, len(asked[0].queries))
    parts = [every] if len(asked) > 1 else halves(every.stop)
    tasks = [(number, heads) for number in range(len(asked)) for heads in parts]

    def choose(task: tuple[int, slice]) -> ChosenBlocks:
        number, heads = task
        met = Met.of(selection, asked[number], spans[number], heads)
        return asked[number].choose(selection, loops, met, heads)

    if any(table.is_spilled for table in spans):
        choices = device.divide(choose, tasks)
        located = [choice.located(loops) for choice in choices]
        with held_for([one.row for one in asked], located, asked[0].layer) as there:
            pairs = list(zip(choices, there, strict=True))
            read = device.divide(lambda pair: pair[0].read(loops, pair[1]), pairs)
    else:
        read = device.divide(lambda task: choose(task).read(loops), tasks)
    return read if len(parts) == 1 else [np.concatenate(read)]


def _blocks(
    selection: Selection, loops: ChoiceLoops | None, asked: Sequence[Asked], memory: StepMemory
) -> list[Numbers]:
    """Choose blocks for rows that compiled loops do not read, (kv_heads, blocks) each."""
    if not asked:
        return []
    if loops is None:
        rows, queries = [one.row for one in asked], [one.queries for one in asked]
        return best_blocks(selection, rows, queries, asked[0].layer)
    every = slice(0, len(asked[0].queries))
    met = [Met.of(selection, one, memory.table(one), every) for one in asked]
    return [one.blocks(selection, loops, m, every) for one, m in zip(asked, met, strict=True)]


def _rest(
    selection: Selection,
    loops: ChoiceLoops | None,
    asked: Asked,
    blocks: Numbers,
    memory: StepMemory,
) -> Rest | None:
    """Read what a row did not choose, if it is to be read."""
    if not selection.index.with_values:
        return None
    if loops is None:
        return rest_reads.read(selection, asked.row, asked.queries, blocks, asked.layer)
    spans = memory.table(asked)

    def read(heads: slice) -> Rest | None:
        met = Met.of(selection, asked, spans, heads)
        return asked.rest(selection, loops, met, blocks[heads], heads)

    parts = backend.current().divide(read, halves(len(blocks)))
    return rest_reads.joined([part for part in parts if part is not None])


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
    below = None if sinks is None else np.array(sinks.astype(mx.float32)).reshape(kv_heads, -1)
    one = Asked(row, 0, np.asarray(asked), 0, _on_host(tail), below)
    loops = selection.loops(queries.shape[-1], tail[1].shape[-1])
    if loops is not None and one.is_readable:
        (read,) = _read_all(selection, loops, [one], StepMemory())
        return mx.array(read.reshape(1, heads, 1, -1))
    (blocks,) = _blocks(selection, loops, [one], StepMemory())
    rest = _rest(selection, loops, one, blocks, StepMemory())
    if one.is_readable:
        return mx.array(attend(selection, one, blocks, rest).reshape(1, heads, 1, -1))
    choice = gather(selection, row, blocks, 0)
    first, recent = (read_sides(pieces, 0) for pieces in (choice.first, choice.recent))
    keys, values = (
        [*first[side], chosen, *recent[side], tail[side].squeeze(0)]
        for side, chosen in enumerate((choice.keys, choice.values))
    )
    stacked = attention.grouped(attention.in_base_2(queries, scale), kv_heads)
    exact = backend.current().attend_decode(stacked, keys, values)
    parts = [exact] if rest is None else [exact, rest.partial()]
    sunk = None if sinks is None else sinks.astype(mx.float32).reshape(kv_heads, -1, 1) * LOG2_E
    merged = attention.ungrouped(attention.merged(parts, sunk), 1, heads)
    return merged.astype(queries.dtype)


def _on_host(tail: Sequence[mx.array]) -> list[Scores]:
    """Return a tail as NumPy reads it, where it is to."""
    by_numpy = backend.current().uses_numpy and tail[0].dtype == mx.float32
    return [_held(side) for side in tail] if by_numpy else []


def _is_float32(side: Side) -> bool:
    """Tell whether a side's numbers are float32, and there as they were computed."""
    if isinstance(side, Coded):
        return isinstance(side.codec, Spilled) and side.codec.dtype == mx.float32
    return isinstance(side, mx.array) and side.dtype == mx.float32


def attend(
    selection: Selection,
    asked: Asked,
    blocks: Numbers,
    rest: Rest | None = None,
    scratch: Scratch | None = None,
) -> Scores:
    """Let a row read the first tokens, the blocks chosen, and the recent ones, copied together.

    Args:
        selection: how much is read.
        asked: the row.
        blocks: numbers of the blocks that each key head reads, (kv_heads, blocks).
        rest: what else takes part, if it does.
        scratch: copies of the row before, which those of this one replace.

    Returns:
        (kv_heads, m, value_dim).
    """
    copies = {} if scratch is None else scratch
    keys, values = (_joined(selection, asked, blocks, side, copies) for side in (0, 1))
    sinks = asked.all_sinks(rest)
    scores = _by_columns(asked.queries, keys)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.scores[..., None])
    weights = np.exp(np.subtract(scores, top, out=scores), out=scores)
    total, mixed = weights.sum(axis=-1, keepdims=True), _mixed(weights, values)
    if sinks is not None:
        sunk = np.exp(sinks.scores[..., None] - top)
        total += sunk
        mixed += 0 if sinks.values is None else sunk * sinks.values
    mixed /= total
    return mixed


def _joined(
    selection: Selection, asked: Asked, blocks: Numbers, side: int, scratch: Scratch
) -> Scores:
    """Copy all that a row reads of one side together, (kv_heads, tokens, dim)."""
    row, layer, tail = asked.row, asked.layer, asked.tail[side]
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
    (raw,) = codec.reader.fetch([of])
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
