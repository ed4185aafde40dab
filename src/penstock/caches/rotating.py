"""Bounded windows: the first `keep` tokens and the most recent ones, in a ring buffer.

The columns from `keep` on form the ring: the next token overwrites the oldest, in column `_idx`.
Buffers are written in place. Only a chunk that overflows the window needs a copy of the columns it
attends to, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from penstock.caches.base import Bounded, Padded, agree, batch_of, ends_of
from penstock.caches.masks import Mask, by_position, causal
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints, positive, whole, window
from penstock.kv.columns import Side


class Ring(Bounded):
    """The window of one sequence, in the layout of mlx-lm's `RotatingKVCache`."""

    carried: ClassVar[tuple[str, ...]] = ("max_size", "keep")
    batch_class: ClassVar[Any]
    offset: int
    keep: int
    _idx: int

    def __init__(self, max_size: int, keep: int = 0, capacity: int | None = None) -> None:
        self.max_size, self.keep = window(max_size, keep)
        self._capacity = None if capacity is None else positive("capacity", capacity)
        self.offset = self._idx = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Write tokens, and return the columns that they may attend to, subject to `make_mask`.

        Args:
            keys: keys of the tokens, (batch, kv_heads, tokens, head_dim).
            values: values of the tokens, of the same shape except for head_dim.

        Returns:
            Keys and values of the window, in ring order, for one token; in order of position, and
            up to max_size - 1 + tokens columns, for a chunk.

        Raises:
            TypeError, ValueError: wrong rank, dtype, heads or dims; the cache is unchanged.
        """
        tokens = self._accept(keys, values)
        new = self._encode(keys, values)
        self._chunk = None
        if self.offset + tokens <= self.max_size:
            self._make_room(self.offset + tokens, self.offset, new)
            self._idx = self.offset
        elif tokens == 0:
            return self.keys_and_values()
        elif tokens > 1:
            return self._update_past_end(new, tokens)
        else:
            self._idx = self._oldest()
        self._write(self._idx, new)
        self.offset += tokens
        self._idx += tokens
        return self.keys_and_values()

    def _update_past_end(self, new: tuple[Side, Side], tokens: int) -> tuple[Side, Side]:
        """Write a chunk that overflows the window; return the columns visible to its queries."""
        fetched = joined(self._visible_past(), new)
        self._make_room(self.max_size, 0, new)
        count = col.columns(fetched[0])
        start = count - (self.max_size - self.keep)
        if self.offset < self.max_size and self.keep:
            self._write(0, _part(fetched, 0, self.keep))
        self._write(self.keep, _part(fetched, start, count))
        mx.eval(col.arrays(self.keys, self.values))
        self.offset += tokens
        self._idx = self.max_size
        return self._shown_to_others(fetched)

    def _visible_past(self) -> tuple[list[Side], list[Side]]:
        """Return views of the cached columns that a chunk's first query may see, by position."""
        if self.keys is None or self.values is None:
            return [], []
        full = self.offset >= self.max_size
        return self._in_order(self.keys, full), self._in_order(self.values, full)

    def _oldest(self) -> int:
        return self._idx if self._idx < self.max_size else self.keep

    def _in_order(self, side: Side, without_oldest: bool = False) -> list[Side]:
        """Return views of the columns in use, ordered by position."""
        spans = [(0, self.offset)]
        if self.offset >= self.max_size:
            oldest = self._oldest()
            spans = [(0, self.keep), (oldest + without_oldest, self.max_size), (self.keep, oldest)]
        return [col.take(side, start, stop) for start, stop in spans if stop > start]

    def keys_and_values(self) -> tuple[Side, Side]:
        """Return views of the columns in use, in ring order; see also `read_by_others`."""
        if self._chunk is not None:
            return self._chunk
        keys, values = self._held()
        used = self.offset
        if used >= self.max_size:
            return keys, values
        return col.take(keys, 0, used), col.take(values, 0, used)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return the mask for the next N tokens, the same as mlx-lm's `RotatingKVCache`.

        If a chunk overflows the window, each query sees the last max_size columns up to its own, so
        that kept tokens become invisible. See `SinkRotatingKVCache`.
        """
        if N == 1 and window_size is None:
            return None
        limit = window_size or self.max_size
        if N > 1:
            past = min(self.offset, self.max_size - 1)
            if past + N <= limit and not return_array:
                return "causal"
            return causal(N, past, limit)
        if limit >= self.max_size or self.offset < limit:
            return None
        position, query = self._positions_after_one(), mx.array([self.offset])
        return by_position(position, query, 0, limit)[0]

    def _positions_after_one(self) -> mx.array:
        """Return the position of the token in each column after writing one more token."""
        column = mx.arange(min(self.offset + 1, self.max_size))
        if self.offset < self.max_size:
            return column
        age = (self._oldest() - column) % (self.max_size - self.keep)
        return mx.where(column < self.keep, column, self.offset - age)

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def is_trimmable(self) -> bool:
        return self.offset < self.max_size

    def trim(self, n: int) -> int:
        """Drop up to `n` of the last tokens; return the number dropped.

        Returns 0 once the window is full, as overwritten tokens are gone.
        """
        if not self.is_trimmable():
            return 0
        n = min(self.offset, whole("n", n, 0))
        self.offset -= n
        self._idx = self.offset
        return n

    def _state(self) -> tuple[Any, ...]:
        self._chunk = None
        return self.keys, self.values, self.offset, self.keep, self.max_size, self._idx

    def _restore(self, state: Sequence[Any]) -> None:
        *sides, self.offset, self.keep, self.max_size, self._idx = state
        super()._restore(sides)
        if self.keys is None or self.values is None or self.capacity <= self.max_size:
            return
        # Saved by mlx-lm directly after a chunk: a buffer longer than the window, in order.
        self.keys, self.values = self._window_of(self.keys), self._window_of(self.values)
        self._idx = self.max_size

    def _window_of(self, side: Side) -> Side:
        """Copy the window from a buffer of `_idx` columns that is ordered by position."""
        recent = self._idx - (self.max_size - self.keep)
        spans = [(0, 0, self.keep), (self.keep, recent, self._idx)]
        parts = [
            (0, column, col.take(side, start, stop))
            for column, start, stop in spans
            if stop > start
        ]
        return col.laid(parts, col.arrays(side)[0].shape[0], self.max_size)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        return cls.batch_class.merge(caches)


class RotatingKVCache(Ring):
    """A bounded window of one sequence; a drop-in for mlx-lm's `RotatingKVCache`.

    The first update allocates `max_size` columns, which are then written in place. The first
    `keep` tokens are never dropped. With `capacity` (tokens that a request is expected to use),
    fewer columns are allocated at first, and the buffers grow only if the request uses more.

    >>> cache = RotatingKVCache(max_size=8, keep=2)
    >>> for n in (5, 20, 1, 1):
    ...     k, v = cache.update_and_fetch(mx.zeros((1, 2, n, 64)), mx.zeros((1, 2, n, 64)))
    >>> cache.keys.shape[2], cache.offset, cache.growths
    (8, 27, 0)
    """

    quantized_class: ClassVar[Any]

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Return a `QuantizedRotatingKVCache` with the same window; evaluated."""
        return self.quantized_class.holding(self, group_size, bits)


