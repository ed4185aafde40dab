"""Attention plan of a decode step: groups rows by shared spans, so that each span is read once.

Computed once per step and attention window, from positions only, and used by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import mlx.core as mx

from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import ColumnRange, KVSpan

APART = 2_048
"""Rows that end in one segment are read together only if their ends are less than this apart."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One row of a decode step: the spans of a sequence, and the position of its first new token.

    The parts cover the positions before the tail; the `tail` tokens of the tail follow, up to
    `position - 1`.
    """

    parts: tuple[KVSpan, ...]
    position: int
    slot: int
    tail: int
    whole: bool = False
    """Whether to read all tokens even with selective attention: true in the step after a
    prefill."""
    proposed: int = 0
    """Number of proposed tokens to verify; outputs after those are ignored."""
    shift: int = 0
    """Position that the model uses for the new token (RoPE), minus `position`."""
    adapter: int = 0
    """Number of the sequence's adapter; 0 without an adapter."""

    @property
    def held_tokens(self) -> int:
        """Number of tokens in the row's parts; a sliding window may see fewer."""
        return sum(part.columns for part in self.parts)

    def ahead(self, count: int) -> DecodeRow:
        """Return the row of the token that follows `count` new ones, with those in its tail."""
        if not count:
            return self
        position, tail = self.position + count, self.tail + count
        return replace(self, position=position, tail=tail, whole=False)


@dataclass(frozen=True, slots=True)
class SharedRead:
    """Consecutive spans read together by the rows `first..last - 1`, with a mask."""

    first: int
    last: int
    pieces: tuple[ColumnRange, ...]
    seen: mx.array | None
    """Visible columns, (rows, width, columns) bool; None if every row sees all."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Spans that the rows of a step read; one plan serves all layers with the same window."""

    levels: tuple[tuple[SharedRead, ...], ...]
    """Shared reads by depth in the tree; the reads of a level are sorted and have disjoint rows."""
    tail_seen: mx.array | None
    """Visible tail columns, (b, width, columns) bool; None if every row sees all."""
    tail_columns: int
    """Number of columns of the longest tail, including the new tokens."""


def in_order(rows: Sequence[DecodeRow]) -> list[int]:
    """Return the rows' indices in an order that makes rows with shared spans adjacent.

    Ties are broken by slot, so that the slots often form one slice.
    """
    if len(rows) == 1:
        return [0]
    by_slot = sorted(range(len(rows)), key=lambda i: rows[i].slot)
    rank: dict[tuple[int, int], int] = {}
    for i in by_slot:
        for part in rows[i].parts:
            rank.setdefault(_key(part), len(rank))
    return sorted(by_slot, key=lambda i: [rank[_key(part)] for part in rows[i].parts])


def plan_attention(
    rows: Sequence[DecodeRow], attention_window: AttentionWindow, width: int = 1
) -> AttentionPlan:
    """Group the spans of rows (see `in_order`), so that shared ones are read once.

    Args:
        rows: rows of the step, in order.
        width: number of new tokens per row.
    """
    levels: list[list[SharedRead]] = []
    _descend(rows, 0, len(rows), 0, 0, attention_window, width, levels)
    columns = max(row.tail for row in rows) + width
    seen = _tail_seen(rows, columns, attention_window, width)
    return AttentionPlan(tuple(map(tuple, levels)), seen, columns)


def _descend(
    rows: Sequence[DecodeRow],
    first: int,
    last: int,
    depth: int,
    level: int,
    attention_window: AttentionWindow,
    width: int,
    levels: list[list[SharedRead]],
) -> None:
    """Plan the rows `first..last - 1`, which share their first `depth` parts, from `level` on.

    Not a nested function: a recursive closure would keep the segments alive until the next garbage
    collection.
    """
    start = first
    for _, group in groupby(range(first, last), lambda i: _key_at(rows[i], depth)):
        stop = start + len(list(group))
        if len(rows[start].parts) > depth:
            # Parts are read together up to the first in which these rows differ.
            end = depth + 1 if stop - start > 1 else len(rows[start].parts)
            while (key := _key_at(rows[start], end)) is not None and key == _key_at(
                rows[stop - 1], end
            ):
                end += 1
            shared = _shared_read(rows, start, stop, depth, end, attention_window, width)
            if shared is not None:
                if level == len(levels):
                    levels.append([])
                levels[level].append(shared)
            below = level + (shared is not None)
            _descend(rows, start, stop, end, below, attention_window, width, levels)
        start = stop


