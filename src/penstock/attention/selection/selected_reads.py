"""Attention of rows to the blocks that they select.

With MLX's operations nothing is evaluated, so a step is one evaluation. Only spilled blocks need
the selection, and so the queries, to be evaluated before they are requested from a tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_memory import DeviceFacts
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection import block_choice, rest_reads
from penstock.attention.selection.block_choice import Tables
from penstock.attention.selection.block_gather import BlockTokens, block_positions, selected_kv
from penstock.attention.selection.choice_blocks import ASKING, BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.selection import Selection
from penstock.attention.selection.spilled_reads import has_spilled, loaded
from penstock.attention.span_attention import LOG2_E, AttentionWindow, Partial
from penstock.config.defaults import ATTEND_GROUP_TOKENS
from penstock.kv.codecs.coded import Coded
from penstock.kv.numpy_arrays import Integers
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import Tails

SCORE_COPIES = 3
"""Number of score arrays for all tokens alive at once: by segment, concatenated, and one more."""


@dataclass(slots=True)
class StepMemory:
    """Values cached for all layers of one step."""

    tables: Tables = field(default_factory=dict)
    """Rotations of blocks, for `block_choice`."""
    positions: dict[int, mx.array] = field(default_factory=dict)
    """Results of `block_positions` by their stop."""
    spans: dict[int, tuple[Integers, Integers]] = field(default_factory=dict)
    """Locations of each row's spans, for compiled loops."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A row with selective attention in one layer."""

    row: DecodeRow
    number: int
    """Index of the row in the step."""
    queries: mx.array
    """Queries of the model, (1, heads, 1, dim)."""
    scale: float
    """Factor of the scores, usually 1 / sqrt(dim)."""
    layer: int
    tail: tuple[mx.array, mx.array]
    """Keys and values of the tail and the new token, (1, kv_heads, tokens, dim) each."""
    sinks: mx.array | None
    """Attention sinks of the model, (heads,)."""

    @property
    def kv_heads(self) -> int:
        return int(self.tail[0].shape[1])


@dataclass(frozen=True, slots=True)
class ChunkQueries:
    """Queries of a prompt's chunk in one layer, in groups that share a choice."""

    row: DecodeRow
    """The sequence before the chunk; its position is that of the chunk's first token."""
    layer: int
    queries: mx.array
    """Queries of the model for the chunk's last tokens, (1, heads, n, dim)."""
    groups: Sequence[tuple[int, int]]
    """First and end of each group among the queries."""
    asking: mx.array
    """Queries that the choices are made for, (kv_heads, groups, m, dim) float32."""
    new: tuple[mx.array, mx.array]
    """Keys and values of the chunk, (1, kv_heads, tokens, dim) each."""
    index: Coded
    """Index of the chunk's keys."""
    scale: float
    """Factor of the scores, usually 1 / sqrt(dim)."""
    sinks: mx.array | None
    """Attention sinks of the model, (heads,)."""

    @property
    def position(self) -> int:
        """Position of the first query."""
        return self.row.position + int(self.new[0].shape[2] - self.queries.shape[2])

    def row_of(self, group: tuple[int, int]) -> DecodeRow:
        """Return the row that a group chooses for, with the chunk's tokens before it."""
        first = (self.position + group[0]) // ATTEND_GROUP_TOKENS * ATTEND_GROUP_TOKENS
        offset, parts = self.row.position, self.row.parts
        if first > offset:
            count = self.layer + 1  # only the last of them is read
            segment = Segment((self.new,) * count, index=(self.index,) * count)
            parts = (*parts, KVSpan(segment, offset, first - offset))
        return replace(self.row, parts=parts, position=first, tail=min(0, first - offset))


class ChunkAttention(Protocol):
    """Attention of a prefill chunk to contiguous keys; see `AttentionBackend.prefill`."""

    def prefill(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        columns: mx.array | None,
        start: int,
        scale: float,
        attention_window: AttentionWindow,
        sinks: mx.array | None = None,
        eager: bool = False,
    ) -> mx.array:
        """Attend to the keys of earlier tokens and of the chunk."""


