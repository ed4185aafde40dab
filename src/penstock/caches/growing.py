"""Caches of full-attention layers without a window: one sequence, or a left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from penstock.caches import masks
from penstock.caches.base import LayerCache, Padded, agree, batch_of
from penstock.caches.masks import Mask
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints, positive, whole
from penstock.kv.columns import Side


class Growing(LayerCache):
    """One sequence; every token stays. The layout of `KVCache` and `QuantizedKVCache`."""

    batch_class: ClassVar[type[BatchGrowing]]
    offset: int

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = None if capacity is None else positive("capacity", capacity)
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Write the tokens at the end and return all there are.

        keys, values: (batch, kv_heads, tokens, head_dim). Returns views of the buffers,
        good until the next update.

        Raises:
            TypeError, ValueError: wrong rank, dtype, heads or widths; the cache is unchanged.
        """
        end = self.offset + self._accept(keys, values)
        new = self._encode(keys, values)
        self._make_room(end, self.offset, new)
        self._write(self.offset, new)
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Side, Side]:
        """Return views of the columns in use."""
        keys, values = self._held()
        return col.take(keys, 0, self.offset), col.take(values, 0, self.offset)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return the mask for the next N tokens, in mlx-lm's form."""
        return masks.plain(N, self.offset, window_size, return_array)

    def size(self) -> int:
        """Count the tokens held."""
        return self.offset

    def is_trimmable(self) -> bool:
        """Tell whether `trim` works: always."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or as many as there are; return how many."""
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
        """Return a batch of copies of the sequences, in order."""
        return cls.batch_class.merge(caches)


class KVCache(Growing):
    """Keys and values of one sequence, every token kept; drops in for mlx-lm's `KVCache`.

    With `capacity` (tokens) the buffers are allocated once, by the first update, and every
    later write is in place; only a sequence that outgrows the hint makes them grow. Without
    it they grow by a quarter at a time, layer by layer, and `growths` counts how often.

    >>> cache = KVCache(capacity=512)
    >>> k, v = cache.update_and_fetch(mx.zeros((1, 2, 5, 64)), mx.zeros((1, 2, 5, 64)))
    >>> k.shape[2], cache.capacity, cache.growths
    (5, 512, 0)
    """

    quantized_class: ClassVar[Any]

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Return the same tokens as a `QuantizedKVCache` of the same capacity; evaluated."""
        return self.quantized_class.holding(self, group_size, bits)


class BatchGrowing(Padded):
    """A left-padded batch; every token stays. The layout of `BatchKVCache`.

    All rows end in the same column. `merge`, `filter` and `extend` leave buffers of exactly
    the columns in use.
    """

    single_class: ClassVar[type[Growing]]
    _right_padding: list[int] | None = None
    _idx: int

    def __init__(self, left_padding: Sequence[int], capacity: int | None = None) -> None:
        self._capacity = None if capacity is None else positive("capacity", capacity)
        self._pad(left_padding)
        self._idx = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Write one chunk for every row and return all columns in use.

        keys, values: (batch, kv_heads, tokens, head_dim). Returns views of the buffers,
        good until the next update.

        Raises:
            TypeError, ValueError: wrong rank, dtype, batch, heads or widths.
        """
        tokens = self._accept(keys, values)
        new = self._encode(keys, values)
        self._make_room(self._idx + tokens, self._idx, new)
        self._write(self._idx, new)
        self._idx += tokens
        self._tokens = [at + tokens for at in self._tokens]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Side, Side]:
        """Return views of the columns in use."""
        keys, values = self._held()
        return col.take(keys, 0, self._idx), col.take(values, 0, self._idx)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return (batch, 1, N, columns + N) for the next N tokens."""
        return masks.causal(N, self._idx, window_size, self.left_padding)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce how the next prompts are padded; on right padding `finalize` must follow.

        Raises:
            ValueError: left padding for a cache that already holds tokens.
        """
        if left_padding is not None:
            self._pad_more(left_padding)
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = ints(right_padding)

    def finalize(self) -> None:
        """Turn the announced right padding into left padding, so that all rows end together."""
        shifts, self._right_padding = self._right_padding, None
        if shifts is None or self.empty():
            return
        keys, values = self._held()
        self.keys = col.write(keys, 0, col.rolled(col.take(keys, 0, self._idx), shifts))
        self.values = col.write(values, 0, col.rolled(col.take(values, 0, self._idx), shifts))
        self._turned(shifts)

    def size(self) -> int:
        """Count the columns in use, padding included."""
        return self._idx

    def is_trimmable(self) -> bool:
        """Tell whether `trim` works: always."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` columns of every row, or as many as there are; return how many.

        As with mlx-lm, a row of fewer tokens is then left without any.
        """
        n = min(self._idx, whole("n", n, 0))
        self._idx -= n
        self._tokens = [at - n for at in self._tokens]
        return n

    def _state(self) -> tuple[Any, ...]:
        return *super()._state(), self.offset, self.left_padding, self._idx

    def _restore(self, state: Sequence[Any]) -> None:
        *sides, tokens, pads, self._idx = state
        super()._restore(sides)
        self._tokens, self._pads = ints(tokens), ints(pads)

    def filter(self, batch_indices: Any) -> None:
        """Keep the given rows, in the given order; columns that are padding in all go."""
        rows = chosen_rows(batch_indices, len(self._tokens))
        self._choose(rows)
        spare = max(0, min(self._pads))
        self._pick(rows, spare, self._idx)
        self._idx -= spare
        self._pads = [pad - spare for pad in self._pads]

    def extend(self, other: Any) -> None:
        """Append the rows of `other`; the shorter side is padded on the left.

        Raises:
            ValueError: the two differ in class, settings or shapes.
        """
        agree("extend", [self, other])
        end = max(self._idx, other._idx)
        self._join(
            other, end, lambda batch, side: [(end - batch._idx, col.take(side, 0, batch._idx))]
        )
        self._pads = [pad + end - batch._idx for batch in (self, other) for pad in batch._pads]
        self._idx = end
        self._repacked()

    def extract(self, idx: int) -> Growing:
        """Return a copy of one row as a cache of its own, without padding."""
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
        """Return a batch of copies of the sequences, ending in the same column.

        Raises:
            ValueError: no caches, or they differ in class, settings or shapes.
        """
        batch = batch_of(cls, caches)
        batch._tokens = [cache.size() for cache in caches]
        batch._idx = max(batch._tokens)
        batch._pads = [batch._idx - length for length in batch._tokens]
        for name in ("keys", "values"):
            parts = [
                (row, pad, col.take(getattr(cache, name), 0, length))
                for row, (cache, pad, length) in enumerate(
                    zip(caches, batch._pads, batch._tokens, strict=True)
                )
                if length
            ]
            if parts:
                setattr(batch, name, col.laid(parts, len(caches), batch._idx))
        return batch


class BatchKVCache(BatchGrowing):
    """Keys and values of a left-padded batch; drops in for mlx-lm's `BatchKVCache`.

    With `capacity` (columns) the buffers are allocated once, by the first update.
    """


KVCache.batch_class = BatchKVCache
BatchKVCache.single_class = KVCache