def _key(part: KVSpan) -> tuple[int, int]:
    """Return a key that is equal for spans read together: same segment, ends close to each other.

    Rows that see fewer columns are scored against all of them, and masked.
    """
    return id(part.segment), (part.columns - 1) // APART


def _key_at(row: DecodeRow, depth: int) -> tuple[int, int] | None:
    return _key(row.parts[depth]) if depth < len(row.parts) else None


def _shared_read(
    rows: Sequence[DecodeRow],
    first: int,
    last: int,
    depth: int,
    end: int,
    attention_window: AttentionWindow,
    width: int,
) -> SharedRead | None:
    """Return the shared read of parts `depth..end - 1`; None if no row sees them."""
    members = rows[first:last]
    nearest = min(attention_window.starts_at(row.position) for row in members)
    pieces: list[ColumnRange] = []
    columns: list[tuple[int, int]] = []
    for depth_at in range(depth, end):
        part = members[0].parts[depth_at]
        if len(members) > 1:
            part = max((row.parts[depth_at] for row in members), key=lambda part: part.columns)
        if attention_window.keep <= part.start and part.end <= nearest:
            continue
        for start, stop in visible_ranges(part, nearest, attention_window.keep):
            pieces.append((part.segment, start - part.start, stop - part.start))
            columns.append((start, stop))
    if not pieces:
        return None
    ends = [row.parts[end - 1].end for row in members]
    furthest = max(attention_window.starts_at(row.position + width - 1) for row in members)
    whole = min(ends) == max(ends) and all(
        start >= furthest or stop <= attention_window.keep for start, stop in columns
    )
    seen = None
    if not whole:
        span_columns = mx.concatenate([mx.arange(start, stop) for start, stop in columns])
        positions = _positions(members, width)
        seen = attention_window.mask(positions.reshape(-1), span_columns)
        seen = seen.reshape(*positions.shape, -1)
        seen = seen & (span_columns < mx.array(ends)[:, None, None])
    return SharedRead(first, last, tuple(pieces), seen)


def visible_ranges(part: KVSpan, nearest: int, keep: int) -> list[tuple[int, int]]:
    """Return the ranges of a part that are visible: from `nearest` on, and the first `keep`."""
    if nearest <= max(keep, part.start):
        return [(part.start, part.end)]
    spans = [(part.start, min(part.end, keep)), (max(part.start, nearest), part.end)]
    return [(start, stop) for start, stop in spans if start < stop]


def _positions(rows: Sequence[DecodeRow], width: int) -> mx.array:
    """Return the positions of the new tokens, (rows, width)."""
    return mx.array([row.position for row in rows])[:, None] + mx.arange(width)


def _tail_seen(
    rows: Sequence[DecodeRow], columns: int, attention_window: AttentionWindow, width: int
) -> mx.array | None:
    if width == 1 and all(
        row.tail + 1 == columns
        and max(attention_window.starts_at(row.position), 0)
        <= max(row.position - row.tail, attention_window.keep)
        for row in rows
    ):
        return None
    starts = mx.array([row.position - row.tail for row in rows])
    key = (starts[:, None] + mx.arange(columns))[:, None]
    positions = _positions(rows, width)[:, :, None]
    seen = key <= positions
    if attention_window.window is not None:
        seen = seen & ((key > positions - attention_window.window) | (key < attention_window.keep))
    return seen
