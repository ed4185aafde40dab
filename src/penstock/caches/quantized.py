"""Caches with affine quantization (`mx.quantize`), as in mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from penstock.caches.base import LayerCache, check_floating
from penstock.caches.growing import BatchGrowing, Growing, KVCache
from penstock.caches.rotating import Ring, RotatingKVCache
from penstock.caches.sinks import BatchSinkRing, SinkRing
from penstock.kv import columns as col
from penstock.kv.checks import one_of
from penstock.kv.columns import Side

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


class Quantized(LayerCache):
    """Base class of caches that store (codes, scales, biases), a scale per `group_size` values.

    mlx-lm's attention uses `mx.quantized_matmul` for caches with a `bits` attribute. A token of a
    head takes head_dim * bits / 8 bytes of codes, and 2 * head_dim / group_size numbers of the
    model's dtype, for keys and again for values.
    """

    group_size: int
    bits: int

    def _set_width(self, group_size: object, bits: object) -> None:
        self.group_size = one_of("group_size", group_size, GROUP_SIZES)
        self.bits = one_of("bits", bits, BITS)

    def _encode(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        return self._quantize(keys), self._quantize(values)

    def _quantize(self, part: mx.array) -> Side:
        return tuple(mx.quantize(part, group_size=self.group_size, bits=self.bits))

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None:
        check_floating(name, dtype)

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        for name, width in (("keys", key_width), ("values", value_width)):
            if width % self.group_size:
                fitting = [size for size in GROUP_SIZES if width % size == 0]
                raise ValueError(
                    f"the head_dim of {name} is {width}, not a multiple of group_size "
                    f"{self.group_size}; {f'use {fitting[-1]}' if fitting else 'none fits'}"
                )

    def _held_shape(self) -> tuple[Any, ...] | None:
        if self.keys is None or self.values is None:
            return None
        scales = [col.arrays(side)[1] for side in (self.keys, self.values)]
        widths = [part.shape[3] * self.group_size for part in scales]
        return (*scales[0].shape[:2], *widths, *(part.dtype for part in scales))

    def _state(self) -> tuple[Any, ...]:
        return *super()._state(), self.group_size, self.bits

    def _restore(self, state: Sequence[Any]) -> None:
        *plain, self.group_size, self.bits = state
        super()._restore(plain)

    def _take_over(self, cache: Growing | Ring) -> None:
        """Quantize the columns of an unquantized cache to buffers of the same capacity.

        Keys are evaluated before values, so that only one unquantized copy is alive.
        """
        keys, values = (col.arrays(side)[0] for side in cache._held())
        for name, part in (("keys", keys), ("values", values)):
            self._accept_dtype(name, part.dtype)
        self._accept_widths(keys.shape[3], values.shape[3])
        for name in ("keys", "values"):
            raw = col.take(getattr(cache, name), 0, cache.size())
            assert isinstance(raw, mx.array)
            new = self._quantize(raw)
            buffers = col.write(col.blank(new, cache.capacity), 0, new)
            mx.eval(col.arrays(buffers))
            setattr(self, name, buffers)
        self.allocated(cache.capacity)


class QuantizedKVCache(Quantized, Growing):
    """Quantized keys and values of one sequence; a drop-in for mlx-lm's `QuantizedKVCache`.

    Args:
        group_size: number of values that share a scale: 32, 64 or 128, a divisor of the head size.
        bits: bits per value: 2, 3, 4, 5, 6 or 8.
        capacity: see `KVCache`.
    """

    carried: ClassVar[tuple[str, ...]] = ("group_size", "bits")

    def __init__(self, group_size: int = 64, bits: int = 8, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._set_width(group_size, bits)

    @classmethod
    def holding(cls, cache: Growing, group_size: int, bits: int) -> QuantizedKVCache:
        quantized = cls(group_size, bits, cache._capacity)
        if not cache.empty():
            quantized._take_over(cache)
            quantized.offset = cache.offset
        return quantized


class BatchQuantizedKVCache(Quantized, BatchGrowing):
    carried: ClassVar[tuple[str, ...]] = ("group_size", "bits")

    def __init__(
        self,
        left_padding: Sequence[int],
        group_size: int = 64,
        bits: int = 8,
        capacity: int | None = None,
    ) -> None:
        super().__init__(left_padding, capacity)
        self._set_width(group_size, bits)


class QuantizedRotatingKVCache(Quantized, SinkRing):
    """A quantized bounded window of one sequence; see `RotatingKVCache.to_quantized`.

    The first `keep` tokens are visible to every query, as in `SinkRotatingKVCache`.
    """

    carried: ClassVar[tuple[str, ...]] = (*Ring.carried, "group_size", "bits")

    def __init__(
        self,
        max_size: int,
        keep: int = 0,
        group_size: int = 64,
        bits: int = 8,
        capacity: int | None = None,
    ) -> None:
        super().__init__(max_size, keep, capacity)
        self._set_width(group_size, bits)

    @classmethod
    def holding(cls, cache: Ring, group_size: int, bits: int) -> QuantizedRotatingKVCache:
        quantized = cls(cache.max_size, cache.keep, group_size, bits, cache._capacity)
        if not cache.empty():
            quantized._take_over(cache)
            quantized.offset, quantized._idx = cache.offset, cache._idx
        quantized.read_by_others = cache.read_by_others
        return quantized


class BatchQuantizedRotatingKVCache(Quantized, BatchSinkRing):
    carried: ClassVar[tuple[str, ...]] = (*Ring.carried, "group_size", "bits")
    row_classes = (QuantizedRotatingKVCache,)
    single_class = QuantizedRotatingKVCache

    def __init__(
        self, max_size: int, keep: int, rows: int, group_size: int = 64, bits: int = 8
    ) -> None:
        super().__init__(max_size, keep, rows)
        self._set_width(group_size, bits)


QuantizedKVCache.batch_class = BatchQuantizedKVCache
BatchQuantizedKVCache.single_class = QuantizedKVCache
QuantizedRotatingKVCache.batch_class = BatchQuantizedRotatingKVCache
KVCache.quantized_class = QuantizedKVCache
RotatingKVCache.quantized_class = QuantizedRotatingKVCache
