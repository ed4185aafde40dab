"""The one place where a model's caches are made, and where the bound is put on all of them."""

from __future__ import annotations

from typing import Any

from penstock.config import KEEP, MAX_KV_SIZE
from penstock.kv.base import LayerCache, positive
from penstock.kv.quantized import QuantizedRotatingKVCache
from penstock.kv.rotating import RotatingKVCache, SharedRotatingKVCache
from penstock.kv.sinks import SinkRotatingKVCache


def make_kv_cache(
    model: Any,
    max_kv_size: int = MAX_KV_SIZE,
    keep: int = KEEP,
    kv_bits: int | None = None,
    capacity: int | None = None,
    *,
    kv_group_size: int = 64,
) -> list[Any]:
    """Make the caches of a model, one a layer, none of which ever holds more than `max_kv_size`.

    Args:
        model: A model of mlx-lm: its `make_cache()` is asked what each layer needs, or without
            one each of `layers` is taken for full attention.
        max_kv_size: The bound in tokens. Full-attention layers become windows of this size;
            sliding-window layers keep their own window if it is smaller; recurrent layers, and
            chunked ones (Llama 4), whose size does not grow, stay as they are.
        keep: The first tokens that a full-attention layer never drops. Where it is not smaller
            than `max_kv_size`, half of that.
        kv_bits: Quantise keys and values to 2, 3, 4, 5, 6 or 8 bits; None leaves them.
        capacity: Tokens the request can use, prompt and answer: so many columns are allocated,
            once. None starts small and grows by a quarter at a time.
        kv_group_size: Neighbours that share a scale when quantised: 32, 64 or 128.

    Raises:
        TypeError, ValueError: a size that is no integer, or out of range.
    """
    positive("max_kv_size", max_kv_size)
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise TypeError(f"keep must be an integer, not {keep!r}")
    if keep < 0:
        raise ValueError(f"keep must be at least 0, not {keep}")
    room = LayerCache.step if capacity is None else positive("capacity", capacity)
    shared = _reads_other_layers(model)

    def bounded(size: int, kept: int) -> Any:
        kept = kept if kept < size else size // 2
        if kv_bits is not None:
            return QuantizedRotatingKVCache(size, kept, kv_group_size, kv_bits, room)
        if kept:
            return SinkRotatingKVCache(size, kept, room)
        return (SharedRotatingKVCache if shared else RotatingKVCache)(size, capacity=room)

    def ours(cache: Any) -> Any:
        if hasattr(cache, "caches"):
            return type(cache)(*(ours(part) for part in cache.caches))
        if not hasattr(cache, "update_and_fetch") or hasattr(cache, "chunk_size"):
            return cache
        if hasattr(cache, "max_size") and cache.max_size <= max_kv_size:
            return bounded(cache.max_size, cache.keep)
        return bounded(max_kv_size, keep)

    if hasattr(model, "make_cache"):
        return [ours(cache) for cache in model.make_cache()]
    return [bounded(max_kv_size, keep) for _ in model.layers]


def _reads_other_layers(model: Any) -> bool:
    """Tell whether some layers read the cache of another one after it was updated (Gemma 3n)."""
    return any(getattr(module, "is_kv_shared_layer", False) for _, module in model.named_modules())
