"""What a bench needs of vllm-mlx: its prefix cache, where it is installed. The one seam to it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

INSTALL_HINT = "pip install --no-deps vllm-mlx"


def is_installed() -> bool:
    """Tell whether there is something to compare with."""
    return find_spec("vllm_mlx") is not None


class MemoryAwareCache:
    """vllm-mlx's `MemoryAwarePrefixCache` that holds entries in affine codes, groups of 64."""

    def __init__(self, *, bits: int, limit_bytes: int) -> None:
        theirs: Any = import_module("vllm_mlx.memory_cache")
        self._cache = theirs.MemoryAwarePrefixCache(
            object(),
            theirs.MemoryCacheConfig(
                max_memory_mb=limit_bytes >> 20,
                kv_quantize=True,
                kv_bits=bits,
                kv_min_quantize_tokens=0,
            ),
        )

    def store(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Keep the caches' KV; tell whether it is kept."""
        return bool(self._cache.store(list(tokens), list(caches)))

    def fetch(self, tokens: Sequence[int]) -> Sequence[Any] | None:
        """Return caches of full precision for the longest known prefix; None without one."""
        caches, _ = self._cache.fetch(list(tokens))
        return None if caches is None else list(caches)
