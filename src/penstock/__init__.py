"""LLM serving on MLX inside a fixed amount of memory: an engine, and caches for mlx-lm.

The names below are imported on first use, so that `import penstock` takes milliseconds and commands
start fast. Only a fast BLAS is loaded by `import penstock` on a Linux CPU, because it must
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
    from penstock.caches import *  # noqa: F403 - the names below, for type checkers
    from penstock.caches.prefix_cache import PrefixCache as PrefixCache
    from penstock.engine.engine import Engine as Engine
    from penstock.engine.request import Request as Request
    from penstock.engine.request import Sampling as Sampling
    from penstock.errors import *  # noqa: F403
    from penstock.models.layer_seams import attach as attach
    from penstock.models.loading import load as load

_NAMES = {
    "penstock.caches": "KVCache RotatingKVCache SinkRotatingKVCache SelectiveKVCache KVCacheManager"
    " QuantizedKVCache QuantizedRotatingKVCache TurboQuantKVCache BatchKVCache BatchRotatingKVCache"
    " BatchSinkRotatingKVCache BatchQuantizedKVCache BatchQuantizedRotatingKVCache"
    " BatchTurboQuantKVCache make_kv_cache load_prompt_cache save_prompt_cache",
    "penstock.caches.prefix_cache": "PrefixCache",
    "penstock.engine.engine": "Engine",
    "penstock.engine.request": "Request Sampling",
    "penstock.errors": " ".join(
        name
        for name, value in vars(_errors).items()
        if isinstance(value, type) and issubclass(value, _errors.PenstockError)
    ),
    "penstock.models.layer_seams": "attach",
    "penstock.models.loading": "load",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted((*_HOMES, "__version__"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
