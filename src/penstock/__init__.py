"""LLM serving on MLX inside a fixed amount of memory: an engine, and caches for mlx-lm.

The names below load on first use, so that `import penstock` costs milliseconds and the command line
answers at once. Only a fast BLAS is loaded with `import penstock` on a Linux CPU, because it must
come before the import of `mlx.core` (see `penstock.blas`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

from penstock import blas as _blas
from penstock import errors as _errors

_blas.load_blas()

if TYPE_CHECKING:
    from penstock.caches import (
        BatchKVCache,
        BatchQuantizedKVCache,
        BatchQuantizedRotatingKVCache,
        BatchRotatingKVCache,
        BatchSinkRotatingKVCache,
        BatchTurboQuantKVCache,
        KVCache,
        KVCacheManager,
        QuantizedKVCache,
        QuantizedRotatingKVCache,
        RotatingKVCache,
        SelectiveKVCache,
        SinkRotatingKVCache,
        TurboQuantKVCache,
        load_prompt_cache,
        make_kv_cache,
        save_prompt_cache,
    )
    from penstock.caches.prefix_cache import PrefixCache
    from penstock.engine.engine import Engine
    from penstock.engine.request import Request, Sampling
    from penstock.errors import (
        CacheFileError,
        Displaced,
        EngineStopped,
        GrammarFailed,
        LedgerFull,
        ModelError,
        NeverFits,
        PenstockError,
        PoolFull,
        QueueFull,
        SequenceOverflow,
        SettingError,
        StepFailed,
        StepTooLarge,
        UnknownSequence,
        WrongType,
    )
    from penstock.models.layer_seams import attach
    from penstock.models.loading import load

__all__ = [
    "BatchKVCache",
    "BatchQuantizedKVCache",
    "BatchQuantizedRotatingKVCache",
    "BatchRotatingKVCache",
    "BatchSinkRotatingKVCache",
    "BatchTurboQuantKVCache",
    "CacheFileError",
    "Displaced",
    "Engine",
    "EngineStopped",
    "GrammarFailed",
    "KVCache",
    "KVCacheManager",
    "LedgerFull",
    "ModelError",
    "NeverFits",
    "PenstockError",
    "PoolFull",
    "PrefixCache",
    "QuantizedKVCache",
    "QuantizedRotatingKVCache",
    "QueueFull",
    "Request",
    "RotatingKVCache",
    "Sampling",
    "SelectiveKVCache",
    "SequenceOverflow",
    "SettingError",
    "SinkRotatingKVCache",
    "StepFailed",
    "StepTooLarge",
    "TurboQuantKVCache",
    "UnknownSequence",
    "WrongType",
    "__version__",
    "attach",
    "load",
    "load_prompt_cache",
    "make_kv_cache",
    "save_prompt_cache",
]

_HOMES = {
    "attach": "penstock.models.layer_seams",
    "load": "penstock.models.loading",
    "PrefixCache": "penstock.caches.prefix_cache",
    "Engine": "penstock.engine.engine",
    "Request": "penstock.engine.request",
    "Sampling": "penstock.engine.request",
}
"""Modules of the names that are neither in penstock.errors nor in penstock.caches."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    home = _HOMES.get(name, "penstock.errors" if hasattr(_errors, name) else "penstock.caches")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
