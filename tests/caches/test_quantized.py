"""Quantized caches: every bit width, preallocated, bounded, batched."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from helpers import HEADS, WIDTH, kv, peak_above

from penstock import (
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    QuantizedRotatingKVCache,
    RotatingKVCache,
)

BITS = (2, 3, 4, 5, 6, 8)


def noise(tokens: int, batch: int = 1, seed: int = 0) -> tuple[mx.array, mx.array]:
    shape = (batch, HEADS, tokens, WIDTH)
    keys, values = (mx.random.normal(shape, key=mx.random.key(2 * seed + i)) for i in (0, 1))
    mx.eval(keys, values)
    return keys, values


def wide(cache: Any, side: Any) -> mx.array:
    return mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits)


def direct(array: mx.array, bits: int, group_size: int = 64) -> mx.array:
    """Return the result of quantizing the whole array at once."""
    return mx.dequantize(
        *mx.quantize(array, group_size=group_size, bits=bits), group_size=group_size, bits=bits
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64])
def test_incremental_quantization_matches_one_pass(bits: int, group_size: int) -> None:
    cache = QuantizedKVCache(group_size=group_size, bits=bits, capacity=64)
    keys, values = noise(41)
    for start, stop in ((0, 7), (7, 8), (8, 40), (40, 41)):
        fetched = cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
    assert mx.array_equal(wide(cache, fetched[0]), direct(keys, bits, group_size))
    assert mx.array_equal(wide(cache, fetched[1]), direct(values, bits, group_size))
    numbers = 64 * HEADS * WIDTH * 2
    assert cache.nbytes == numbers * bits // 8 + 2 * 4 * numbers // group_size


@pytest.mark.parametrize("bits", BITS)
def test_batch_operations_keep_row_contents(bits: int) -> None:
    parts = [noise(n, seed=n) for n in (9, 4, 6)]
    singles = []
    for part in parts:
        singles.append(QuantizedKVCache(bits=bits))
        singles[-1].update_and_fetch(*part)
    batch = QuantizedKVCache.merge(singles[:2])
    assert isinstance(batch, BatchQuantizedKVCache)
    batch.extend(QuantizedKVCache.merge(singles[2:]))
    more = noise(1, batch=3, seed=99)
    batch.update_and_fetch(*more)
    batch.filter([2, 0])
    for row, original in enumerate((2, 0)):
        single = batch.extract(row)
        assert (type(single), single.bits) == (QuantizedKVCache, bits)
        for side, before, added in zip(
            single.keys_and_values(), parts[original], more, strict=True
        ):
            whole = mx.concatenate([before, added[original : original + 1]], axis=2)
            assert mx.array_equal(wide(single, side), direct(whole, bits))


def test_quantized_rotating_cache_keeps_size_and_tokens() -> None:
    ring = RotatingKVCache(max_size=32, keep=4)
    keys, values = noise(50)
    ring.update_and_fetch(keys, values)
    quantized = ring.to_quantized(group_size=64, bits=8)
    assert isinstance(quantized, QuantizedRotatingKVCache)
    held = mx.concatenate([keys[:, :, :4], keys[:, :, 22:]], axis=2)
    assert mx.array_equal(wide(quantized, quantized.keys), direct(held, 8))
    before = quantized.nbytes
    for n in (1, 1, 40, 1):
        quantized.update_and_fetch(*noise(n))
    assert quantized.nbytes == before
    assert (quantized.offset, quantized.keep, quantized.capacity) == (93, 4, 32)
    batch = QuantizedRotatingKVCache.merge([quantized, quantized])
    assert isinstance(batch, BatchQuantizedRotatingKVCache)
    assert batch.extract(1).bits == 8


def test_conversion_keeps_capacity_and_holds_at_most_one_layer_twice() -> None:
    layers = [KVCache(capacity=2_048) for _ in range(8)]
    for cache in layers:
        cache.update_and_fetch(*kv(2_000))
        mx.eval(cache.state)
    wide_bytes = layers[0].nbytes

    def quantize_all() -> None:
        for i, cache in enumerate(layers):
            layers[i] = cache.to_quantized(bits=8)

    extra = peak_above(quantize_all)
    assert extra <= wide_bytes, "more than one layer was held twice"
    assert {cache.capacity for cache in layers} == {2_048}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bits": 7}, "bits must be one of"),
        ({"bits": 0}, "bits must be one of"),
        ({"group_size": 48}, "group_size must be one of"),
        ({"bits": None}, "bits"),
    ],
)
@pytest.mark.parametrize("kind", [QuantizedKVCache, lambda **k: QuantizedRotatingKVCache(8, **k)])
def test_invalid_bits_are_named_in_error(kind: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**arguments)


def test_indivisible_head_size_is_named_in_error() -> None:
    keys, values = (side[..., :48] for side in kv(3))
    with pytest.raises(ValueError, match="head_dim of keys is 48, not a multiple of group_size 64"):
        QuantizedKVCache().update_and_fetch(keys, values)
    cache = KVCache()
    cache.update_and_fetch(keys, values)
    with pytest.raises(ValueError, match="not a multiple of group_size 32; none fits"):
        cache.to_quantized(group_size=32)


def test_divisible_group_size_is_suggested() -> None:
    keys, values = (mx.concatenate([side, side[..., :32]], axis=-1) for side in kv(3))
    with pytest.raises(ValueError, match="is 96, not a multiple of group_size 64; use 32"):
        QuantizedKVCache().update_and_fetch(keys, values)
    with pytest.raises(ValueError, match="is 64, not a multiple of group_size 128; use 64"):
        QuantizedKVCache(group_size=128).update_and_fetch(*kv(3))


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((2, HEADS, 3, WIDTH), mx.float32, ValueError, "batch is 2; this cache holds 1"),
        ((1, HEADS + 1, 3, WIDTH), mx.float32, ValueError, "kv_heads is 3; this cache holds 2"),
        ((1, HEADS, 3, 128), mx.float32, ValueError, "head_dim of keys is 128; .* holds 64"),
        ((1, HEADS, 3, WIDTH), mx.float16, TypeError, "keys are mlx.core.float16; .*float32"),
    ],
)
def test_mismatched_shapes_are_refused(
    shape: tuple[int, ...], dtype: mx.Dtype, error: type[Exception], words: str
) -> None:
    new = mx.ones(shape, dtype)
    cache = QuantizedKVCache(bits=8)
    cache.update_and_fetch(*kv(5))
    with pytest.raises(error, match=words):
        cache.update_and_fetch(new, new)
    assert cache.offset == 5
    empty = QuantizedKVCache(bits=8)
    empty.update_and_fetch(new, new)
    assert empty.offset == 3


def test_mismatched_value_width_is_refused() -> None:
    cache = QuantizedKVCache(bits=8)
    cache.update_and_fetch(*kv(5))
    keys, _ = kv(3)
    with pytest.raises(ValueError, match="head_dim of values is 128; this cache holds 64"):
        cache.update_and_fetch(keys, mx.concatenate([keys, keys], axis=-1))


def test_empty_caches_have_nbytes_0() -> None:
    assert QuantizedKVCache().nbytes == 0
    assert QuantizedKVCache().empty()
    assert KVCache().to_quantized(bits=4).bits == 4
    assert RotatingKVCache(8).to_quantized(bits=4).max_size == 8
