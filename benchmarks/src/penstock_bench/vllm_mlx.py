"""The only interface to vllm-mlx: its prefix cache, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import mlx.core as mx

from penstock_bench import rivals

INSTALL_HINT = "pip install --no-deps vllm-mlx"


def is_installed() -> bool:
    """Return whether vllm-mlx is installed."""
    return find_spec("vllm_mlx") is not None


class MemoryAwareCache:
    """vllm-mlx's `MemoryAwarePrefixCache` with entries in affine codes, groups of 64."""

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
        """Store the caches' KV; return whether it was kept."""
        return bool(self._cache.store(list(tokens), list(caches)))

    def fetch(self, tokens: Sequence[int]) -> Sequence[Any] | None:
        """Return caches in full precision for the longest cached prefix, or None."""
        caches, _ = self._cache.fetch(list(tokens))
        return None if caches is None else list(caches)


class DequantizedSides:
    """One layer of one sequence in an entry of vllm-mlx's cache, dequantized on a hit.

    Args:
        keys: (1, heads, tokens, dim).
        values: the same.
        bits: bits per value.
        group_size: elements that share a scale and an offset.
    """

    def __init__(self, keys: mx.array, values: mx.array, *, bits: int, group_size: int) -> None:
        self._theirs: Any = import_module("vllm_mlx.memory_cache")
        cache = rivals.KVCache()
        cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
        self._held = self._theirs._quantize_cache([cache], bits, group_size)
        self._dequantized: tuple[mx.array, mx.array] | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Codes, scales and offsets."""
        return [part for layer in self._held for part in (*layer.keys, *layer.values)]

    @property
    def nbytes(self) -> int:
        """Bytes of these arrays."""
        return sum(part.nbytes for part in self.arrays)

    def dequantize(self) -> tuple[mx.array, mx.array]:
        """Return dequantized keys and values."""
        (cache,) = self._theirs._dequantize_cache(self._held)
        return cache.keys, cache.values

    def attend(self, queries: mx.array) -> mx.array:
        """Attend over the keys and values dequantized by a hit, once.

        queries: (heads, m, dim), already scaled. Returns (heads, m, dim).
        """
        if self._dequantized is None:
            self._dequantized = self.dequantize()
            mx.eval(*self._dequantized)
        keys, values = self._dequantized
        return mx.fast.scaled_dot_product_attention(
            queries[None].astype(keys.dtype), keys, values, scale=1.0
        )[0]
