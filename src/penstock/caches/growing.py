"""Unbounded caches of full-attention layers, for one sequence or a left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from penstock.caches.base import LayerCache, Padded, agree, batch_of
from penstock.caches.masks import Mask, causal, plain
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints, positive, whole
from penstock.kv.columns import Side


class Growing(LayerCache):
    """Base class of caches of one sequence that keep every token."""

    batch_class: ClassVar[type[BatchGrowing]]
    offset: int

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = None if capacity is None else positive("capacity", capacity)
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Append tokens and return views of all columns, valid until the next update.

        Args:
            keys: keys of the tokens, (batch, kv_heads, tokens, head_dim).
            values: values of the tokens, of the same shape except for head_dim.

        Raises:
            TypeError, ValueError: wrong rank, dtype, heads or dims; the cache is unchanged.
        """
        end = self.offset + self._accept(keys, values)
        new = self._encode(keys, values)
        self._make_room(end, self.offset, new)
        self._write(self.offset, new)
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Side, Side]:
        keys, values = self._held()
        return col.take(keys, 0, self.offset), col.take(values, 0, self.offset)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        return plain(N, self.offset, window_size, return_array)

    def size(self) -> int:
        return self.offset

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self.offset, whole("n", n, 0))
        self.offset -= n
        return n

    def _state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset

    def _restore(self, state: Sequence[Any]) -> None:
        *sides, self.offset = state
        super()._restore(sides)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchGrowing:
        return cls.batch_class.merge(caches)


class KVCache(Growing):
    """Keys and values of one sequence, never dropped; a drop-in for mlx-lm's `KVCache`.

    With `capacity` (tokens), the first update allocates buffers of this size, and later updates
    write in place; the buffers grow only if the sequence exceeds the capacity. Without `capacity`
    they grow by a quarter at a time; `growths` counts how often.

    >>> cache = KVCache(capacity=512)
    >>> k, v = cache.update_and_fetch(mx.zeros((1, 2, 5, 64)), mx.zeros((1, 2, 5, 64)))
    >>> k.shape[2], cache.capacity, cache.growths
    (5, 512, 0)
    """

    quantized_class: ClassVar[Any]

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Return a `QuantizedKVCache` with the same tokens and capacity; evaluated."""
        return self.quantized_class.holding(self, group_size, bits)


class BatchGrowing(Padded):
    """A left-padded batch that keeps every token, in the layout of mlx-lm's `BatchKVCache`.

    All rows end in the same column. `merge`, `filter` and `extend` allocate buffers of exactly the
    columns in use.
    """

    single_class: ClassVar[type[Growing]]
    _right_padding: list[int] | None = None
    _idx: int

    def __init__(self, left_padding: Sequence[int], capacity: int | None = None) -> None:
        self._capacity = None if capacity is None else positive("capacity", capacity)
        self._pad(left_padding)
        self._idx = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        tokens = self._accept(keys, values)
        new = self._encode(keys, values)
        self._make_room(self._idx + tokens, self._idx, new)
        self._write(self._idx, new)
        self._idx += tokens
        self._tokens = [position + tokens for position in self._tokens]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Side, Side]:
        keys, values = self._held()
        return col.take(keys, 0, self._idx), col.take(values, 0, self._idx)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        return causal(N, self._idx, window_size, self.left_padding)

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
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = ints(right_padding)

    def finalize(self) -> None:
        """Turn right padding into left padding, so that all rows end together."""
        shifts, self._right_padding = self._right_padding, None
        if shifts is None or self.empty():
            return
        keys, values = self._held()
        self.keys = col.write(keys, 0, col.rolled(col.take(keys, 0, self._idx), shifts))
        self.values = col.write(values, 0, col.rolled(col.take(values, 0, self._idx), shifts))
        self._turned(shifts)

    def size(self) -> int:
        return self._idx

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop up to `n` of the last columns of every row; return the number dropped.

        As in mlx-lm, rows with fewer than `n` tokens become empty.
        """
        n = min(self._idx, whole("n", n, 0))
        self._idx -= n
        self._tokens = [position - n for position in self._tokens]
        return n

    def _state(self) -> tuple[Any, ...]:
        return *super()._state(), self.offset, self.left_padding, self._idx

    def _restore(self, state: Sequence[Any]) -> None:
        *sides, tokens, pads, self._idx = state
        super()._restore(sides)
        self._tokens, self._pads = ints(tokens), ints(pads)

    def filter(self, batch_indices: Any) -> None:
        """Keep only the given rows, in that order; drop columns that are padding in all of them."""
        rows = chosen_rows(batch_indices, len(self._tokens))
        self._choose(rows)
        spare = max(0, min(self._pads))
        self._pick(rows, spare, self._idx)
        self._idx -= spare
        self._pads = [pad - spare for pad in self._pads]

    def extend(self, other: Any) -> None:
        """Append the rows of `other`; the shorter batch is left-padded."""
        agree("extend", [self, other])
        end = max(self._idx, other._idx)
        self._join(
            other, end, lambda batch, side: [(end - batch._idx, col.take(side, 0, batch._idx))]
        )
        self._pads = [pad + end - batch._idx for batch in (self, other) for pad in batch._pads]
        self._idx = end
        self._repacked()

    def extract(self, idx: int) -> Growing:
        single = self._sibling(self.single_class)
        start = max(0, self._pads[idx])
        single.offset = max(0, self._idx - start)
        for name in ("keys", "values"):
            side = getattr(self, name)
            if side is not None and single.offset:
                row = col.take(col.rows_of(side, idx, idx + 1), start, self._idx)
                setattr(single, name, col.laid([(0, 0, row)], 1, single.offset))
        return single

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchGrowing:
        """Return a left-padded batch of copies of the sequences."""
        batch = batch_of(cls, caches)
        batch._tokens = [cache.size() for cache in caches]
        batch._idx = max(batch._tokens)
        batch._pads = [batch._idx - length for length in batch._tokens]
        batch._lay(
            ((row, cache) for row, cache in enumerate(caches) if cache.size()),
            batch._idx,
            lambda cache, side: [(batch._idx - cache.size(), col.take(side, 0, cache.size()))],
        )
        return batch


class BatchKVCache(BatchGrowing):
    """Keys and values of a left-padded batch; a drop-in for mlx-lm's `BatchKVCache`.

    With `capacity` (columns), the first update allocates the buffers once.
    """


KVCache.batch_class = BatchKVCache
BatchKVCache.single_class = KVCache
