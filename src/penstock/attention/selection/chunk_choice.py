"""Selective attention of a prefill chunk.

Queries of a group of positions share a choice. It is made for some of them, by the rule of decode
steps: the shares of a block are summed over these queries. The tokens of the group itself are read
besides. A chunk's keys are indexed before it attends, so a group chooses among them as among those
before the chunk, and what a query reads does not depend on the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection.choice_blocks import ASKING
from penstock.attention.selection.selected_reads import ChunkQueries, StepMemory
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.config.defaults import ATTEND_GROUP_TOKENS
from penstock.kv.codecs.coded import Coded

if TYPE_CHECKING:
    from penstock.attention.attention_backend import AttentionBackend

GROUP_TOKENS = ATTEND_GROUP_TOKENS
"""Number of positions whose queries read the same blocks; groups begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Selective attention of one chunk, shared by its layers."""

    selection: Selection
    """Number of tokens that a query reads besides those of its group, and the index."""
    row: DecodeRow
    """The sequence before the chunk; `position` is that of the chunk's first token."""
    memory: StepMemory = field(default_factory=StepMemory)

    def begin(self, layer: int, attention_window: AttentionWindow, tokens: int) -> int | None:
        """Return the index in a chunk of the first token whose query selects; None if none does."""
        offset = self.row.position
        last = offset + tokens - 1
        if layer not in self.selection.layers or not attention_window.sees_all(last):
            return None
        least = -(-self.selection.tokens // GROUP_TOKENS) * GROUP_TOKENS
        stop = self.selection.recent_start(_group_start(last))
        if least > last or not self.selection.indexes(self.row.parts, stop):
            return None
        return max(0, least - offset)

    def attend(
        self,
        device: AttentionBackend,
        layer: int,
        queries: mx.array,
        new: tuple[mx.array, mx.array],
        index: Coded,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend for the chunk's last queries: (1, heads, n, d) -> (1, heads, n, value_dim).

        Args:
            new: keys and values of the chunk, (1, kv_heads, tokens, dim) each.
            index: index of the chunk's keys.
            scale: scale of the model's scores.
            sinks: attention sinks of the model, (heads,).
        """
        (_, _, n, dim), tokens = queries.shape, new[0].shape[2]
        position = self.row.position + tokens - n
        groups = groups_of(position, n)
        asking = [_asking(position, group) for group in groups]
        chunk = ChunkQueries(
            self.row,
            layer,
            queries,
            groups,
            _by_group(queries, new[0].shape[1], asking),
            new,
            index,
            scale,
            sinks,
        )
        reader = device.choice_reader(self.selection, dim, new[1].shape[-1])
        return reader.read_chunk(chunk, device, self.memory)


def groups_of(position: int, n: int) -> list[tuple[int, int]]:
    """Return the first and the end of each group of `n` queries, the first at a position."""
    starts = [0, *range(GROUP_TOKENS - position % GROUP_TOKENS, n, GROUP_TOKENS), n]
    return list(pairwise(starts))


def _group_start(position: int) -> int:
    return position // GROUP_TOKENS * GROUP_TOKENS


def _asking(position: int, group: tuple[int, int]) -> list[int]:
    """Return as many queries of a group as `ASKING`, for which it chooses."""
    begin, end = group
    first = _group_start(position + begin) - position
    asking = [first + number for number in ASKING if begin <= first + number < end] or [end - 1]
    return [*asking, *asking[-1:] * (len(ASKING) - len(asking))]


def _by_group(queries: mx.array, kv_heads: int, asking: list[list[int]]) -> mx.array:
    """Return queries by KV head and group, (kv_heads, groups, m, dim) float32."""
    flat = mx.array([number for of_group in asking for number in of_group])
    stacked = span_attention.grouped(queries[:, :, flat], kv_heads).astype(mx.float32)
    by_repeat = stacked.reshape(kv_heads, -1, len(asking), len(ASKING), queries.shape[-1])
    return by_repeat.swapaxes(1, 2).flatten(2, 3)
