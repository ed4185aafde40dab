"""The interface of what attends on a device, and a decode step as it sees it."""

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
    """Ways to attend that are tried before plain operations."""

    def attend(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend as `AttentionBackend.decode` does; None where plain operations are to do it."""

    def nbytes(self, tokens: int, width: int) -> int:
        """Return an upper bound of the bytes that a sequence adds to a step in any way.

        Args:
            tokens: columns that it reads.
            width: new tokens of a row.
        """


class PlainOperations:
    """Plain operations as the only way to attend; their memory is that of the scores."""

    def attend(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Leave it to the back end."""
        return None

    def nbytes(self, tokens: int, width: int) -> int:
        """Return 0: nothing is taken beside the scores."""
        return 0


class AttentionBackend(AttentionOps, ABC):
    """Attention over keys and values on one kind of device, and the bytes that it needs."""

    facts: DeviceFacts = DeviceFacts()
    """Kind of the device, as far as others decide by it."""
    scores_at_once: int = 2**19
    """Scores that are computed at a time, at most; 2 MiB in float32."""

    @property
    @abstractmethod
    def memory(self) -> AttentionMemory:
        """Bytes that its work takes."""

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
        """Attend in one layer of a step, whose new tokens are in the tails already.

        Args:
            step: the rows, and how they read.
            layer: number of the layer.
            window: columns that a query of the layer sees.
            queries: (b, heads, n, d), as the model has them.
            scale: factor of the model's scores.
            sinks: scores without a value, as the model has them, (heads,).

        Returns:
            (b, heads, n, value_dim), of the queries' type.
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
        """Let a prefill chunk read contiguous keys, its own at the end.

        Args:
            queries: (1, heads, n, d), at the positions start .. start + n - 1.
            keys: (1, kv_heads, m, d); the last n are the chunk's own.
            values: (1, kv_heads, m, value_dim).
            columns: (m,) positions of the keys if they are not 0 .. m - 1.
            start: position of the first query.
            scale: factor of the model's scores.
            attention_window: which columns are seen.
            sinks: (heads,) as the model has them, in base e.
            eager: slices are computed now; left to MLX, the scores of many are alive together.

        Returns:
            (1, heads, n, value_dim).
        """

    @abstractmethod
    def piece_reads(self, stacked: Sequence[mx.array]) -> AbstractContextManager[PieceReads]:
        """Let groups of queries read pieces of keys and values in this context.

        Args:
            stacked: see `PieceReads`.
        """

    @abstractmethod
    def choice_reader(self, selection: Selection, key_dim: int, value_dim: int) -> ChoiceReader:
        """Return what lets rows choose, for keys and values of this size."""

    @abstractmethod
    def multiply_weights(self, x: mx.array, weights: mx.array) -> mx.array:
        """Return the products (..., m) of rows (..., n) with weights (m, n)."""

    @abstractmethod
    def decoding(self, rows: int, width: int, tokens: int) -> AbstractContextManager[None]:
        """Prepare the device for a decode step, which is computed in this context.

        Args:
            rows: of the step.
            width: new tokens of each.
            tokens: that the first row's parts have.
        """

    @abstractmethod
    def reads_together(self, rows: int, width: int, tokens: int) -> bool:
        """Tell whether the rows of a step are read together, parts that they share once.

        If not, one row is read in one product.

        Args:
            rows: of the step.
            width: new tokens of each.
            tokens: that the first row's parts have.
        """


@dataclass(slots=True)
class DecodeStep:
    """One decode step over rows in order: the data that all its layers share."""

    device: AttentionBackend
    rows: Sequence[DecodeRow]
    width: int
    """New tokens of each row."""
    size: tuple[int, int, int]
    """Rows, new tokens of each, and tokens that the first row's parts have."""
    tails: Tails
    slots: mx.array
    columns: mx.array
    """Columns of the rows' first new tokens in their slots, (b,)."""
    offset: mx.array | int
    aligned: bool
    """Whether all rows write to the same column of neighboring slots: one block."""
    neighbors: bool
    """Whether the rows' slots are one slice of the pool."""
    layouts: dict[AttentionWindow, AttentionPlan]
    ways: AttentionWays
    """Choice between kernels, fused attention and plain operations."""
    kernel_plans: dict[Hashable, Any]
    selection: Selection
    """Choice of the tokens that long rows read."""
    choosers: dict[AttentionWindow, list[int]]
    """Numbers of the new tokens that choose, which all layers of a window that have an index
    share."""
    most_joined: int
    """Most tokens that a row reads at once of which some may be in a tier; `ALL_TOKENS` where none
    is there."""
    memory: StepMemory = field(default_factory=StepMemory)
    """Copies, and places of tokens, that all layers share for rows that choose."""

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
        """Prepare a step of `width` new tokens a row; nothing is computed yet."""
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
        """Return how the rows read under this window."""
        if attention_window not in self.layouts:
            plan = plan_attention(self.rows, attention_window, self.width)
            self.layouts[attention_window] = plan
        return self.layouts[attention_window]

    @property
    def new_tokens(self) -> Sequence[DecodeRow]:
        """New tokens of all rows, row by row, each as a row of its own: it makes its own choice."""
        if self.width == 1:
            return self.rows
        return [row.ahead(count) for row in self.rows for count in range(self.width)]

    def choosing(self, layer: int, attention_window: AttentionWindow) -> list[int]:
        """Return the numbers of the new tokens that read a choice in a layer."""
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
        """Tell whether some row is apart, see `is_apart`; never where nothing is in a tier."""
        return self.most_joined < ALL_TOKENS and any(self.is_apart(r, layer) for r in self.rows)

    def is_apart(self, row: DecodeRow, layer: int) -> bool:
        """Tell whether a row that does not choose must be computed before others read.

        The KV that it reads is in a tier, or may be.
        """
        if self.most_joined == ALL_TOKENS or not row.parts or layer not in self.selection.layers:
            return False
        return row.parts[-1].end > self.most_joined or any(
            is_spilled(part.segment.layers[layer][0]) for part in row.parts
        )

    def streams(self, row: DecodeRow, attention_window: AttentionWindow) -> bool:
        """Tell whether a row that is read apart has too many tokens to be read at once."""
        return attention_window.sees_all(row.position) and row.parts[-1].end > self.most_joined
