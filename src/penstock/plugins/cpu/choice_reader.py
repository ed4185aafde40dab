"""Selective attention of rows by compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.attention.ops import AttentionOps
from penstock.attention.selection import rest_reads
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.rest_reads import Rest, Sinks, squares_of
from penstock.attention.selection.selected_reads import Asked, ChoiceReader, StepMemory
from penstock.attention.selection.selection import Selection, halves
from penstock.attention.selection.spilled_reads import Located, held_for
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.plugins.cpu.center_loops import center_loop
from penstock.plugins.cpu.choice_loops import (
    ChoiceLoops,
    SpanTable,
    segment_addresses,
    side_addresses,
)


class LoopReader(ChoiceReader):
    """Selects and reads blocks by compiled loops, if KV is float32.

    Args:
        selection: number of tokens to read.
        ops: distributes the work over threads.
        loops: loops for keys and values of this size.
    """

    def __init__(self, selection: Selection, ops: AttentionOps, loops: ChoiceLoops) -> None:
        super().__init__(selection, ops)
        self.loops = loops

    def prepare(self) -> None:
        """See `ChoiceReader`; takes some seconds, and 200 MB for the compiler."""
        self.loops.compile()

    def read(self, asked: Sequence[Asked], memory: StepMemory) -> dict[int, Floats]:
        """See `ChoiceReader`; one row per lane, or half of the heads of a single row."""
        if not asked:
            return {}
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
            with held_for([one.row for one in asked], located, asked[0].layer) as there:
                pairs = list(zip(choices, there, strict=True))
                read = self.ops.divide(lambda pair: pair[0].read(self.loops, pair[1]), pairs)
        else:
            read = self.ops.divide(lambda task: choose(task).read(self.loops), tasks)
        if len(parts) > 1:
            read = [np.concatenate(read)]
        return {one.number: mixed for one, mixed in zip(asked, read, strict=True)}

    def blocks(self, asked: Sequence[Asked], memory: StepMemory) -> list[Integers]:
        """See `ChoiceReader`."""
        return [self._choose(self._query(one, memory, slice(None))) for one in asked]

    def rest(self, asked: Asked, blocks: Integers, memory: StepMemory) -> Rest | None:
        """See `ChoiceReader`."""
        if not self.selection.index.with_values:
            return None

        def read(heads: slice) -> Rest | None:
            return self._rest_of(self._query(asked, memory, heads), blocks[heads])

        parts = self.ops.divide(read, halves(len(blocks)))
        return rest_reads.joined([part for part in parts if part is not None])

    def _query(self, asked: Asked, memory: StepMemory, heads: slice) -> _IndexQuery:
        heads = slice(*heads.indices(len(asked.queries)))
        return _IndexQuery.of(self.selection, asked, _table(asked, memory), heads)

    def _choose(self, query: _IndexQuery) -> Integers:
        """Select blocks for some KV heads, (kv_heads, blocks)."""
        count = self.selection.blocks(query.asked.row.position)
        where = query.x, query.spans, query.stop, count
        return self.loops.choose(*where, query.heads.start, query.centers)

    def _rest_of(self, query: _IndexQuery, blocks: Integers) -> Rest | None:
        """Read the unselected tokens of some KV heads, if the index has values."""
        index = self.selection.index
        if not index.with_values:
            return None
        squares = squares_of(query.asked.queries[query.heads])
        where = query.spans, query.stop, blocks, query.heads.start
        sums, mean = self.loops.rest(query.x, squares, *where, query.centers)
        return Rest(sums, index.inverse_transform(mean, self.loops.value_dim))


def _table(asked: Asked, memory: StepMemory) -> SpanTable:
    """Return the locations of one layer of a row, its tail last."""
    row = asked.row
    if asked.number not in memory.spans:
        ends = [*(part.start for part in row.parts), row.position - row.tail, row.position + 1]
        sides = [part.segment.derived(segment_addresses) for part in row.parts]
        memory.spans[asked.number] = (
            np.array(ends, np.int64),
            np.stack([*sides, np.zeros_like(sides[0])], axis=1),
        )
    starts, layers = memory.spans[asked.number]
    sides = layers[asked.layer]
    for side, tail in enumerate(asked.tail):
        sides[-1, side] = side_addresses(tail)
    return SpanTable(starts, sides)


@dataclass(frozen=True, slots=True)
class _IndexQuery:
    """Queries of some KV heads of a row, ready to score the key index."""

    asked: Asked
    heads: slice
    x: Floats
    """Queries as expected by `ChoiceLoops.choose`."""
    spans: SpanTable
    """Locations of the row's tokens."""
    stop: int
    """Index of the first block with recent tokens."""
    centers: Floats | None
    """Parts of the block scores that the index leaves out, (heads, m, blocks)."""

    @classmethod
    def of(cls, selection: Selection, asked: Asked, spans: SpanTable, heads: slice) -> _IndexQuery:
        x = selection.index.transform_query(asked.queries[heads])
        row = asked.row, asked.queries, asked.layer, heads
        centers = selection.center_scores(*row, loop=center_loop())
        stop = selection.recent_start(asked.row.position) // BLOCK_TOKENS
        return cls(asked, heads, x, spans, stop, centers)


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

    def read(self, loops: ChoiceLoops, spilled: Integers | None = None) -> Floats:
        """Attend, (kv_heads, m, value_dim); see `ChoiceLoops.attend`."""
        query = self.query
        queries = query.asked.queries[query.heads]
        where = query.spans, self.blocks, query.stop, self.sinks
        return loops.attend(queries, *where, query.heads.start, spilled)
