"""Interface of attention backends, and the description of a decode step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from penstock.attention.attention_memory import AttentionMemory, DeviceFacts
from penstock.attention.attention_plan import AttentionPlan, DecodeRow, plan_attention
from penstock.attention.ops import AttentionOps
from penstock.attention.piece_reads import PieceReads
from penstock.attention.selection.selected_reads import ChoiceReader, StepMemory
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.attention.span_attention import ALL_TOKENS, AttentionWindow
from penstock.kv.codecs.spilled import is_spilled
from penstock.kv.tails import Tails


class AttentionWays(Protocol):
    """Optimized implementations of attention, tried before plain operations."""

    def attend(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend like `AttentionBackend.decode`; None if the step is not supported."""

    def nbytes(self, tokens: int, width: int) -> int:
        """Return an upper bound of the working memory that one sequence adds to a step.

        Args:
            tokens: number of columns that the sequence reads.
            width: number of new tokens per row.
        """


class PlainOperations:
    """No optimized implementation: every step is left to plain operations."""

    def attend(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Return None for every step."""
        return None

    def nbytes(self, tokens: int, width: int) -> int:
        """Return 0: no memory besides the scores."""
        return 0


class AttentionBackend(AttentionOps, ABC):
    """Attention on one kind of device, and the memory that it needs."""

    facts: DeviceFacts = DeviceFacts()
    """Properties of the device that other modules depend on."""
    scores_at_once: int = 2**19
    """Maximum number of scores computed at a time; 2 MiB in float32."""

    @property
    @abstractmethod
    def memory(self) -> AttentionMemory:
        """Bounds of attention's working memory on this device."""

    @abstractmethod
    def decode(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend in one layer of a decode step, whose new tokens are already in the tails.

        Args:
            step: data of the step that all layers share.
            layer: index of the layer.
            window: attention window of the layer.
            queries: queries of the model, (b, heads, n, d).
            scale: factor of the scores, usually 1 / sqrt(d).
            sinks: attention sinks of the model, (heads,).

        Returns:
            Array (b, heads, n, value_dim) of the queries' dtype.
        """

    @abstractmethod
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
        """Attend in a prefill chunk to contiguous keys that end with the chunk's own.

        Args:
            queries: (1, heads, n, d), at positions start .. start + n - 1.
            keys: (1, kv_heads, m, d); the last n are the chunk's.
            values: (1, kv_heads, m, value_dim).
            columns: positions of the keys, (m,); None if they are 0 .. m - 1.
            start: position of the first query.
            scale: factor of the scores, usually 1 / sqrt(d).
            attention_window: attention window of the layer.
            sinks: attention sinks of the model, (heads,).
            eager: whether to evaluate slices of queries one by one, to limit the scores in memory.

        Returns:
            Array (1, heads, n, value_dim).
        """

    @abstractmethod
    def piece_reads(self, stacked: Sequence[mx.array]) -> AbstractContextManager[PieceReads]:
        """Return a context manager that gives the `PieceReads` of query groups.

        It attends to KV that is loaded in pieces of consecutive tokens, within the context only.

        Args:
            stacked: query groups, (kv_heads, rows, d) each, scaled for base 2.
        """

    @abstractmethod
    def choice_reader(self, selection: Selection, key_dim: int, value_dim: int) -> ChoiceReader:
        """Return a reader for selective attention with keys and values of this size."""

    @abstractmethod
    def multiply_weights(self, x: mx.array, weights: mx.array) -> mx.array:
        """Return the products (..., m) of rows (..., n) with weights (m, n)."""

    @abstractmethod
    def decoding(self, rows: int, width: int, tokens: int) -> AbstractContextManager[None]:
        """Return a context in which one decode step runs, prepared for its size.

        Args:
            rows: number of rows.
            width: number of new tokens per row.
            tokens: number of tokens in the first row's parts.
        """

    @abstractmethod
    def reads_together(self, rows: int, width: int, tokens: int) -> bool:
        """Return whether all rows of a step are processed together, reading shared spans once.

        If not, the single row attends to all its spans at once.

        Args:
            rows: number of rows.
            width: number of new tokens per row.
            tokens: number of tokens in the first row's parts.
        """


@dataclass(slots=True)
class DecodeStep:
    """Data of one decode step shared by all layers; rows are sorted by `in_order`."""

    device: AttentionBackend
    rows: Sequence[DecodeRow]
    width: int
    """Number of new tokens per row."""
    size: tuple[int, int, int]
    """Number of rows, of new tokens per row, and of tokens in the first row's parts."""
    tails: Tails
    slots: mx.array
    columns: mx.array
    """Columns of the rows' first new tokens in their slots, (b,)."""
    offset: mx.array | int
    aligned: bool
    """Whether all rows write to the same column of adjacent slots, so that one write suffices."""
    neighbors: bool
    """Whether the rows' slots form one slice of the pool."""
    layouts: dict[AttentionWindow, AttentionPlan]
    ways: AttentionWays
    """Optimized implementations to try first: kernels or fused attention."""
    kernel_plans: dict[Hashable, Any]
    selection: Selection
    """Rule of selective attention for long rows."""
    choosers: dict[AttentionWindow, list[int]]
    """Indices of the new tokens with selective attention, for the indexed layers of each window."""
    most_joined: int
    """Maximum number of tokens that a row reads at once; `ALL_TOKENS` if no KV can be in a tier."""
    memory: StepMemory = field(default_factory=StepMemory)
    """Copies and block locations shared by all layers for rows with selective attention."""

    @classmethod
    def of(
        cls,
        device: AttentionBackend,
        rows: Sequence[DecodeRow],
        tails: Tails,
        width: int = 1,
        ways: AttentionWays = PlainOperations(),  # noqa: B008
        selection: Selection = READ_ALL,
        most_joined: int = ALL_TOKENS,
    ) -> DecodeStep:
        """Prepare a step with `width` new tokens per row; nothing is evaluated yet."""
        positions = [row.position for row in rows]
        neighbors = all(row.slot == rows[0].slot + i for i, row in enumerate(rows))
        return cls(
            device,
            rows,
            width,
            (len(rows), width, rows[0].held_tokens),
            tails,
            mx.array([row.slot for row in rows]),
            mx.array([row.tail for row in rows]),
            positions[0] if len(rows) == 1 else mx.array(positions),
            neighbors and all(row.tail == rows[0].tail for row in rows),
            neighbors,
            {},
            ways,
            {},
            selection,
            {},
            most_joined,
        )

    def layout(self, attention_window: AttentionWindow) -> AttentionPlan:
        if attention_window not in self.layouts:
            plan = plan_attention(self.rows, attention_window, self.width)
            self.layouts[attention_window] = plan
        return self.layouts[attention_window]

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the new tokens' KV, (b, kv_heads, width, dim), to the tails, and return it.

        It is rounded to the tails' dtype.
        """
        dtype = self.tails.shapes[layer].dtype
        if keys.dtype != dtype:
            keys, values = keys.astype(dtype), values.astype(dtype)
        if self.aligned:
            first = self.rows[0]
            self.tails.write_block(layer, first.slot, first.tail, keys, values)
        else:
            self.tails.write(layer, self.slots, self.columns, keys, values)
        return keys, values

    @property
    def new_tokens(self) -> Sequence[DecodeRow]:
        """One row per new token: each token selects its own blocks."""
        if self.width == 1:
            return self.rows
        return [row.ahead(count) for row in self.rows for count in range(self.width)]

    def choosing(self, layer: int, attention_window: AttentionWindow) -> list[int]:
        """Return the indices of the new tokens with selective attention in a layer."""
        if layer not in self.selection.layers:
            return []
        if attention_window not in self.choosers:
            self.choosers[attention_window] = [
                number
                for number, row in enumerate(self.new_tokens)
                if number % self.width <= row.proposed
                and attention_window.sees_all(row.position)
                and self.selection.applies(row)
            ]
        return self.choosers[attention_window]

    def has_apart(self, layer: int) -> bool:
        """Return whether `is_apart` is true for any row."""
        return self.most_joined < ALL_TOKENS and any(self.is_apart(r, layer) for r in self.rows)

    def is_apart(self, row: DecodeRow, layer: int) -> bool:
        """Return whether a row must be processed by itself: its KV may be in a tier."""
        if self.most_joined == ALL_TOKENS or not row.parts or layer not in self.selection.layers:
            return False
        return row.parts[-1].end > self.most_joined or any(
            is_spilled(part.segment.layers[layer][0]) for part in row.parts
        )

    def streams(self, row: DecodeRow, attention_window: AttentionWindow) -> bool:
        """Return whether a row processed by itself is too long to be read at once."""
        return attention_window.sees_all(row.position) and row.parts[-1].end > self.most_joined
