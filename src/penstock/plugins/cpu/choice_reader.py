"""Selective attention with compiled loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention.attention_memory import DeviceFacts
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection import rest_reads
from penstock.attention.selection.choice_blocks import ASKING, BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.rest_reads import Rest, Sinks, squares_of
from penstock.attention.selection.selected_reads import (
    Asked,
    ChoiceReader,
    ChunkAttention,
    ChunkQueries,
    StepMemory,
)
from penstock.attention.selection.selection import Selection, halves
from penstock.attention.selection.spilled_reads import Located, held_for
from penstock.attention.span_attention import Partial
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import Spilled
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.kv.segment import Segment
from penstock.plugins.cpu.attending_loops import PLACES
from penstock.plugins.cpu.attention_tiles import FLOAT_BYTES
from penstock.plugins.cpu.center_loops import cached_center_loop
from penstock.plugins.cpu.choice_jobs import choice_job
from penstock.plugins.cpu.choice_loops import (
    ChoiceLoops,
    SpanTable,
    bytes_of,
    index_addresses,
    segment_addresses,
    side_addresses,
)
from penstock.plugins.cpu.group_loops import (
    GroupQueries,
    GroupTask,
    group_loops,
    group_tasks,
    held_spans,
)

BLOCK_NUMBERS = 4
"""Numbers of a block, besides its scores, while blocks are chosen."""


class LoopReader(ChoiceReader):
    """Selects and reads blocks with compiled loops where they can read the KV without decoding.

    Args:
        selection: settings of selective attention.
        ops: operations that distribute work over threads.
        facts: properties of the device.
        loops: loops for the model's keys and values.
    """

    def __init__(
        self, selection: Selection, ops: AttentionOps, facts: DeviceFacts, loops: ChoiceLoops
    ) -> None:
        super().__init__(selection, ops, facts)
        self.loops = loops
        self.groups = group_loops(loops.key_dim, loops.value_dim, loops.signs)

    def prepare(self) -> None:
        """See `ChoiceReader`; takes some seconds and 200 MB for the compiler at the first start."""
        self.loops.compile()
        if not self.selection.index.with_values:
            choice_job(self.loops.key_dim)  # of layers with packed weights

    def prepare_chunks(self) -> None:
        """See `ChoiceReader`; takes some seconds at the first start, too."""
        self.groups.compile()

    def score_bytes(self, heads: int, kv_heads: int) -> int:
        """See `ChoiceReader`; the compiled loops store one score per block only."""
        return 0

    def chunk_score_bytes(self, heads: int, kv_heads: int) -> int:
        """See `ChoiceReader`; each lane has the scores of the groups of one KV head."""
        queries = len(ASKING) * -(-heads // kv_heads)
        numbers = self.ops.lanes * (2 * queries + BLOCK_NUMBERS)
        return -(-FLOAT_BYTES * numbers // BLOCK_TOKENS)

    def read(
        self, asked: Sequence[Asked], queries: mx.array, memory: StepMemory
    ) -> dict[int, mx.array]:
        """See `ChoiceReader`; evaluates the queries first."""
        scaled = queries * asked[0].scale
        whole, units = self.selection.index.whole_queries(queries, asked[0].scale)
        mx.eval(scaled, whole, units, [query.tail for query in asked])
        given = zip(asked, np.asarray(scaled), np.asarray(whole), np.asarray(units), strict=True)
        readable, others = list[_HostQuery](), list[_HostQuery]()
        for query in given:
            hosted = _HostQuery.of(*query)
            (readable if hosted.is_readable else others).append(hosted)
        outputs = {
            query.asked.number: mx.array(mixed.reshape(1, query.asked.queries.shape[1], 1, -1))
            for query, mixed in self._read(readable, memory)
        }
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

    def read_chunk(
        self, chunk: ChunkQueries, device: ChunkAttention, memory: StepMemory
    ) -> mx.array:
        """See `ChoiceReader`; by loops over groups, some of one KV head at a time."""
        if not _are_readable(chunk.new, chunk.row, chunk.layer):
            return super().read_chunk(chunk, device, memory)
        queries, held = _on_host(self.selection, chunk)
        spans = held_spans(
            _spans_before(chunk.row, chunk.layer, memory),
            chunk.row.position + chunk.new[0].shape[2],
            [*map(side_addresses, held), *index_addresses(chunk.index)],
        )
        centers = self.selection.index.centers.get(chunk.layer)
        left_out = None if centers is None else (centers.rotation, centers.vectors)
        count = self.selection.blocks(chunk.row_of(chunk.groups[-1]).position)
        n, heads, _ = queries.queries.shape
        mixed = np.empty((n, heads, self.groups.value_dim), np.float32)
        chosen = np.empty((len(held[0]), len(chunk.groups), count), np.int64)

        def choose(task: GroupTask) -> None:
            chosen[task] = self.groups.choose(queries, spans, *task, count, left_out)

        def read(task: GroupTask) -> None:
            choose(task)
            self.groups.attend(queries, spans, *task, chosen[task], mixed)

        divided = group_tasks(*chosen.shape[:2], self.ops.lanes)
        self.ops.divide(choose if spans.is_spilled else read, divided)
        if spans.is_spilled:
            self._read_spilled(chunk, queries, spans, chosen, mixed)
        by_head = mx.array(mixed)[None].transpose(0, 2, 1, 3)
        return by_head if chunk.queries.dtype == mx.float32 else by_head.astype(chunk.queries.dtype)

    def _read_spilled(
        self,
        chunk: ChunkQueries,
        queries: GroupQueries,
        spans: SpanTable,
        chosen: Integers,
        mixed: Floats,
    ) -> None:
        """Attend to blocks that groups have chosen, a group after the other."""
        for number, (_, end) in enumerate(chunk.groups):
            blocks, group = np.ascontiguousarray(chosen[:, number]), slice(number, number + 1)
            seen = SpanTable(np.append(spans.starts[:-1], queries.first + end), spans.sides)
            located = self.loops.locate(seen, blocks, int(queries.stops[number]))
            with held_for([chunk.row], [located], chunk.layer) as (there,):

                def read(head: int, group: slice = group, there: Integers = there) -> None:
                    where = chosen[head, group], mixed, there[head : head + 1]
                    self.groups.attend(queries, spans, head, group, *where)

                self.ops.divide(read, range(len(chosen)))

    def _read(
        self, asked: Sequence[_HostQuery], memory: StepMemory
    ) -> Iterable[tuple[_HostQuery, Floats]]:
        """Read rows in parallel, a single row by halves of its heads."""
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
        """Attend to the unselected tokens of a row; None if the index has no values."""
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
        """Select blocks for the query's KV heads, (kv_heads, blocks)."""
        count = self.selection.blocks(query.asked.asked.row.position)
        where = query.spans, query.stop, count
        return self.loops.choose(query.whole, query.units, *where, query.heads.start, query.centers)

    def _rest_of(self, query: _IndexQuery, blocks: Integers) -> Rest | None:
        """Attend to the unselected tokens of some KV heads; None if the index has no values."""
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
    """Query of a row in one layer, with its arrays as NumPy views."""

    asked: Asked
    queries: Floats
    """Queries (kv_heads, m, dim), scaled so that e^score is a weight."""
    whole: Floats
    """Queries as integers from `KeyIndex.whole_queries`, (kv_heads, m, n)."""
    units: Floats
    """Factors of products with these, (kv_heads, m, 1)."""
    tail: Sequence[Floats]
    """Keys and values of the tail, (kv_heads, tokens, dim); empty if loops cannot read them."""
    sinks: Floats | None
    """Attention sinks in base e, (kv_heads, m)."""

    @classmethod
    def of(cls, asked: Asked, queries: Floats, whole: Floats, units: Floats) -> _HostQuery:
        tail = [np.asarray(side)[0] for side in asked.tail] if bytes_of(asked.tail) else []
        sinks = None
        if asked.sinks is not None:
            sinks = np.array(asked.sinks.astype(mx.float32)).reshape(len(queries), -1)
        units = np.ascontiguousarray(units) * np.float32(0.5)
        return cls(
            asked, np.ascontiguousarray(queries), np.ascontiguousarray(whole), units, tail, sinks
        )

    @property
    def is_readable(self) -> bool:
        """Whether compiled loops can read it: all of its KV is as in the tail, without a codec."""
        return _are_readable(self.asked.tail, self.asked.row, self.asked.layer)

    @property
    def nbytes(self) -> int:
        """Bytes of an element of its KV."""
        return self.tail[0].itemsize

    def all_sinks(self, rest: Rest | None, heads: slice = slice(None)) -> Sinks | None:
        """Return the attention sinks of some KV heads, merged with `rest` if given."""
        sinks = None if self.sinks is None else self.sinks[heads]
        if rest is not None:
            return rest.sinks(sinks)
        return None if sinks is None else Sinks(sinks)


