"""Attention of one layer in a decode step on the CPU, with NumPy for several rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from penstock.attention.attention_plan import AttentionPlan
from penstock.attention.layer_decode import LayerDecode


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Columns that rows `first..last - 1` of a decode step read together."""

    first: int
    last: int
    pieces: Sequence[tuple[mx.array, mx.array, int, int]]
    """Keys and values (1, kv_heads, n, dim) of segments, and the columns `start..stop - 1` to
    read."""
    seen: mx.array | None
    """Mask, (rows, width, columns) bool; None if every row sees all columns."""


@dataclass(frozen=True, slots=True)
class RowTails:
    """Tails of the rows of a decode step, in buffers with all slots."""

    keys: mx.array
    """Shape (slots, kv_heads, columns, dim)."""
    values: mx.array
    slots: Sequence[int]
    """Slots of the rows."""
    columns: int
    """Number of columns of the longest tail, including the new tokens."""
    seen: mx.array | None
    """Mask, (rows, width, columns) bool; None if every row sees all columns."""


RowsAttention: TypeAlias = Callable[
    [mx.array, Sequence[RowsRead], RowTails, mx.array | None], mx.array | None
]
"""Function that attends with several rows at once; returns None if it does not support them."""


@dataclass(frozen=True, slots=True)
class CPULayerDecode(LayerDecode):
    """Decode attention of one layer, with all rows at once if all KV is float32."""

    attend_rows: RowsAttention

    def together(
        self, queries: mx.array, layout: AttentionPlan, sinks: mx.array | None
    ) -> mx.array:
        reads = self._uncoded(layout)
        if reads is not None:
            tails, slots = self.step.tails, [row.slot for row in self.step.rows]
            columns = layout.tail_columns
            own = RowTails(*tails.layer(self.layer), slots, columns, layout.tail_seen)
            done = self.attend_rows(queries, reads, own, sinks)
            if done is not None:
                return done
        return LayerDecode.together(self, queries, layout, sinks)

    def _uncoded(self, layout: AttentionPlan) -> list[RowsRead] | None:
        """Return all shared reads of a plan in this layer; None if any KV is compressed."""
        reads = []
        for shared in (shared for level in layout.levels for shared in level):
            pieces = []
            for segment, start, stop in shared.pieces:
                if segment.missing:
                    start, stop = segment.columns(self.layer, start, stop)
                keys, values = segment.layers[self.layer]
                if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
                    return None
                pieces.append((keys, values, start, stop))
            reads.append(RowsRead(shared.first, shared.last, pieces, shared.seen))
        return reads
