"""`make_kv_cache`: creates the bounded caches of a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import finalize

import mlx.core as mx
import numpy as np

from penstock.attention.selection.key_centers import (
    RUN_TOKENS,
    KeyCenters,
    centers_of,
    run_of_tokens,
)
from penstock.caches.base import LayerCache
from penstock.caches.codec import LEAST_WINDOW, TurboQuantKVCache
from penstock.caches.codes import BLOCK_TOKENS
from penstock.caches.quantized import BITS, GROUP_SIZES, QuantizedRotatingKVCache
from penstock.caches.rotating import Ring, RotatingKVCache
from penstock.caches.selective import SelectiveKVCache
from penstock.caches.sinks import SinkRotatingKVCache
from penstock.config import MAX_KV_SIZE, MIN_QUANTIZE_TOKENS, RAW_FIRST_TOKENS, default_keep
from penstock.errors import SettingError
from penstock.kv.checks import loaded_model, one_of, positive, whole
from penstock.kv.numpy_arrays import Floats
from penstock.kv.quantization import QuantizationRule
from penstock.plurals import counted


def make_kv_cache(
    model: Any,
    max_kv_size: int = MAX_KV_SIZE,
    keep: int | None = None,
    kv_bits: int | None = None,
    capacity: int | Literal["window"] | None = None,
    *,
    kv_group_size: int = 64,
    kv_cache_quantization: str | None = None,
    kv_cache_min_quantize_tokens: int = MIN_QUANTIZE_TOKENS,
    kv_cache_raw_first_tokens: int = RAW_FIRST_TOKENS,
    attend: int | None = None,
    attend_rest: bool = False,
) -> list[Any]:
    """Create the caches of a model, one per layer, of at most `max_kv_size` tokens each.

    Args:
        model: A model of mlx-lm. Its `make_cache()` determines the type of each layer; without it,
            all `layers` are full-attention layers.
        max_kv_size: Maximum number of tokens. Full-attention layers become windows of this size.
            Sliding-window layers keep their own window if it is smaller. The chunks of chunked
            layers (Llama 4) are limited to it. Recurrent layers, which do not grow, are unchanged.
        keep: Number of first tokens that a full-attention layer never drops; must be less than
            `max_kv_size`. None means 4,096, or half of a smaller window.
        kv_bits: Quantize keys and values to 2, 3, 4, 5, 6 or 8 bits; None does not quantize.
        capacity: Number of columns to allocate at first. A number should cover the tokens that the
            request can use, prompt and answer. None starts with 256 and grows by a quarter at a
            time: short requests take little memory, long ones copy. "window" allocates the whole
            window of each layer: buffers never grow, but short requests take as much memory as long
            ones.
        kv_group_size: Number of quantized values that share a scale: 32, 64 or 128.
        kv_cache_quantization: Codec of the full-attention layers, such as `turbo4`; their caches
            are `TurboQuantKVCache`s. Sliding-window layers stay in full precision.
        kv_cache_min_quantize_tokens: Sequences of fewer tokens stay in full precision; longer
            ones are encoded as a whole.
        kv_cache_raw_first_tokens: Number of first tokens that stay in full precision.
        attend: Number of tokens that a decoded token attends to in full-attention layers,
            selected by an index of the keys (`SelectiveKVCache`), at least 128; None means all.
            Requires `penstock.attach(model)`. The model runs once on 256 tokens for the index.
        attend_rest: With `attend`, also read the other tokens in two bits per value, which
            doubles the size of the index.

    Raises:
        TypeError, ValueError: a size is not an integer or out of range.
        SettingError: `keep` leaves no room in the window; a layer's cache cannot be bounded; the
            codec does not exist or cannot be used.
    """
    loaded_model("make_kv_cache", model)
    size = positive("max_kv_size", max_kv_size)
    rule = QuantizationRule.of(
        kv_cache_quantization,
        block_size=BLOCK_TOKENS,
        first_tokens=kv_cache_raw_first_tokens,
        least_tokens=kv_cache_min_quantize_tokens,
    )
    shared = _reads_other_layers(model)
    _check_codec(rule, kv_bits, size, shared=shared)
    if kv_bits is not None:
        one_of("kv_bits", kv_bits, BITS)
        one_of("kv_group_size", kv_group_size, GROUP_SIZES)
    if not rule.is_raw or kv_bits is not None:
        _check_reads_all(attend)
    if attend_rest and attend is None:
        raise SettingError("attend_rest requires attend; set attend, too")
    kept, room = _kept(keep, size), _room(capacity)
    bound = Bound(size, kept, kv_bits, kv_group_size, room, shared, rule, attend, attend_rest)
    caches = _bounded(model, bound)
    if attend is not None:
        for cache, centers in zip(_with_keys(caches), _centers(model, bound), strict=True):
            if isinstance(cache, SelectiveKVCache):
                cache.centers = centers
    return caches


def _bounded(model: Any, bound: Bound) -> list[Any]:
    if not hasattr(model, "make_cache"):
        return [bound.full() for _ in model.layers]
    return [bound.on(cache) for cache in model.make_cache()]


_known: dict[int, list[KeyCenters | None]] = {}
"""Key centers of the layers with keys of each model, by `id(model)`."""


def _centers(model: Any, bound: Bound) -> list[KeyCenters | None]:
    """Return the key centers of the layers with keys; runs the model once."""
    if id(model) not in _known:
        finalize(model, _known.pop, id(model), None)
        small = replace(bound, size=2 * RUN_TOKENS, keep=0, room=RUN_TOKENS)
        size = model(mx.array([[0]]), cache=_bounded(model, small)).shape[-1]
        caches = _bounded(model, small)
        mx.eval(model(mx.array([run_of_tokens(size)]), cache=caches))
        keys = [_keys(cache) for cache in _with_keys(caches)]
        centers = centers_of(model, keys)
        _known[id(model)] = [centers.get(number) for number in range(len(keys))]
    return _known[id(model)]


def _keys(cache: Any) -> Floats | None:
    """Return the cached keys, (kv_heads, RUN_TOKENS, dim); None if quantized or dropped."""
    keys = cache.keys
    if not isinstance(keys, mx.array) or keys.shape[2] < RUN_TOKENS:
        return None
    return np.array(keys[0, :, :RUN_TOKENS].astype(mx.float32))


def _with_keys(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if hasattr(cache, "caches"):  # CacheList
            yield from _with_keys(cache.caches)
        elif hasattr(cache, "keys"):
            yield cache


def _check_reads_all(attend: int | None) -> None:
    """Raise SettingError if `attend` is set, which quantized caches do not support."""
    if attend is not None:
        raise SettingError(
            f"attend {attend}: not supported with kv_bits or kv_cache_quantization; remove one of "
            f"them, or use the engine, which supports both (Engine(attend_tokens={attend}))"
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """Settings common to all layers of a model, with methods to create each layer's cache."""

    size: int
    keep: int
    bits: int | None
    group_size: int
    room: int | None
    """Number of columns to allocate at first; None means the whole window."""
    shared: bool
    rule: QuantizationRule
    attend: int | None
    rest: bool

    def on(self, cache: Any) -> Any:
        if hasattr(cache, "caches"):  # CacheList
            return type(cache)(*(self.on(part) for part in cache.caches))
        if hasattr(cache, "cache"):  # ArraysCache: recurrent
            return cache
        if hasattr(cache, "chunk_size"):  # ChunkedKVCache
            cache.chunk_size = min(cache.chunk_size, self.size)
            return cache
        if not hasattr(cache, "update_and_fetch"):
            raise SettingError(
                f"this model's {type(cache).__module__}.{type(cache).__name__} cannot be bounded; "
                f"use the model's own make_cache()"
            )
        if hasattr(cache, "max_size"):
            return self.sliding(cache.max_size, cache.keep)
        return self.full()

    def full(self) -> Ring | TurboQuantKVCache:
        if not self.rule.is_raw:
            return TurboQuantKVCache(
                self.rule.scheme.name,
                min_quantize_tokens=self.rule.least_tokens,
                raw_first_tokens=self.rule.first_tokens,
                max_size=self.size,
                keep=self.keep,
                capacity=self.size if self.room is None else self.room,
            )
        if self.bits is not None:
            return self._quantized(self.size, self.keep)
        if self.attend is not None:
            sizes = self.size, self.keep, self.room
            return self._of(SelectiveKVCache(*sizes, attend=self.attend, rest=self.rest))
        if self.keep:
            return self._of(SinkRotatingKVCache(self.size, self.keep, self.room))
        return self._of(RotatingKVCache(self.size, capacity=self.room))

    def sliding(self, window: int, keep: int) -> Ring:
        """Return the cache of a sliding-window layer that never drops the first `keep` tokens."""
        if self.bits is not None:
            return self._quantized(min(window, self.size), keep)
        if window <= self.size:
            return self._of(RotatingKVCache(window, keep, self.room))
        # The model still requests masks for its own window, which is larger.
        return self._of(SinkRotatingKVCache(self.size, _clipped(keep, self.size), self.room))

    def _quantized(self, size: int, keep: int) -> Ring:
        assert self.bits is not None
        return self._of(
            QuantizedRotatingKVCache(
                size, _clipped(keep, size), self.group_size, self.bits, self.room
            )
        )

    def _of(self, cache: Ring) -> Ring:
        cache.read_by_others = self.shared
        return cache