class BatchRotatingKVCache(Bounded, Padded):
    """Bounded windows of a left-padded batch; a drop-in for mlx-lm's `BatchRotatingKVCache`.

    The first update allocates `max_size` columns per row. All rows share the ring column `_idx`.
    Padding counts as the oldest tokens of a row, and is overwritten first. Caches with `keep` are
    merged into a `BatchSinkRotatingKVCache` instead.
    """

    carried: ClassVar[tuple[str, ...]] = ("max_size",)
    single_class: ClassVar[type[RotatingKVCache]] = RotatingKVCache
    keeping_class: ClassVar[Any]
    _ends: list[int] | None = None

    def __init__(self, max_size: int, left_padding: Sequence[int]) -> None:
        self.max_size, _ = window(max_size, 0)
        self._pad(left_padding)
        self._idx = self._offset = 0
        self.rotated = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        tokens = self._accept(keys, values)
        new = self._encode(keys, values)
        self._chunk = None
        self._turn_padding()
        if not self.rotated and self._idx + tokens <= self.max_size:
            self._make_room(self._idx + tokens, self._idx, new)
        elif tokens == 0:
            return self.keys_and_values()
        elif tokens > 1 or self._ends is not None:
            return self._update_past_end(new, tokens)
        else:
            self._pads = [pad - 1 for pad in self._pads]
            self._idx %= self.max_size
            self.rotated = True
        self._write(self._idx, new)
        self._idx += tokens
        self._offset += tokens
        self._tokens = [position + tokens for position in self._tokens]
        return self.keys_and_values()

    def _update_past_end(self, new: tuple[Side, Side], tokens: int) -> tuple[Side, Side]:
        dropped = self._used() + tokens - self.max_size
        fetched = joined(self._visible_past(), new)
        self._tokens = [position + tokens for position in self._tokens]
        shifts = self._surplus()
        self._make_room(self.max_size, 0, new)
        self.keys = self._hold(self.keys, fetched[0], shifts)
        self.values = self._hold(self.values, fetched[1], shifts)
        self._turned(shifts)
        self._pads = [pad - dropped for pad in self._pads]
        self._idx, self.rotated = self.max_size, False
        self._offset += tokens
        return self._shown_to_others(fetched)

    def _visible_past(self) -> tuple[list[Side], list[Side]]:
        if self.keys is None or self.values is None:
            return [], []
        full = self._used() == self.max_size
        return self._in_order(self.keys, full), self._in_order(self.values, full)

    def _hold(self, side: Side | None, fetched: Side, shifts: list[int]) -> Side:
        """Write the last max_size columns to `side`, with right padding moved to the front."""
        assert side is not None
        count = col.columns(fetched)
        if any(shifts):
            fetched = col.rolled(fetched, shifts)
        side = col.write(side, 0, col.take(fetched, count - self.max_size, count))
        mx.eval(col.arrays(side))
        return side

    def _surplus(self) -> list[int]:
        if self._ends is None:
            return [0] * len(self._tokens)
        return [
            max(0, position - end) for position, end in zip(self._tokens, self._ends, strict=True)
        ]

    def _turn_padding(self) -> None:
        shifts = self._surplus()
        if not any(shifts):
            return
        keys, values = self._held()
        self.keys = col.write(keys, 0, col.rolled(col.take(keys, 0, self._idx), shifts))
        self.values = col.write(values, 0, col.rolled(col.take(values, 0, self._idx), shifts))
        self._turned(shifts)

    def _used(self) -> int:
        return self.max_size if self.rotated else self._idx

    def _in_order(self, side: Side, without_oldest: bool = False) -> list[Side]:
        oldest = self._idx % self.max_size if self.rotated else 0
        spans = [(oldest + without_oldest, self._used()), (0, oldest)]
        return [col.take(side, start, stop) for start, stop in spans if stop > start]

    def keys_and_values(self) -> tuple[Side, Side]:
        if self._chunk is not None:
            return self._chunk
        if self._used() == self.max_size:
            return self._held()
        return _part(self._held(), 0, self._idx)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return the mask for the next N tokens, (batch, 1, N, columns), the same as mlx-lm's.

        After single tokens have wrapped around, a chunk's mask hides one column too many in rows
        that still hold padding, as mlx-lm's tests require.
        """
        chunk = N > 1 or self._ends is not None
        turning = not chunk and (self.rotated or self._idx >= self.max_size)
        dropped = turning + max(0, self._idx - self.max_size + chunk)
        past = min(self._offset, self.max_size - 1)
        pads = self.left_padding - dropped
        mask = causal(N, past, window_size or self.max_size, pads)
        return mx.roll(mask, self._idx % self.max_size + 1, -1) if turning else mask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce the padding of the next prompts; after right padding `finalize` must follow."""
        if left_padding is not None:
            self._pad_more(left_padding)
        self._ends = ends_of(self._tokens, lengths, right_padding)

    def finalize(self) -> None:
        self._turn_padding()
        self._ends = None

    def size(self) -> int:
        """Return the number of columns written, at most max_size."""
        return min(self._offset, self.max_size)

    def is_trimmable(self) -> bool:
        return self._offset < self.max_size

    def trim(self, n: int) -> int:
        if not self.is_trimmable():
            return 0
        n = min(self._offset, whole("n", n, 0))
        self._offset -= n
        self._idx -= n
        self._tokens = [position - n for position in self._tokens]
        return n

    def _state(self) -> tuple[Any, ...]:
        rows = (self.offset, self.left_padding)
        return *super()._state(), *rows, self.max_size, self._offset, self._idx, self.rotated

    def _restore(self, state: Sequence[Any]) -> None:
        *sides, tokens, pads, self.max_size, self._offset, self._idx, rotated = state
        super()._restore(sides)
        self._tokens, self._pads, self.rotated = ints(tokens), ints(pads), bool(rotated)
        surplus = self._idx - self.max_size
        if self.keys is None or self.values is None or surplus <= 0:
            return
        # Saved by mlx-lm directly after a chunk: a buffer longer than the window, in order.
        window = _part((self.keys, self.values), surplus, self._idx)
        self.keys, self.values = (
            col.resized(side, self.max_size, self.max_size) for side in window
        )
        self._pads = [pad - surplus for pad in self._pads]
        self._idx = self.max_size

    def filter(self, batch_indices: Any) -> None:
        rows = chosen_rows(batch_indices, len(self._tokens))
        self._choose(rows)
        self._pick(rows, 0, self._used())

    def extend(self, other: Any) -> None:
        agree("extend", [self, other])
        end = max(self._used(), other._used())
        pads = [pad + end - batch._used() for batch in (self, other) for pad in batch._pads]
        self._join(
            other,
            end,
            lambda batch, side: col.spread(end - batch._used(), batch._in_order(side)),
        )
        self._pads = pads
        self._idx, self.rotated = end, False
        self._offset = max(self._offset, other._offset)
        self._repacked()

    def extract(self, idx: int) -> RotatingKVCache:
        """Return a copy of one row as a cache of its own, ordered by position, without padding."""
        single = self._sibling(self.single_class)
        start = max(0, self._pads[idx])
        count = max(0, self._used() - start)
        single.keep, single.offset, single._idx = 0, self._tokens[idx] if count else 0, count
        for name in ("keys", "values"):
            side = getattr(self, name)
            if side is not None and count:
                row = col.join(*self._in_order(col.rows_of(side, idx, idx + 1)))
                parts = [(0, 0, col.take(row, start, start + count))]
                setattr(single, name, col.laid(parts, 1, count))
        return single

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """Return a left-padded batch of copies of the windows."""
        if any(cache.keep for cache in caches):
            return cls.keeping_class.merge(caches)
        batch = batch_of(cls, caches)
        lengths = [cache.size() for cache in caches]
        batch._idx = batch._offset = max(lengths)
        batch._pads = [batch._idx - length for length in lengths]
        batch._tokens = [cache.offset for cache in caches]
        batch.rotated = False
        batch._lay(
            ((row, cache) for row, cache in enumerate(caches) if cache.size()),
            batch._idx,
            lambda cache, side: col.spread(batch._idx - cache.size(), cache._in_order(side)),
        )
        return batch


def joined(past: tuple[list[Side], list[Side]], new: tuple[Side, Side]) -> tuple[Side, Side]:
    """Concatenate cached and new columns, for keys and for values; evaluated.

    The new columns are evaluated first, which completes the previous layer and frees its copy.
    The result is evaluated before the caller writes to the ring, as views that are still needed
    would make the write copy the ring, in every layer.
    """
    mx.eval(col.arrays(*new))
    fetched = (
        col.join(*past[0], new[0]) if past[0] else new[0],
        col.join(*past[1], new[1]) if past[1] else new[1],
    )
    mx.eval(col.arrays(*fetched))
    return fetched


def _part(sides: tuple[Side, Side], start: int, stop: int) -> tuple[Side, Side]:
    return col.take(sides[0], start, stop), col.take(sides[1], start, stop)


Ring.batch_class = BatchRotatingKVCache
