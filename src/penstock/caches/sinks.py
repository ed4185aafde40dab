"""Bounded windows whose first `keep` tokens are visible to every query, in chunks of any size.

For a chunk that overflows the window, mlx-lm's mask hides the kept tokens from all but the first
queries. The output then depends on the chunk size, and the system prompt is invisible while a long
message is processed. Here each query sees the first `keep` tokens and the last max_size - keep up
to its own. These are attention sinks (Xiao et al. 2023, StreamingLLM), except that positions are
not renumbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from penstock.caches.base import Batch, Bounded, agree, batch_of, ends_of
from penstock.caches.masks import Mask, by_position
from penstock.caches.rotating import BatchRotatingKVCache, Ring, RotatingKVCache, joined
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints, positive, whole, window
from penstock.kv.columns import Side


class SinkRing(Ring):
    """The window of one sequence, with kept tokens visible to every query."""

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return the mask for the next N tokens; `window_size` does not hide kept tokens."""
        if N == 1:
            if window_size is None or self.offset < window_size:
                return None
            position = self._positions_after_one()
        else:
            past = min(self.offset, self.max_size - 1)
            if past + N <= min(window_size or self.max_size, self.max_size) and not return_array:
                return "causal"
            column = mx.arange(past + N)
            position = mx.where(column < self.keep, column, self.offset - past + column)
        query, recent = mx.arange(self.offset, self.offset + N), self.max_size - self.keep
        return by_position(position, query, self.keep, recent, window_size)


class SinkRotatingKVCache(SinkRing, RotatingKVCache):
    """A `RotatingKVCache` whose kept tokens are visible to every query of a chunk."""


