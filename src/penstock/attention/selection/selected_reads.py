"""Attention of rows to the blocks that they select.

With MLX's operations nothing is evaluated: a step with a choice is one evaluation. Devices may
read rows in other ways. Spilled blocks are requested from a tier as soon as they are chosen, which
has to wait for the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from penstock.attention.selection.choice_blocks import FIRST_BLOCKS
from penstock.attention.selection.selection import Selection
from penstock.attention.selection.spilled_reads import has_spilled, loaded
from penstock.attention.span_attention import LOG2_E, AttentionWindow, Partial
from penstock.kv.numpy_arrays import Integers
from penstock.kv.tails import Tails

SCORE_COPIES = 3
"""Number of scores of all tokens alive at once: of segments, joined, and of the next segment."""


@dataclass(slots=True)
class StepMemory:
    """Memory shared by the layers of one step."""

    tables: Tables = field(default_factory=dict)
    """Rotations of blocks."""
    positions: dict[int, mx.array] = field(default_factory=dict)
    """Positions of the tokens that may be chosen, by their end; see `block_positions`."""
    spans: dict[int, tuple[Integers, Integers]] = field(default_factory=dict)
    """Locations of each row's spans, cached by compiled loops."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A row with selective attention in one layer."""

    row: DecodeRow
    number: int
    """Index of the row in the step."""
    queries: mx.array
    """Queries of the model, (1, heads, 1, dim)."""
    scale: float
    """Scale of the model's scores."""
    layer: int
    tail: tuple[mx.array, mx.array]
    """Keys and values of the tail, with the new token, (1, kv_heads, tokens, dim) each."""
    sinks: mx.array | None
    """Attention sinks of the model, (heads,)."""

    @property
    def kv_heads(self) -> int:
        return int(self.tail[0].shape[1])


@dataclass(frozen=True, slots=True)
class GroupReads:
    """Queries in a row of a prompt's chunk, which share a choice in one layer."""

    row: DecodeRow
    """The sequence in front of the chunk."""
    layer: int
    queries: mx.array
    """Queries of the model, (1, heads, n, dim)."""
    asking: mx.array
    """Those that the choice is made for, by KV head, (kv_heads, m, dim), float32."""
    new: tuple[mx.array, mx.array]
    """Keys and values of the chunk up to the last query, (1, kv_heads, tokens, dim) each."""
    scale: float
    """Scale of the model's scores."""
    sinks: mx.array | None
    """Attention sinks of the model, (heads,)."""


class ChunkAttention(Protocol):
    """Attention of a chunk to joined keys; see `AttentionBackend.prefill`."""

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
        """Attend to the keys of earlier tokens and to a chunk's own."""


class ChoiceReader:
    """Selects the blocks that rows read, and attends to them, with MLX's operations."""

    def __init__(self, selection: Selection, ops: AttentionOps, facts: DeviceFacts) -> None:
        self.selection = selection
        self.ops = ops
        self.facts = facts

    def prepare(self) -> None:
        """Compile the loops in advance, which would otherwise delay a step by seconds."""

    def score_bytes(self, heads: int, kv_heads: int) -> int:
        """Return the maximum bytes per token of a sequence while its index is scored."""
        sizes = 2 * kv_heads
        return mx.float32.size * (SCORE_COPIES * heads + sizes)

    def read(
        self, asked: Sequence[Asked], queries: mx.array, memory: StepMemory
    ) -> dict[int, mx.array]:
        """Select and attend for rows in one layer.

        Args:
            asked: rows with selective attention, at least one.
            queries: their queries by KV head, (rows, kv_heads, m, dim), float32.
            memory: memory shared by the layers of the step.

        Returns:
            Attention output by index of the row in the step, (1, heads, 1, value_dim).
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

    def read_group(self, group: GroupReads, device: ChunkAttention, memory: StepMemory) -> mx.array:
        """Select and attend for queries of a chunk: (1, heads, n, dim) -> (1, heads, n, dim)."""
        rows, layer = [group.row], group.layer
        (blocks,) = block_choice.best_blocks(
            self.selection, rows, group.asking[None], group.scale, layer, self.ops, memory.tables
        )
        if has_spilled(group.row, layer):
            chosen = [np.asarray(blocks).astype(np.int64) + FIRST_BLOCKS]
            rows = loaded(self.selection, rows, chosen, layer)
        read = self._tokens(group.row, blocks, memory)
        keys, values = selected_kv(self.selection, rows[0], read, layer, group.new, self.ops)
        return device.prefill(
            group.queries,
            keys,
            values,
            columns=None,
            start=keys.shape[2] - group.queries.shape[2],
            scale=group.scale,
            attention_window=AttentionWindow(),
            sinks=group.sinks,
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
        """Attend to blocks that rows have selected, and to the rest; see `read`.

        Args:
            blocks: selected blocks of each row, see `block_choice.best_blocks`.
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
        if rest is None and self.facts.fuses_attention:
            sunk = None if sinks is None else sinks.astype(queries.dtype)
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, sinks=sunk
            )
        stacked = span_attention.grouped(span_attention.in_base_2(queries, scale), asked.kv_heads)
        exact = self.ops.attend_decode(stacked, [keys.squeeze(0)], [values.squeeze(0)])
        parts = [exact] if rest is None else [exact, rest]
        sunk = None
        if sinks is not None:
            sunk = sinks.astype(mx.float32).reshape(asked.kv_heads, -1, 1) * LOG2_E
        merged = span_attention.merged(parts, sunk)
        return span_attention.ungrouped(merged, 1, queries.shape[1]).astype(queries.dtype)


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
    """Select the blocks that rows read in a layer, and attend to them; see `ChoiceReader.read`.

    Args:
        rows: rows of the step, one per new token.
        numbers: indices of the rows with selective attention.
        queries: queries of all rows, (b, heads, 1, dim).
        scale: scale of the model's scores.
        tails: tail pool, with the new tokens.
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
    """Select and attend for one row and layer, (1, heads, 1, dim) -> (1, heads, 1, value_dim).

    Args:
        row: row whose parts have only this layer.
        scale: scale of the model's scores.
        tail: keys and values of the tail, (1, kv_heads, tokens, dim) each.
        sinks: attention sinks of the model, (heads,).
    """
    asked = Asked(row, 0, queries, scale, 0, tail, sinks)
    read = reader.read([asked], _by_head(queries, asked.kv_heads), StepMemory())[0]
    return read if read.dtype == queries.dtype else read.astype(queries.dtype)


def _by_head(queries: mx.array, kv_heads: int) -> mx.array:
    """Return queries (rows, heads, 1, dim) by KV head: (rows, kv_heads, m, dim), float32."""
    rows, heads, _, dim = queries.shape
    by_head = queries.reshape(rows, kv_heads, heads // kv_heads, dim)
    return by_head if by_head.dtype == mx.float32 else by_head.astype(mx.float32)
