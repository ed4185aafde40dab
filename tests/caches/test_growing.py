"""KVCache and BatchKVCache: one allocation with a capacity, small growth without."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import HEADS, TOKEN_BYTES, WIDTH, feed, indices, kv, peak_above
from mlx_lm.models import cache as theirs

from penstock import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from penstock.caches import QuantizedRotatingKVCache, TurboQuantKVCache


def test_capacity_is_allocated_once_and_written_in_place() -> None:
    cache = KVCache(capacity=1_000)
    assert (cache.capacity, cache.nbytes) == (1_000, 0)
    feed(cache, 10)
    assert cache.nbytes == 1_000 * TOKEN_BYTES
    extra = peak_above(lambda: feed(cache, *[1] * 500))
    assert extra <= 16_384, "a write copied the buffer"
    assert (cache.growths, cache.capacity, cache.offset) == (0, 1_000, 510)


def test_write_copies_buffer_if_view_is_alive() -> None:
    """Negative control of the measurement above."""
    cache = KVCache(capacity=1_000)
    held = feed(cache, 10)
    assert peak_above(lambda: feed(cache, 1)) >= 1_000 * TOKEN_BYTES // 2
    assert indices(held[0]) == list(range(10))


def test_growth_past_capacity_is_counted() -> None:
    cache = KVCache(capacity=4)
    fetched = feed(cache, 3, 3)
    assert cache.growths == 1
    assert indices(fetched[0]) == list(range(6))
    assert indices(fetched[1]) == list(range(6))


def test_growth_peak_is_one_old_buffer() -> None:
    layers = [KVCache(capacity=4_096) for _ in range(8)]
    for cache in layers:
        feed(cache, 4_096)
    side = 4_096 * TOKEN_BYTES // 2

    def step() -> None:
        fetched = [cache.update_and_fetch(*kv(1)) for cache in layers]
        mx.eval(fetched)

    held_before = sum(cache.nbytes for cache in layers)
    extra = peak_above(step)
    grown = sum(cache.nbytes for cache in layers) - held_before
    assert [cache.growths for cache in layers] == [1] * 8
    assert extra <= grown + side + 65_536, "old buffers of several layers were alive together"


def test_full_buffer_write_does_not_retain_callers_array() -> None:
    """The chunk is a view of a larger array, as keys split from a fused projection are."""
    cache = KVCache(capacity=16)

    def fill() -> None:
        wide = mx.zeros((1, HEADS, 4_096, WIDTH))
        mx.eval(wide)
        cache.update_and_fetch(wide[:, :, :16], wide[:, :, :16])
        mx.eval(cache.state)

    mx.clear_cache()  # what others left there would be handed out, larger than it need be
    before = mx.get_active_memory()
    fill()
    assert mx.get_active_memory() - before <= cache.nbytes + 4_096


def test_copies_are_independent() -> None:
    cache = KVCache()
    feed(cache, 5)
    other = copy.deepcopy(cache)
    assert indices(feed(cache, 1, start=100)[0]) == [0, 1, 2, 3, 4, 100]
    assert indices(feed(other, 1, start=200)[0]) == [0, 1, 2, 3, 4, 200]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        KVCache(capacity=capacity)


@pytest.mark.parametrize("capacity", [1.5, "8", True])
def test_capacity_must_be_an_integer(capacity: object) -> None:
    with pytest.raises(TypeError, match="capacity must be an integer"):
        KVCache(capacity=capacity)  # type: ignore[arg-type]


def test_bad_arrays_are_named_in_error() -> None:
    cache = KVCache()
    keys, values = kv(3)
    with pytest.raises(TypeError, match=r"keys must be an mx\.array, not list"):
        cache.update_and_fetch([1], values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"values must be .batch, kv_heads, tokens, head_dim."):
        cache.update_and_fetch(keys, values[0])
    with pytest.raises(ValueError, match="at least one row and one head"):
        cache.update_and_fetch(keys[:, :0], values[:, :0])
    with pytest.raises(ValueError, match=r"values .* must have the batch, heads and tokens"):
        cache.update_and_fetch(keys, values[:, :1])
    assert cache.empty() and cache.nbytes == 0
    cache.update_and_fetch(keys, values)
    with pytest.raises(TypeError, match=r"values are mlx\.core.float16; this cache holds"):
        cache.update_and_fetch(keys, values.astype(mx.float16))
    with pytest.raises(ValueError, match="kv_heads is 1; this cache holds 2"):
        cache.update_and_fetch(keys[:, :1], values[:, :1])
    with pytest.raises(ValueError, match="head_dim of keys is 32; this cache holds 64"):
        cache.update_and_fetch(keys[..., :32], values)
    assert cache.offset == 3


ONE_SEQUENCE = {
    "growing": (KVCache, theirs.KVCache),
    "ring": (lambda: RotatingKVCache(8), lambda: theirs.RotatingKVCache(8)),
}


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ONE_SEQUENCE)
def test_all_dtypes_and_empty_updates_match_mlx_lm(name: str, dtype: mx.Dtype) -> None:
    ours, own = (make() for make in ONE_SEQUENCE[name])
    for tokens in (3, 1, 0, 1, 3):
        sides = [(side * 100).astype(dtype) for side in kv(tokens)]
        if tokens == 0:
            sides = [side[:, :, :0].astype(dtype) for side in kv(1)]
            fetched = ours.update_and_fetch(*sides)
            assert [side.shape[2] for side in fetched] == [ours.size()] * 2
            continue
        found, expected = ours.update_and_fetch(*sides), own.update_and_fetch(*sides)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype == dtype
            assert mx.array_equal(one, other)


@pytest.mark.parametrize("capacity", [None, 24])
def test_empty_first_update_allocates_normally(capacity: int | None) -> None:
    cache = KVCache(capacity)
    keys, values = kv(3)
    assert cache.update_and_fetch(keys[:, :, :0], values[:, :, :0])[0].shape[2] == 0
    held = cache.nbytes
    cache.update_and_fetch(keys, values)
    assert (cache.offset, cache.growths, cache.nbytes) == (3, 0, held)


@pytest.mark.parametrize(
    "make",
    [
        lambda: QuantizedKVCache(32, 8),
        lambda: QuantizedRotatingKVCache(8, 0, 32, 8),
        lambda: TurboQuantKVCache("turbo4"),
    ],
    ids=["quantized", "quantized ring", "codec"],
)
def test_codecs_accept_only_floats(make: Any) -> None:
    cache = make()
    keys, values = kv(3)
    with pytest.raises(TypeError, match=r"keys must be floating point to be encoded, not .*int32"):
        cache.update_and_fetch(keys.astype(mx.int32), values)
    cache.update_and_fetch(keys[:, :, :0], values[:, :, :0])
    cache.update_and_fetch(keys, values)
    cache.update_and_fetch(keys[:, :, :0], values[:, :, :0])
    assert cache.offset == 3
    whole = KVCache()
    whole.update_and_fetch(keys.astype(mx.int32), values.astype(mx.int32))
    with pytest.raises(TypeError, match="floating point to be encoded"):
        whole.to_quantized(32, 8)


def test_merged_batch_holds_only_needed_columns() -> None:
    singles = [KVCache(capacity=100) for _ in range(2)]
    feed(singles[0], 7)
    feed(singles[1], 3)
    batch = KVCache.merge(singles)
    assert isinstance(batch, BatchKVCache)
    assert batch.keys.shape[2] == 7
    assert batch.left_padding.tolist() == [0, 4]
    batch.update_and_fetch(*kv(1, batch=2, start=50))
    assert (batch.capacity, batch.growths) == (100, 0)
    row = batch.extract(1)
    assert row.nbytes == 4 * TOKEN_BYTES
    assert indices(row.keys) == [0, 1, 2, 50]
    batch.filter([1])
    assert batch.nbytes == 4 * TOKEN_BYTES
    batch.update_and_fetch(*kv(1, start=51))
    assert batch.growths == 0, "giving a packed buffer its room again is no growth"


def test_extracted_row_releases_batch() -> None:
    batch = KVCache.merge([KVCache(capacity=2_000) for _ in range(4)])
    batch.update_and_fetch(*kv(2_000, batch=4))
    mx.eval(batch.state)
    before = mx.get_active_memory()
    row = batch.extract(2)
    del batch
    assert mx.get_active_memory() - before <= row.nbytes - 4 * 2_000 * TOKEN_BYTES + 4_096


def test_left_padding_of_filled_cache_is_refused() -> None:
    batch = BatchKVCache([0, 0])
    batch.prepare(left_padding=[1, 0])
    batch.update_and_fetch(*kv(2, batch=2))
    with pytest.raises(ValueError, match="only be added while the cache is empty"):
        batch.prepare(left_padding=[1, 0])


def test_merge_of_no_caches_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one cache"):
        BatchKVCache.merge([])
    assert BatchKVCache.merge([KVCache(), KVCache()]).empty()


@pytest.mark.parametrize(
    ("padding", "error", "words"),
    [
        ([-3, 2], ValueError, r"left_padding\[0\] must be at least 0, not -3"),
        ([0.5, 2], TypeError, r"left_padding\[0\] must be an integer"),
        (3, TypeError, "left_padding must be a sequence"),
    ],
)
def test_bad_padding_is_named_in_error(padding: Any, error: type[Exception], words: str) -> None:
    for kind in (BatchKVCache, lambda pads: BatchRotatingKVCache(8, pads)):
        with pytest.raises(error, match=words):
            kind(padding)


@pytest.mark.parametrize("cache", [KVCache(), RotatingKVCache(8), RotatingKVCache(8, 2)])
def test_negative_trim_is_refused(cache: Any) -> None:
    feed(cache, 5)
    batch = cache.merge([cache])
    for trimmed in (cache, batch):
        with pytest.raises(ValueError, match="n must be at least 0, not -3"):
            trimmed.trim(-3)
    assert cache.offset == 5


@pytest.mark.parametrize("single", [KVCache(), RotatingKVCache(8), RotatingKVCache(8, 2)])
@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "is empty"), ([2], "row 2; the batch has 2"), ([-1], "at least 0"), ([0.5], "integer")],
)
def test_invalid_filter_leaves_batch_unchanged(single: Any, rows: list[Any], words: str) -> None:
    single = copy.deepcopy(single)
    feed(single, 3)
    batch = single.merge([single, single])
    with pytest.raises((ValueError, TypeError), match=words):
        batch.filter(rows)
    assert batch.offset.tolist() == [3, 3]
    assert batch.keys.shape[0] == 2


def other_heads() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*(side[:, :1] for side in kv(3)))
    return cache


def half() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*kv(3, dtype=mx.float16))
    return cache


def of_four_bits() -> QuantizedKVCache:
    return KVCache().to_quantized(bits=4)


def of_eight_bits() -> QuantizedKVCache:
    return KVCache().to_quantized(bits=8)


def fed() -> KVCache:
    cache = KVCache()
    feed(cache, 3)
    return cache


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (fed, other_heads, "same kv_heads"),
        (fed, half, "same dtype"),
        (of_eight_bits, of_four_bits, "same bits"),
        (fed, of_eight_bits, "caches of one class"),
        (lambda: RotatingKVCache(8), lambda: RotatingKVCache(9), "same max_size"),
        (lambda: RotatingKVCache(8, 2), lambda: RotatingKVCache(8, 3), "same keep"),
    ],
)
def test_merge_and_extend_refuse_incompatible_caches(first: Any, second: Any, words: str) -> None:
    one, other = first(), second()
    with pytest.raises(ValueError, match=words):
        one.merge([one, other])
    with pytest.raises(ValueError, match=words):
        one.merge([one]).extend(other.merge([other]))


def test_numpy_integers_are_accepted() -> None:
    assert RotatingKVCache(np.int64(8), keep=np.int32(2)).max_size == 8


def test_conversion_to_quantized_counts_as_one_growth() -> None:
    cache = KVCache()
    feed(cache, 250)
    quantized = cache.to_quantized(bits=8)
    quantized.update_and_fetch(*kv(10))
    assert (quantized.growths, quantized.capacity) == (1, 512)