def _are_readable(new: tuple[mx.array, mx.array], row: DecodeRow, layer: int) -> bool:
    """Return whether loops can read new tokens, and all others are as they are."""
    if not bytes_of(new):
        return False
    dtypes = {new[0].dtype}
    return all(part.segment.derived(_dtypes)[layer] <= dtypes for part in row.parts)


def _dtypes(segment: Segment) -> list[set[mx.Dtype | None]]:
    """Return the dtypes of each layer's sides, see `_dtype_of`."""
    return [set(map(_dtype_of, sides)) for sides in segment.layers]


def _dtype_of(side: Side) -> mx.Dtype | None:
    """Return the dtype of a side, which may be spilled; None if it is compressed."""
    if isinstance(side, Coded):
        return side.codec.dtype if isinstance(side.codec, Spilled) else None
    return side.dtype if isinstance(side, mx.array) else None


def _table(query: _HostQuery, memory: StepMemory) -> SpanTable:
    """Return the addresses of one layer of a row, including its tail as the last span."""
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
    if not row.parts:
        return SpanTable(np.zeros(1, np.int64), np.zeros((0, PLACES + 1, 2), np.int64))
    if 0 not in memory.spans:
        ends = [*(part.start for part in row.parts), row.position - row.tail]
        sides = [part.segment.derived(segment_addresses) for part in row.parts]
        memory.spans[0] = np.array(ends, np.int64), np.stack(sides, axis=1)
    starts, layers = memory.spans[0]
    return SpanTable(starts, layers[layer])


