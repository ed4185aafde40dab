"""The caches under test: how each is created, inspected and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from cache_reference import Visible, Window, columns, sinks

from penstock import caches

WIDTH = GROUP = 32


@dataclass(frozen=True)
class Kind:
    """One class of caches, together with the batch class it merges into."""

    name: str
    single: Callable[[], Any]
    window: Window = Window()
    batch: Callable[[list[int]], Any] | None = None
    """Makes an empty batch from a left padding; None: by merging empty sequences."""
    left_padded: bool = True
    """Whether batches may be padded on the left."""
    dtypes: tuple[mx.Dtype, ...] = (mx.float32, mx.int32)
    """What keys and values may be made of."""
    capacity: int | None = None
    """Columns allocated by the first update; None: those of the window, or whatever it takes."""

    def make_batch(self, left_padding: list[int]) -> Any:
        """Return an empty batch, padded on the left."""
        if self.batch is not None:
            return self.batch(left_padding)
        singles = [self.single() for _ in left_padding]
        batch = singles[0].merge(singles)
        if any(left_padding):
            batch.prepare(left_padding=left_padding)
        return batch


def rule_of(cache: Any) -> Visible:
    """Return the visibility rule of a single-sequence cache."""
    rotating = isinstance(cache, caches.RotatingKVCache)
    return columns if rotating and not isinstance(cache, caches.SinkRotatingKVCache) else sinks


def numbers(cache: Any, side: Any) -> mx.array:
    """Return one side of `update_and_fetch`'s result as an array, quantized or not."""
    if isinstance(side, mx.array):
        return side
    if side[0].shape[2] == 0:  # which MLX dequantizes to none that can be read
        return mx.zeros((*side[0].shape[:3], WIDTH))
    return mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits)


def growing(name: str, capacity: int | None = None) -> Kind:
    single = partial(caches.KVCache, capacity)
    return Kind(name, single, batch=caches.BatchKVCache, capacity=capacity)


def quantized(bits: int) -> Kind:
    single = partial(caches.QuantizedKVCache, GROUP, bits)
    return Kind(f"quantized-{bits}", single, dtypes=(mx.float32,))


def ring(name: str, cls: type, max_size: int, keep: int, *more: int) -> Kind:
    plain = issubclass(cls, caches.RotatingKVCache) and keep == 0
    batch = partial(caches.BatchRotatingKVCache, max_size) if plain else None
    single = partial(cls, max_size, keep, *more)
    dtypes = (mx.float32,) if more else Kind.dtypes
    return Kind(name, single, Window(max_size, keep), batch, left_padded=plain, dtypes=dtypes)


def shared_ring(max_size: int) -> Kind:
    def single() -> Any:
        cache = caches.RotatingKVCache(max_size)
        cache.read_by_others = True
        return cache

    return Kind("shared-ring", single, Window(max_size, 0))


def ring_with_capacity(max_size: int, keep: int, capacity: int) -> Kind:
    single = partial(caches.SinkRotatingKVCache, max_size, keep, capacity=capacity)
    window = Window(max_size, keep)
    return Kind("ring-with-capacity", single, window, left_padded=False, capacity=capacity)


KINDS = [
    growing("growing"),
    growing("growing-with-capacity", 24),
    quantized(8),
    quantized(3),
    ring("ring", caches.RotatingKVCache, 8, 0),
    shared_ring(8),
    ring("ring-of-1", caches.RotatingKVCache, 1, 0),
    ring("ring-keep", caches.RotatingKVCache, 9, 3),
    ring("ring-keep-all-but-1", caches.RotatingKVCache, 4, 3),
    ring("sink-ring", caches.SinkRotatingKVCache, 9, 3),
    ring_with_capacity(30, 4, 6),
    ring("quantized-ring", caches.QuantizedRotatingKVCache, 8, 0, GROUP, 8),
    ring("quantized-ring-keep", caches.QuantizedRotatingKVCache, 9, 3, GROUP, 4),
]
