"""Key/value caches with a bound, pre-allocated, for mlx-lm's models. Useful without the rest."""

from penstock.kv.factory import make_kv_cache
from penstock.kv.files import load_prompt_cache, save_prompt_cache
from penstock.kv.growing import BatchKVCache, KVCache
from penstock.kv.pool import KVCacheManager
from penstock.kv.quantized import (
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    QuantizedKVCache,
    QuantizedRotatingKVCache,
)
from penstock.kv.rotating import BatchRotatingKVCache, RotatingKVCache
from penstock.kv.sinks import BatchSinkRotatingKVCache, SinkRotatingKVCache
from penstock.kv.turboquant import BatchTurboQuantKVCache, TurboQuantKVCache

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
    "SinkRotatingKVCache",
    "TurboQuantKVCache",
    "load_prompt_cache",
    "make_kv_cache",
    "save_prompt_cache",
]