def _on_host(
    selection: Selection, chunk: ChunkQueries
) -> tuple[GroupQueries, Sequence[npt.NDArray[Any]]]:
    """Return a chunk's queries, and its keys and values, (kv_heads, tokens, dim) each."""
    whole, units = selection.index.whole_queries(chunk.asking, chunk.scale)
    asking = chunk.asking * chunk.scale
    by_row = (chunk.queries.squeeze(0).astype(mx.float32) * chunk.scale).swapaxes(0, 1)
    sinks = None if chunk.sinks is None else chunk.sinks.astype(mx.float32)
    mx.eval(whole, units, asking, by_row, chunk.new, sinks)
    stops = [selection.recent_start(chunk.row_of(group).position) for group in chunk.groups]
    held = [np.asarray(side)[0] for side in chunk.new]
    queries = GroupQueries(
        np.ascontiguousarray(by_row),
        chunk.position,
        np.array(chunk.groups, np.int64),
        np.ascontiguousarray(asking),
        np.ascontiguousarray(whole),
        np.asarray(units) * np.float32(0.5),
        np.array(stops, np.int64) // BLOCK_TOKENS,
        None if sinks is None else np.asarray(sinks),
        held[0].itemsize,
    )
    return queries, held


@dataclass(frozen=True, slots=True)
class _IndexQuery:
    """Queries of some KV heads of a row, for scoring the key index."""

    asked: _HostQuery
    heads: slice
    spans: SpanTable
    """Addresses of the row's tokens."""
    stop: int
    """Index of the first block with recent tokens."""
    centers: Floats | None
    """Block scores of the key centers, which are not in the index, (heads, m, blocks)."""

    @classmethod
    def of(
        cls, selection: Selection, asked: _HostQuery, spans: SpanTable, heads: slice
    ) -> _IndexQuery:
        row, layer = asked.asked.row, asked.asked.layer
        centers = selection.center_scores(
            row, asked.queries, layer, heads, loop=cached_center_loop()
        )
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
    """Blocks selected for some KV heads of a row."""

    query: _IndexQuery
    blocks: Integers
    """Sorted indices, (kv_heads, blocks)."""
    sinks: Sinks | None

    def located(self, loops: ChoiceLoops) -> Located:
        """Return places and checksums of the spilled blocks to read."""
        query = self.query
        return loops.locate(query.spans, self.blocks, query.stop, query.heads.start)

    def read(self, loops: ChoiceLoops, spilled: Integers | None = None) -> Floats:
        """Attend, (kv_heads, m, value_dim); see `ChoiceLoops.attend`."""
        query = self.query
        queries = query.asked.queries[query.heads]
        where = query.spans, self.blocks, query.stop, self.sinks
        return loops.attend(queries, *where, query.heads.start, spilled, query.asked.nbytes)
