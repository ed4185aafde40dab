"""Attention of a chunk of a prompt to blocks that its queries select.

Queries of a group of positions share a choice. It is made for some of them, by the rule of decode
steps: a block counts for the query that wants it most. The tokens right in front of a group, as
many as a chunk may have, are read whole. So what a query reads does not depend on the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection.choice_blocks import ASKING
from penstock.attention.selection.selected_reads import GroupReads, StepMemory
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.config.defaults import ATTEND_GROUP_TOKENS

if TYPE_CHECKING:
    from penstock.attention.attention_backend import AttentionBackend

GROUP_TOKENS = ATTEND_GROUP_TOKENS
"""Number of positions whose queries share a choice; groups begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Selective attention of one chunk, shared by its layers."""

    selection: Selection
    """Number of tokens that a query reads in front of the chunk, and the index."""
    row: DecodeRow
    """The sequence in front of the chunk; its position is that of the chunk's first token."""
    memory: StepMemory = field(default_factory=StepMemory)

    def applies(self, layer: int, attention_window: AttentionWindow, tokens: int) -> bool:
        """Return whether a layer selects, in a chunk of `tokens` tokens."""
        if layer not in self.selection.layers:
            return False
        sees_all = attention_window.sees_all(self.row.position + tokens - 1)
        groups = self._row(0), self._row(tokens - 1)
        return sees_all and all(map(self.selection.applies, groups))

    def _row(self, start: int) -> DecodeRow:
        """Return the row of the group that has the chunk's token `start`."""
        offset = self.row.position
        first = (offset + start) // GROUP_TOKENS * GROUP_TOKENS
        return replace(self.row, position=first, tail=first - offset)

    def attend(
        self,
        device: AttentionBackend,
        layer: int,
        queries: mx.array,
        new: tuple[mx.array, mx.array],
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend for the chunk's last queries: (1, heads, n, d) -> (1, heads, n, value_dim).

        Args:
            new: keys and values of the chunk, (1, kv_heads, tokens, dim) each.
            scale: scale of the model's scores.
            sinks: attention sinks of the model, (heads,).
        """
        keys, values = new
        n = queries.shape[2]
        kv_heads, tokens = keys.shape[1:3]
        reader = device.choice_reader(self.selection, keys.shape[-1], values.shape[-1])
        offset, begin, read = self.row.position + tokens - n, 0, []
        while begin < n:
            first = (offset + begin) // GROUP_TOKENS * GROUP_TOKENS
            end = min(n, first + GROUP_TOKENS - offset)
            asking = [first + number - offset for number in ASKING]
            asking = [number for number in asking if begin <= number < end] or [end - 1]
            group = GroupReads(
                self._row(tokens - n + begin),
                layer,
                queries[:, :, begin:end],
                span_attention.grouped(queries[:, :, mx.array(asking)], kv_heads).astype(
                    mx.float32
                ),
                (keys[:, :, : tokens - n + end], values[:, :, : tokens - n + end]),
                scale,
                sinks,
            )
            read.append(reader.read_group(group, device, StepMemory(spans=self.memory.spans)))
            mx.eval(read[-1])
            begin = end
        return read[0] if len(read) == 1 else mx.concatenate(read, axis=2)