class ChoiceReader:
    """Selects the blocks that rows read, and attends to them, with MLX's operations."""

    def __init__(self, selection: Selection, ops: AttentionOps, facts: DeviceFacts) -> None:
        self.selection = selection
        self.ops = ops
        self.facts = facts

    def prepare(self) -> None:
        """Compile the loops of steps in advance, which would otherwise delay one by seconds."""

    def prepare_chunks(self) -> None:
        """Compile the loops of chunks in advance."""

    def score_bytes(self, heads: int, kv_heads: int) -> int:
        """Return the maximum working memory per token of a sequence to score its index."""
        sizes = 2 * kv_heads
        return mx.float32.size * (SCORE_COPIES * heads + sizes)

    def chunk_score_bytes(self, heads: int, kv_heads: int) -> int:
        """Return the same while the groups of a chunk choose."""
        blocks = 2 * mx.float32.size * heads // BLOCK_TOKENS  # their scores, in two halves
        return len(ASKING) * (self.score_bytes(heads, kv_heads) + blocks + 1)

    def read(
        self, asked: Sequence[Asked], queries: mx.array, memory: StepMemory
    ) -> dict[int, mx.array]:
        """Select blocks for rows in one layer, and attend to them.

        Args:
            asked: rows with selective attention, at least one.
            queries: queries of the rows by KV head, (rows, kv_heads, m, dim), float32.
            memory: memory shared by the layers of the step.

        Returns:
            Attention outputs, (1, heads, 1, value_dim), by index of the row in the step.
        """
        rows, layer, scale = [query.row for query in asked], asked[0].layer, asked[0].scale
        blocks = block_choice.best_blocks(
            self.selection, rows, queries, scale, layer, self.ops, memory.tables
        )
        rest: list[Partial | None] = [None] * len(asked)
        if self.selection.index.with_values:
            rest = [
                self._rest(query, of_row * scale, chosen, memory)
                for query, of_row, chosen in zip(asked, queries, blocks, strict=True)
            ]
        return self.attend(asked, blocks, rest, memory)

    def read_chunk(
        self, chunk: ChunkQueries, device: ChunkAttention, memory: StepMemory
    ) -> mx.array:
        """Select and attend for queries of a chunk: (1, heads, n, dim) -> (1, heads, n, dim)."""
        read = []
        for number, group in enumerate(chunk.groups):
            row, asking = chunk.row_of(group), chunk.asking[None, :, number]
            read.append(self._read_group(chunk, group, row, asking, device, memory))
            mx.eval(read[-1])
        return read[0] if len(read) == 1 else mx.concatenate(read, axis=2)

    def _read_group(
        self,
        chunk: ChunkQueries,
        group: tuple[int, int],
        row: DecodeRow,
        asking: mx.array,
        device: ChunkAttention,
        memory: StepMemory,
    ) -> mx.array:
        rows, layer = [row], chunk.layer
        (blocks,) = block_choice.best_blocks(
            self.selection, rows, asking, chunk.scale, layer, self.ops, memory.tables
        )
        if has_spilled(row, layer):
            chosen = [np.asarray(blocks).astype(np.int64) + FIRST_BLOCKS]
            rows = loaded(self.selection, rows, chosen, layer)
        read = self._tokens(row, blocks, memory)
        offset = chunk.row.position
        first, end = max(0, row.position - offset), chunk.position + group[1] - offset
        new = chunk.new[0][:, :, first:end], chunk.new[1][:, :, first:end]
        keys, values = selected_kv(self.selection, rows[0], read, layer, new, self.ops)
        return device.prefill(
            chunk.queries[:, :, group[0] : group[1]],
            keys,
            values,
            columns=None,
            start=keys.shape[2] - (group[1] - group[0]),
            scale=chunk.scale,
            attention_window=AttentionWindow(),
            sinks=chunk.sinks,
            eager=True,
        )

    def _rest(
        self, asked: Asked, scaled: mx.array, blocks: mx.array, memory: StepMemory
    ) -> Partial:
        """Attend to the tokens that a row did not select."""
        row, layer = asked.row, asked.layer
        centers = block_choice.center_scores(self.selection, row, scaled, layer, memory.tables)
        return rest_reads.read(self.selection, row, scaled, blocks, layer, self.ops, centers)

    def attend(
        self,
        asked: Sequence[Asked],
        blocks: Sequence[mx.array],
        rest: Sequence[Partial | None],
        memory: StepMemory,
    ) -> dict[int, mx.array]:
        """Attend to selected blocks, and add the unselected tokens; see `read`.

        Args:
            blocks: selected blocks of each row, see `block_choice.best_blocks`.
            rest: attention of each row to the unselected tokens; None to ignore them.
        """
        rows = [query.row for query in asked]
        if any(has_spilled(row, asked[0].layer) for row in rows):
            chosen = [np.asarray(of_row).astype(np.int64) + FIRST_BLOCKS for of_row in blocks]
            rows = loaded(self.selection, rows, chosen, asked[0].layer)
        return {
            query.number: self._attend(query, row, self._tokens(row, of_row, memory), beside)
            for query, row, of_row, beside in zip(asked, rows, blocks, rest, strict=True)
        }

    def _tokens(self, row: DecodeRow, blocks: mx.array, memory: StepMemory) -> BlockTokens:
        stop = self.selection.recent_start(row.position)
        if stop not in memory.positions:
            memory.positions[stop] = block_positions(stop)
        return BlockTokens.of(blocks, memory.positions[stop])

    def _attend(
        self, asked: Asked, row: DecodeRow, read: BlockTokens, rest: Partial | None
    ) -> mx.array:
        layer, queries, scale, sinks = asked.layer, asked.queries, asked.scale, asked.sinks
        keys, values = selected_kv(self.selection, row, read, layer, asked.tail, self.ops)
        if rest is None and self.facts.fuses_attention and not self.selection.index.latents:
            sunk = None if sinks is None else sinks.astype(queries.dtype)
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, sinks=sunk
            )
        stacked = span_attention.grouped(span_attention.in_base_2(queries, scale), asked.kv_heads)
        exact = self._exactly(stacked, keys.squeeze(0), values.squeeze(0))
        parts = [exact] if rest is None else [exact, rest]
        sunk = None
        if sinks is not None:
            sunk = sinks.astype(mx.float32).reshape(asked.kv_heads, -1, 1) * LOG2_E
        merged = span_attention.merged(parts, sunk)
        return span_attention.ungrouped(merged, 1, queries.shape[1]).astype(queries.dtype)

    def _exactly(self, stacked: mx.array, keys: mx.array, values: mx.array) -> Partial:
        """Attend to tokens copied together, (kv_heads, tokens, dim) each."""
        return self.ops.attend_decode(stacked, [keys], [values])


