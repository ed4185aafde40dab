"""Plan of a decode step's attention: shared spans are grouped, so that each is read once.

Computed once a step for each attention window, from positions alone; all layers use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import mlx.core as mx

from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import ColumnRange, KVSpan

APART = 2_048
"""Columns by which the ends of two rows in a segment may differ, if both read it together."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence of a decode step: its spans, and the place of its new token.

    The parts cover the positions in front of the tail; the tail's `tail` tokens end in front of
    `position`, which is the new token's.
    """

    parts: tuple[KVSpan, ...]
    position: int
    slot: int
    tail: int
    whole: bool = False
    """Whether it reads all tokens where others read a choice: its step follows a prompt."""
    proposed: int = 0
    """New tokens behind the first that are checked; what a step has behind those is not read."""

    @property
    def held_tokens(self) -> int:
        """Tokens of its parts; a window sees fewer."""
        return sum(part.columns for part in self.parts)

    def ahead(self, count: int) -> DecodeRow:
        """Return the row of the token after `count` new ones, which are in the tail by then."""
        if not count:
            return self
        position, tail = self.position + count, self.tail + count
        return replace(self, position=position, tail=tail, whole=False)


@dataclass(frozen=True, slots=True)
class SharedRead:
    """Consecutive pieces that the rows first..last-1 read together, and which of them is seen."""

    first: int
    last: int
    pieces: tuple[ColumnRange, ...]
    seen: mx.array | None
    """(rows, width, columns) booleans; None if every row sees all of it."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of a step read their parts, for one window: the same in all of its layers."""

    levels: tuple[tuple[SharedRead, ...], ...]
    """Units of a level are in order and have no row in common."""
    tail_seen: mx.array | None
    """(b, width, columns) booleans; None if every row sees all columns."""
    tail_columns: int
    """Columns of the longest tail, the new tokens among them."""


def in_order(rows: Sequence[DecodeRow]) -> list[int]:
    """Return the rows' indices in an order in which those that share parts are neighbors.

    Beyond that they are in the order of their slots, which often makes one slice of them.
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
    """Group the parts of rows in order (see `in_order`), so that a shared one is read once.

    Args:
        rows: the sequences.
        attention_window: window of the layers that the plan is for.
        width: new tokens of each row.
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
    """Lay out the rows first..last-1, which share their first `depth` parts, from `level` on.

    Not a function within a function: one that calls itself keeps its references alive, here the
    segments, until the garbage collector comes by.
    """
    start = first
    for _, group in groupby(range(first, last), lambda i: _key_at(rows[i], depth)):
        stop = start + len(list(group))
        if len(rows[start].parts) > depth:
            # As far as all of these rows go on alike, the parts are read together.
            end = depth + 1
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
    """Return a key that is equal for parts read together: one segment, ends close by.

    Rows that see less are scored against all columns the others see.
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
    """Return the reads of these rows' parts depth..end-1; None if they see none of them."""
    members = rows[first:last]
    nearest = min(attention_window.starts_at(row.position) for row in members)
    pieces: list[ColumnRange] = []
    columns: list[tuple[int, int]] = []
    for depth_at in range(depth, end):
        part = max((row.parts[depth_at] for row in members), key=lambda part: part.columns)
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
        at = mx.concatenate([mx.arange(start, stop) for start, stop in columns])
        positions = _positions(members, width)
        seen = attention_window.mask(positions.reshape(-1), at).reshape(*positions.shape, -1)
        seen = seen & (at < mx.array(ends)[:, None, None])
    return SharedRead(first, last, tuple(pieces), seen)


def visible_ranges(part: KVSpan, nearest: int, keep: int) -> list[tuple[int, int]]:
    """Return the positions of a part that are seen by a window from `nearest` on and a keep."""
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
    at = (starts[:, None] + mx.arange(columns))[:, None]
    positions = _positions(rows, width)[:, :, None]
    seen = at <= positions
    if attention_window.window is not None:
        seen = seen & ((at > positions - attention_window.window) | (at < attention_window.keep))
    return seen
