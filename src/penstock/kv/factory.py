"""The one place where a model's caches are made, and where the bound is put on all of them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from penstock.config import KEEP, MAX_KV_SIZE
from penstock.errors import SettingError
from penstock.kv.base import LayerCache
from penstock.kv.checks import positive, whole
from penstock.kv.quantized import QuantizedRotatingKVCache
from penstock.kv.rotating import Ring, RotatingKVCache
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
            sliding-window layers keep their own window if it is smaller; the chunks of chunked
            layers (Llama 4) get no larger; recurrent layers, which do not grow, stay.
        keep: The first tokens that a full-attention layer never drops. Where it is not smaller
            than `max_kv_size`, half of that.
        kv_bits: Quantise keys and values to 2, 3, 4, 5, 6 or 8 bits; None leaves them.
        capacity: Tokens the request can use, prompt and answer: so many columns are allocated,
            once. None starts small and grows by a quarter at a time.
        kv_group_size: Neighbours that share a scale when quantised: 32, 64 or 128.

    Raises:
        TypeError, ValueError: a size that is no integer, or out of range.
        SettingError: a layer's cache is of a kind that cannot be bounded.
    """
    size, kept = positive("max_kv_size", max_kv_size), whole("keep", keep, 0)
    room = LayerCache.step if capacity is None else positive("capacity", capacity)
    shared = _reads_other_layers(model)

    def full() -> Ring:
        if kv_bits is not None:
            return QuantizedRotatingKVCache(
                size, _clipped(kept, size), kv_group_size, kv_bits, room
            )
        if kept:
            return SinkRotatingKVCache(size, _clipped(kept, size), room)
        return RotatingKVCache(size, capacity=room)

    def sliding(window: int, kept: int) -> Ring:
        if kv_bits is not None:
            window = min(window, size)
            return QuantizedRotatingKVCache(
                window, _clipped(kept, window), kv_group_size, kv_bits, room
            )
        if window <= size:
            return RotatingKVCache(window, kept, room)
        # The model goes on asking for masks of its own, wider window.
        return SinkRotatingKVCache(size, _clipped(kept, size), room)

    def bounded(cache: Any) -> Any:
        if hasattr(cache, "caches"):  # CacheList
            return type(cache)(*(bounded(part) for part in cache.caches))
        if hasattr(cache, "cache"):  # ArraysCache: recurrent
            return cache
        if hasattr(cache, "chunk_size"):  # ChunkedKVCache
            cache.chunk_size = min(cache.chunk_size, size)
            return cache
        if not hasattr(cache, "update_and_fetch"):
            raise SettingError(
                f"this model's {type(cache).__module__}.{type(cache).__name__} cannot be bounded; "
                f"use the model's own make_cache()"
            )
        ours = sliding(cache.max_size, cache.keep) if hasattr(cache, "max_size") else full()
        ours.read_by_others = shared
        return ours

    if hasattr(model, "make_cache"):
        return [bounded(cache) for cache in model.make_cache()]
    return [full() for _ in model.layers]


def _clipped(keep: int, size: int) -> int:
    """Return `keep`, or half of a window that has no room for it."""
    return keep if keep < size else size // 2


def _reads_other_layers(model: Any) -> bool:
    """Tell whether some layers read another one's cache after its update: `keys_and_values()`.

    Nothing in a model or its config says so for all of them, the model's code does.
    """
    files = {type(module).__module__ for _, module in model.named_modules()}
    return any(
        "keys_and_values()" in inspect.getsource(sys.modules[name])
        for name in files
        if name.startswith("mlx_lm.models.") and name != "mlx_lm.models.cache"
    )