def _check_codec(rule: QuantizationRule, kv_bits: int | None, size: int, *, shared: bool) -> None:
    if rule.is_raw:
        return
    if kv_bits is not None:
        raise SettingError("kv_bits and kv_cache_quantization exclude each other; set one of them")
    if size < LEAST_WINDOW:
        raise SettingError(
            f"max_kv_size must be at least {LEAST_WINDOW} with kv_cache_quantization, not {size}"
        )
    if shared:
        raise SettingError(
            "kv_cache_quantization: not supported, because layers of this model read other layers' "
            "keys and values; use kv_bits"
        )


def _kept(keep: int | None, size: int) -> int:
    """Return `keep` or its default, validated for a window of `size`."""
    if keep is None:
        return default_keep(size)
    if whole("keep", keep, 0) >= size:
        raise SettingError(
            f"keep {keep} leaves no room in a window of max_kv_size {counted(size, 'token')}; "
            f"lower keep or raise max_kv_size"
        )
    return keep


def _room(capacity: int | str | None) -> int | None:
    if capacity == "window":
        return None
    if isinstance(capacity, str):
        raise SettingError(f"capacity must be a number of tokens or 'window', not {capacity!r}")
    return LayerCache.step if capacity is None else positive("capacity", capacity)


def _clipped(keep: int, size: int) -> int:
    """Return `keep`, or half of `size` if `keep` does not fit."""
    return keep if keep < size else size // 2


def _reads_other_layers(model: Any) -> bool:
    """Return whether any layer reads another layer's cache with `keys_and_values()`.

    Configs do not state this consistently, so the source of the model's modules is searched.
    """
    files = {type(module).__module__ for _, module in model.named_modules()}
    return any(
        "keys_and_values()" in inspect.getsource(sys.modules[name])
        for name in files
        if name.startswith("mlx_lm.models.") and name != "mlx_lm.models.cache"
    )
