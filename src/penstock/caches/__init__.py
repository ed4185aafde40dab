"""Bounded, pre-allocated key/value caches for mlx-lm's models; usable without the engine."""

from penstock.caches.codec import BatchTurboQuantKVCache, TurboQuantKVCache
from penstock.caches.factory import make_kv_cache
from penstock.caches.files import load_prompt_cache, save_prompt_cache
from penstock.caches.growing import BatchKVCache, KVCache
from penstock.caches.pool import KVCacheManager
from penstock.caches.quantized import (
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    QuantizedKVCache,
    QuantizedRotatingKVCache,
)
from penstock.caches.rotating import BatchRotatingKVCache, RotatingKVCache
from penstock.caches.selective import SelectiveKVCache
from penstock.caches.sinks import BatchSinkRotatingKVCache, SinkRotatingKVCache

__all__ = [
    "BatchKVCache",
    "BatchQuantizedKVCache",
    "BatchQuantizedRotatingKVCache",
    "BatchRotatingKVCache",
    "BatchSinkRotatingKVCache",
    "BatchTurboQuantKVCache",
    "KVCache",
    "KVCacheManager",
    "QuantizedKVCache",
    "QuantizedRotatingKVCache",
    "RotatingKVCache",
    "SelectiveKVCache",
    "SinkRotatingKVCache",
    "TurboQuantKVCache",
    "load_prompt_cache",
    "make_kv_cache",
    "save_prompt_cache",
]