def choose(
    reader: ChoiceReader,
    rows: Sequence[DecodeRow],
    numbers: Sequence[int],
    queries: mx.array,
    scale: float,
    layer: int,
    tails: Tails,
    sinks: mx.array | None = None,
    memory: StepMemory | None = None,
) -> dict[int, mx.array]:
    """Select blocks for rows in a layer, and attend to them; see `ChoiceReader.read`.

    Args:
        rows: rows of the step, one per new token.
        numbers: indices of the rows with selective attention.
        queries: queries of all rows, (b, heads, 1, dim).
        scale: factor of the scores, usually 1 / sqrt(dim).
        tails: tail pool, which contains the new tokens.
        sinks: attention sinks of the model, (heads,).
        memory: memory shared by the layers of the step.
    """
    alone, kv_heads = len(rows) == 1, tails.shapes[layer].kv_heads
    asked = [
        Asked(
            rows[number],
            number,
            queries if alone else queries[number : number + 1],
            scale,
            layer,
            tails.read_block(layer, rows[number].slot, 1, rows[number].tail + 1),
            sinks,
        )
        for number in numbers
    ]
    if len(numbers) < len(rows):
        queries = queries[mx.array(list(numbers))]
    by_head = _by_head(queries, kv_heads)
    return reader.read(asked, by_head, StepMemory() if memory is None else memory)


def attend_alone(
    reader: ChoiceReader,
    row: DecodeRow,
    queries: mx.array,
    scale: float,
    tail: tuple[mx.array, mx.array],
    sinks: mx.array | None = None,
) -> mx.array:
    """Select blocks for one row and layer, and attend to them, (1, heads, 1, value_dim).

    Args:
        row: row whose segments have only this layer.
        scale: factor of the scores, usually 1 / sqrt(dim).
        tail: keys and values of the tail, (1, kv_heads, tokens, dim) each.
        sinks: attention sinks of the model, (heads,).
    """
    asked = Asked(row, 0, queries, scale, 0, tail, sinks)
    read = reader.read([asked], _by_head(queries, asked.kv_heads), StepMemory())[0]
    return read if read.dtype == queries.dtype else read.astype(queries.dtype)


def _by_head(queries: mx.array, kv_heads: int) -> mx.array:
    """Group queries (rows, heads, 1, dim) by KV head: (rows, kv_heads, m, dim), float32."""
    rows, heads, _, dim = queries.shape
    by_head = queries.reshape(rows, kv_heads, heads // kv_heads, dim)
    return by_head if by_head.dtype == mx.float32 else by_head.astype(mx.float32)