class BatchSinkRing(Bounded, Batch):
    """Left-aligned windows of a batch: token p is in the same column in every row.

    That is column p if p < max_size, else keep + (p - keep) mod (max_size - keep). No row is padded
    to the longest, and rows join and leave without moving tokens of other rows.
    """

    carried: ClassVar[tuple[str, ...]] = Ring.carried
    row_classes: ClassVar[tuple[type[Ring], ...]]
    """Cache classes that can be merged into this batch."""
    single_class: type[Ring]
    keep: int
    _ends: list[int] | None = None

    def __init__(self, max_size: int, keep: int, rows: int) -> None:
        self.max_size, self.keep = window(max_size, keep)
        self._tokens = [0] * positive("rows", rows)

    def _slot(self, position: int) -> int:
        if position < self.max_size:
            return position
        return self.keep + (position - self.keep) % (self.max_size - self.keep)

    def _used(self, more: int = 0) -> int:
        return min(max(self._tokens) + more, self.max_size)

    def _overflows(self, tokens: int) -> bool:
        chunk = tokens > 1 or self._ends is not None
        return chunk and max(self._tokens) + tokens > self.max_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Write one chunk per row, and return the columns that its queries may attend to.

        The columns are in ring order; a chunk that overflows a window follows them.

        Args:
            keys: keys of the tokens, (batch, kv_heads, tokens, head_dim).
            values: values of the tokens, of the same shape except for head_dim.
        """
        tokens = self._accept(keys, values)
        new = self._encode(keys, values)
        self._chunk = None
        if tokens == 0 and not self.empty():
            return self.keys_and_values()
        if self._overflows(tokens):
            return self._update_past_end(new, tokens)
        self._make_room(self._used(tokens), self._used(), new)
        if tokens == 1:
            slots = [self._slot(position) for position in self._tokens]
            keys_held, values_held = self._held()
            self.keys = col.scatter(keys_held, slots, new[0])
            self.values = col.scatter(values_held, slots, new[1])
        else:
            for row, position in enumerate(self._tokens):
                self._write(position, _row(new, row, 0, tokens), row)
        used = self._used(tokens)
        self._advance(tokens)
        return self._columns(used)

    def _columns(self, used: int) -> tuple[Side, Side]:
        keys, values = self._held()
        if used == self.max_size:
            return keys, values
        return col.take(keys, 0, used), col.take(values, 0, used)

    def keys_and_values(self) -> tuple[Side, Side]:
        return self._chunk or self._columns(self._used())

    def _update_past_end(self, new: tuple[Side, Side], tokens: int) -> tuple[Side, Side]:
        """Write the part of a chunk inside each row's window; return past columns and the chunk."""
        fetched = joined(self._visible_past(), new)
        self._make_room(self.max_size, self._used(), new)
        for row, (position, valid) in enumerate(
            zip(self._tokens, self._valid(tokens), strict=True)
        ):
            for start, stop in self._runs(position, position + valid):
                self._write(
                    self._slot(start), _row(new, row, start - position, stop - position), row
                )
        mx.eval(col.arrays(self.keys, self.values))
        self._advance(tokens)
        return self._shown_to_others(fetched)

    def _visible_past(self) -> tuple[list[Side], list[Side]]:
        if self.keys is None or self.values is None:
            return [], []
        used = self._used()
        return [col.take(self.keys, 0, used)], [col.take(self.values, 0, used)]

    def _valid(self, tokens: int) -> list[int]:
        """Return how many of the next `tokens` of each row are not right padding."""
        ends = self._ends or [position + tokens for position in self._tokens]
        return [
            min(tokens, max(0, end - position))
            for position, end in zip(self._tokens, ends, strict=True)
        ]

    def _advance(self, tokens: int) -> None:
        self._tokens = [
            position + n for position, n in zip(self._tokens, self._valid(tokens), strict=True)
        ]

    def _runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of positions start..stop-1 that are in the window at `stop`."""
        ring = self.max_size - self.keep
        recent = max(start, self.keep, stop - ring)
        turn = max(recent, self.keep + (stop - 1 - self.keep) // ring * ring)
        spans = [(start, min(stop, self.keep)), (recent, turn), (turn, stop)]
        return [(first, last) for first, last in spans if last > first]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return the mask for the next N tokens, (batch, 1, N, columns)."""
        query = self.offset[:, None] + mx.arange(N)
        if self._overflows(N):
            past = self._positions(self.offset, self._used())
            position = mx.concatenate([past, query], axis=1)
        elif N == 1:
            position = self._positions(self.offset + 1, self._used(1))
        else:
            position = mx.arange(self._used(N))[None]
        recent = self.max_size - self.keep
        return by_position(position, query, self.keep, recent, window_size)[:, None]

    def _positions(self, tokens: mx.array, columns: int) -> mx.array:
        """Return the position of the token in each column, or -1, (batch, columns).

        Args:
            tokens: number of tokens of each row, (batch,).
            columns: number of columns.
        """
        column, last = mx.arange(columns), tokens[:, None] - 1
        ring = self.max_size - self.keep
        newest = self.keep + (last - self.keep) % ring
        turned = mx.where(column < self.keep, column, last - (newest - column) % ring)
        unturned = mx.where(column <= last, column, -1)
        return mx.where(last < self.max_size, unturned, turned)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce the lengths of right-padded prompts; `finalize` must follow."""
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError("left_padding is not supported with keep; pad prompts on the right")
        self._ends = ends_of(self._tokens, lengths, right_padding)

    def finalize(self) -> None:
        """End right-padded prompts; their padding was never stored."""
        self._ends = None

    def size(self) -> int:
        return self._used()

    def is_trimmable(self) -> bool:
        return max(self._tokens) < self.max_size

    def trim(self, n: int) -> int:
        """Drop up to `n` of the last tokens of every row, limited by the shortest row.

        Returns 0 once a window is full, as overwritten tokens are gone.
        """
        if not self.is_trimmable():
            return 0
        n = min(*self._tokens, whole("n", n, 0))
        self._tokens = [position - n for position in self._tokens]
        return n

    def _state(self) -> tuple[Any, ...]:
        rows_class = self.single_class.__name__
        return *super()._state(), self.offset, self.keep, self.max_size, rows_class

    def _restore(self, state: Sequence[Any]) -> None:
        *sides, tokens, self.keep, self.max_size, rows_class = state
        super()._restore(sides)
        self._tokens = ints(tokens)
        self.single_class = next(kind for kind in self.row_classes if kind.__name__ == rows_class)

    def filter(self, batch_indices: Any) -> None:
        """Keep only the given rows, in that order, in buffers of exactly the columns in use."""
        rows = chosen_rows(batch_indices, len(self._tokens))
        self._tokens = [self._tokens[row] for row in rows]
        self._repacked()
        self._pick(rows, 0, self._used())

    def extend(self, other: Any) -> None:
        agree("extend", [self, other])
        end = max(self._used(), other._used())
        self._join(other, end, lambda batch, side: [(0, col.take(side, 0, batch._used()))])
        self._repacked()

    def extract(self, idx: int) -> Ring:
        single = self._sibling(self.single_class)
        single.offset, single._idx = self._tokens[idx], 0
        if self.keys is None or single.offset == 0:
            return single
        single._idx = self._slot(single.offset - 1) + 1
        for name in ("keys", "values"):
            row = col.take(col.rows_of(getattr(self, name), idx, idx + 1), 0, single.size())
            setattr(single, name, col.laid([(0, 0, row)], 1, single.size()))
        return single

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchSinkRing:
        batch = batch_of(cls, caches)
        batch.single_class = type(caches[0])
        batch._tokens = [cache.offset for cache in caches]
        batch._lay(enumerate(caches), batch._used(), batch._columns_of)
        return batch

    def _columns_of(self, cache: Any, side: Side) -> list[tuple[int, Side]]:
        """Return (column, view) pairs that place one sequence's window in the batch's layout."""
        if cache.offset == 0:
            return []
        ordered = cache._in_order(side)
        if cache.offset <= self.max_size:
            return col.spread(0, ordered)
        ring = self.max_size - self.keep
        oldest = self._slot(cache.offset - ring)
        placed: list[tuple[int, Side]] = []
        for index, part in col.spread(0, ordered):
            count = col.columns(part)
            if index < self.keep:
                placed.append((index, part))
                continue
            column = self.keep + (oldest - self.keep + index - self.keep) % ring
            head = min(count, self.max_size - column)
            placed.append((column, col.take(part, 0, head)))
            if head < count:
                placed.append((self.keep, col.take(part, head, count)))
        return placed


class BatchSinkRotatingKVCache(BatchSinkRing):
    row_classes = (SinkRotatingKVCache, RotatingKVCache)
    single_class = SinkRotatingKVCache


def _row(sides: tuple[Side, Side], row: int, start: int, stop: int) -> tuple[Side, Side]:
    keys, values = (col.take(col.rows_of(side, row, row + 1), start, stop) for side in sides)
    return keys, values


BatchRotatingKVCache.keeping_class = BatchSinkRotatingKVCache
SinkRotatingKVCache.batch_class = BatchSinkRotatingKVCache
