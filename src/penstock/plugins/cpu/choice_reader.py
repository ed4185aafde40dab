"""Selective attention of rows by compiled loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_memory import DeviceFacts
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection import rest_reads
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.rest_reads import Rest, Sinks, squares_of
from penstock.attention.selection.selected_reads import (
    Asked,
    ChoiceReader,
    ChunkAttention,
    GroupReads,
    StepMemory,
)
from penstock.attention.selection.selection import Selection, halves
from penstock.attention.selection.spilled_reads import Located, held_for
from penstock.attention.span_attention import LOG2_E, Partial
from penstock.blas import one_thread
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import Spilled
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.plugins.cpu import cpu_rows
from penstock.plugins.cpu.center_loops import center_loop
from penstock.plugins.cpu.choice_loops import (
    ChoiceLoops,
    SpanTable,
    bytes_of,
    segment_addresses,
    side_addresses,
)


class LoopReader(ChoiceReader):
    """Selects and reads blocks by compiled loops, if these read the KV as it lies.

    Args:
        selection: number of tokens to read.
        ops: distributes the work over threads.
        facts: properties of the device.
        loops: loops for keys and values of this size.
    """

    def __init__(
        self, selection: Selection, ops: AttentionOps, facts: DeviceFacts, loops: ChoiceLoops
    ) -> None:
        super().__init__(selection, ops, facts)
        self.loops = loops

    def prepare(self) -> None:
        """See `ChoiceReader`; takes some seconds, and 200 MB for the compiler."""
        self.loops.compile()

    def score_bytes(self, heads: int, kv_heads: int) -> int:
        """See `ChoiceReader`; loops keep the scores of blocks only."""
        return 0

    def read(
        self, asked: Sequence[Asked], queries: mx.array, memory: StepMemory
    ) -> dict[int, mx.array]:
        """See `ChoiceReader`; the loops wait for the queries."""
        scaled = queries * asked[0].scale
        whole, units = self.selection.index.whole_queries(queries, asked[0].scale)
        mx.eval(scaled, whole, units, [query.tail for query in asked])
        given = zip(asked, np.asarray(scaled), np.asarray(whole), np.asarray(units), strict=True)
        hosted = [_HostQuery.of(*query) for query in given]
        outputs = {
            query.asked.number: mx.array(mixed.reshape(1, query.asked.queries.shape[1], 1, -1))
            for query, mixed in self._read([q for q in hosted if q.is_readable], memory)
        }
        others = [query for query in hosted if not query.is_readable]
        if others:
            chosen = [self._choose(self._query(one, memory, slice(None))) for one in others]
            rest = [
                self._partial(one, of_row, memory)
                for one, of_row in zip(others, chosen, strict=True)
            ]
            outputs |= self.attend(
                [one.asked for one in others],
                [mx.array((of_row - FIRST_BLOCKS).astype(np.uint32)) for of_row in chosen],
                rest,
                memory,
            )
        return outputs

    def read_group(self, group: GroupReads, device: ChunkAttention, memory: StepMemory) -> mx.array:
        """See `ChoiceReader`; the chunk's own tokens are a term of the softmax beside the loops."""
        row, layer, kv_heads = group.row, group.layer, group.new[0].shape[1]
        asked = Asked(row, 0, group.queries, group.scale, layer, group.new, group.sinks)
        whole, units = self.selection.index.whole_queries(group.asking, group.scale)
        asking = group.asking * group.scale
        stacked = span_attention.grouped(group.queries, kv_heads).astype(mx.float32) * group.scale
        mx.eval(whole, units, asking, stacked, group.new)
        host = _HostQuery.of(asked, *map(np.asarray, (asking, whole, units)))
        if not host.is_readable:
            return super().read_group(group, device, memory)
        spans, queries = _spans_before(row, layer, memory), np.asarray(stacked)
        parts = halves(kv_heads)

        def choose(heads: slice) -> _ChosenBlocks:
            query = _IndexQuery.of(self.selection, host, spans, heads)
            new = [side[heads].astype(np.float32, copy=False) for side in host.tail]
            own = _own_tokens(queries[heads], new, group.queries.shape[2])
            sinks = None if host.sinks is None else host.sinks[heads]
            if sinks is not None:
                sinks = np.repeat(sinks, queries.shape[1] // sinks.shape[1], axis=1)
            return _ChosenBlocks(query, self._choose(query), own.sinks(sinks))

        with one_thread():  # or both threads would wait for those of BLAS
            choices = self.ops.divide(choose, parts)
        located = [choice.located(self.loops) for choice in choices] if spans.is_spilled else []
        with held_for([row], located, layer) if located else nullcontext([None] * 2) as there:
            pairs = list(zip(choices, parts, there, strict=False))
            read = self.ops.divide(
                lambda pair: pair[0].read(self.loops, pair[2], queries[pair[1]]), pairs
            )
        mixed = mx.array(np.concatenate(read))
        return span_attention.ungrouped(mixed, 1, group.queries.shape[1]).astype(
            group.queries.dtype
        )

    def _read(
        self, asked: Sequence[_HostQuery], memory: StepMemory
    ) -> Iterable[tuple[_HostQuery, Floats]]:
        """Read rows, one per lane, or half of the heads of a single row."""
        if not asked:
            return ()
        spans = [_table(one, memory) for one in asked]
        every = slice(0, len(asked[0].queries))
        parts = [every] if len(asked) > 1 else halves(every.stop)
        tasks = [(number, heads) for number in range(len(asked)) for heads in parts]

        def choose(task: tuple[int, slice]) -> _ChosenBlocks:
            number, heads = task
            query = _IndexQuery.of(self.selection, asked[number], spans[number], heads)
            blocks = self._choose(query)
            sinks = asked[number].all_sinks(self._rest_of(query, blocks), heads)
            return _ChosenBlocks(query, blocks, sinks)

        if any(table.is_spilled for table in spans):
            choices = self.ops.divide(choose, tasks)
            located = [choice.located(self.loops) for choice in choices]
            rows, layer = [one.asked.row for one in asked], asked[0].asked.layer
            with held_for(rows, located, layer) as there:
                pairs = list(zip(choices, there, strict=True))
                read = self.ops.divide(lambda pair: pair[0].read(self.loops, pair[1]), pairs)
        else:
            read = self.ops.divide(lambda task: choose(task).read(self.loops), tasks)
        if len(parts) > 1:
            read = [np.concatenate(read)]
        return zip(asked, read, strict=True)

    def _partial(self, asked: _HostQuery, blocks: Integers, memory: StepMemory) -> Partial | None:
        """Read the unselected tokens of a row, if the index has values."""
        if not self.selection.index.with_values:
            return None

        def read(heads: slice) -> Rest | None:
            return self._rest_of(self._query(asked, memory, heads), blocks[heads])

        parts = self.ops.divide(read, halves(len(blocks)))
        return rest_reads.joined([part for part in parts if part is not None]).partial()

    def _query(self, asked: _HostQuery, memory: StepMemory, heads: slice) -> _IndexQuery:
        heads = slice(*heads.indices(len(asked.queries)))
        return _IndexQuery.of(self.selection, asked, _table(asked, memory), heads)

    def _choose(self, query: _IndexQuery) -> Integers:
        """Select blocks for some KV heads, (kv_heads, blocks)."""
        count = self.selection.blocks(query.asked.asked.row.position)
        where = query.spans, query.stop, count
        return self.loops.choose(query.whole, query.units, *where, query.heads.start, query.centers)

    def _rest_of(self, query: _IndexQuery, blocks: Integers) -> Rest | None:
        """Read the unselected tokens of some KV heads, if the index has values."""
        index = self.selection.index
        if not index.with_values:
            return None
        queries = query.asked.queries[query.heads]
        x, squares = index.transform_query(queries), squares_of(queries)
        where = query.spans, query.stop, blocks, query.heads.start
        sums, mean = self.loops.rest(x, squares, *where, query.centers)
        return Rest(sums, index.inverse_transform(mean, self.loops.value_dim))


@dataclass(frozen=True, slots=True)
class _HostQuery:
    """A row with selective attention in one layer, with its arrays on the host."""

    asked: Asked
    queries: Floats
    """Array (kv_heads, m, dim), scaled so that e^score is a weight."""
    whole: Floats
    """Whole numbers of `KeyIndex.whole_queries`, (kv_heads, m, n)."""
    units: Floats
    """Units of products with these, (kv_heads, m, 1)."""
    tail: Sequence[Floats]
    """Keys and values of the tail, (kv_heads, tokens, dim) each; empty if loops cannot read it."""
    sinks: Floats | None
    """Attention sinks in base e, (kv_heads, m)."""

    @classmethod
    def of(cls, asked: Asked, queries: Floats, whole: Floats, units: Floats) -> _HostQuery:
        tail = [np.asarray(side)[0] for side in asked.tail] if bytes_of(asked.tail) else []
        sinks = None
        if asked.sinks is not None:
            sinks = np.array(asked.sinks.astype(mx.float32)).reshape(len(queries), -1)
        return cls(asked, queries, whole, units * np.float32(0.5), tail, sinks)

    @property
    def is_readable(self) -> bool:
        """Whether compiled loops can read it: all of its KV is as in the tail, without a codec."""
        layer = self.asked.layer
        sides = (side for part in self.asked.row.parts for side in part.segment.layers[layer])
        return bool(self.tail) and {self.asked.tail[0].dtype}.issuperset(map(_dtype_of, sides))

    @property
    def nbytes(self) -> int:
        """Bytes of a number of its KV."""
        return self.tail[0].itemsize

    def all_sinks(self, rest: Rest | None, heads: slice = slice(None)) -> Sinks | None:
        """Return the attention sinks of some KV heads, merged with `rest` if given."""
        sinks = None if self.sinks is None else self.sinks[heads]
        if rest is not None:
            return rest.sinks(sinks)
        return None if sinks is None else Sinks(sinks)


def _dtype_of(side: Side) -> mx.Dtype | None:
    """Return the dtype of a side, also a spilled one; None behind a codec."""
    if isinstance(side, Coded):
        return side.codec.dtype if isinstance(side.codec, Spilled) else None
    return side.dtype if isinstance(side, mx.array) else None


def _table(query: _HostQuery, memory: StepMemory) -> SpanTable:
    """Return the locations of one layer of a row, its tail last."""
    asked, row = query.asked, query.asked.row
    if asked.number not in memory.spans:
        ends = [*(part.start for part in row.parts), row.position - row.tail, row.position + 1]
        sides = [part.segment.derived(segment_addresses) for part in row.parts]
        memory.spans[asked.number] = (
            np.array(ends, np.int64),
            np.stack([*sides, np.zeros_like(sides[0])], axis=1),
        )
    starts, layers = memory.spans[asked.number]
    sides = layers[asked.layer]
    for side, tail in enumerate(query.tail):
        sides[-1, side] = side_addresses(tail)
    return SpanTable(starts, sides)


def _spans_before(row: DecodeRow, layer: int, memory: StepMemory) -> SpanTable:
    """Return the locations of one layer of a row's parts."""
    if 0 not in memory.spans:
        ends = [*(part.start for part in row.parts), row.position - row.tail]
        sides = [part.segment.derived(segment_addresses) for part in row.parts]
        memory.spans[0] = np.array(ends, np.int64), np.stack(sides, axis=1)
    starts, layers = memory.spans[0]
    return SpanTable(starts, layers[layer])


def _own_tokens(queries: Floats, new: Sequence[Floats], n: int) -> Rest:
    """Attend to the tokens of a chunk itself, of which the last `n` are the queries'.

    Args:
        queries: (kv_heads, r*n, dim), scaled so that e^score is a weight.
        new: keys and values, (kv_heads, tokens, dim) each.
    """
    keys, values = new
    tokens = keys.shape[1]
    seen = np.arange(tokens) <= np.arange(tokens - n, tokens)[:, None]
    masks = np.tile(seen, (queries.shape[1] // n, 1))
    own = cpu_rows.sums(queries * np.float32(LOG2_E), [(keys, values)], masks)
    sums = (own.top + np.log2(own.total)) / np.float32(LOG2_E)
    return Rest(sums[..., 0], own.mixed / own.total)


@dataclass(frozen=True, slots=True)
class _IndexQuery:
    """Queries of some KV heads of a row, ready to score the key index."""

    asked: _HostQuery
    heads: slice
    spans: SpanTable
    """Locations of the row's tokens."""
    stop: int
    """Index of the first block with recent tokens."""
    centers: Floats | None
    """Parts of the block scores that the index leaves out, (heads, m, blocks)."""

    @classmethod
    def of(
        cls, selection: Selection, asked: _HostQuery, spans: SpanTable, heads: slice
    ) -> _IndexQuery:
        row, layer = asked.asked.row, asked.asked.layer
        centers = selection.center_scores(row, asked.queries, layer, heads, loop=center_loop())
        stop = selection.recent_start(row.position) // BLOCK_TOKENS
        return cls(asked, heads, spans, stop, centers)

    @property
    def whole(self) -> Floats:
        return self.asked.whole[self.heads]

    @property
    def units(self) -> Floats:
        return self.asked.units[self.heads]


@dataclass(frozen=True, slots=True)
class _ChosenBlocks:
    """Blocks selected by some KV heads of a row."""

    query: _IndexQuery
    blocks: Integers
    """Array (kv_heads, blocks)."""
    sinks: Sinks | None

    def located(self, loops: ChoiceLoops) -> Located:
        """Find the spilled blocks among those it reads."""
        query = self.query
        return loops.locate(query.spans, self.blocks, query.stop, query.heads.start)

    def read(
        self, loops: ChoiceLoops, spilled: Integers | None = None, queries: Floats | None = None
    ) -> Floats:
        """Attend, (kv_heads, m, value_dim); see `ChoiceLoops.attend`.

        Args:
            queries: queries that share the choice; by default those that it was made for.
        """
        query = self.query
        if queries is None:
            queries = query.asked.queries[query.heads]
        where = query.spans, self.blocks, query.stop, self.sinks
        return loops.attend(queries, *where, query.heads.start, spilled, query.asked.nbytes)
