"""Bounded windows: allocated by the first update, written in place, `keep` retained."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import TOKEN_BYTES, feed, indices, kv, model_of, peak_above
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as theirs

from penstock import (
    BatchRotatingKVCache,
    BatchSinkRotatingKVCache,
    RotatingKVCache,
    SinkRotatingKVCache,
    load_prompt_cache,
    make_kv_cache,
    save_prompt_cache,
)


@pytest.mark.parametrize("first", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("keep", [0, 4])
def test_full_window_is_allocated_at_first_update(first: int, keep: int) -> None:
    cache = RotatingKVCache(max_size=16, keep=keep)
    feed(cache, first)
    assert cache.keys.shape[2] == 16
    feed(cache, *[1] * 1_000, 5, 40, 1, start=first)
    assert cache.keys.shape[2] == cache.values.shape[2] == 16
    assert (cache.growths, cache.nbytes) == (0, 16 * TOKEN_BYTES)


def test_generation_allocates_nothing() -> None:
    cache = RotatingKVCache(max_size=2_000, keep=8)
    feed(cache, 1_990)
    extra = peak_above(lambda: feed(cache, *[1] * 300))
    assert extra <= 16_384, "a write copied the ring"


def test_long_chunk_keeps_only_window() -> None:
    cache = RotatingKVCache(max_size=64, keep=4)
    feed(cache, 10)
    before = mx.get_active_memory()
    fetched = cache.update_and_fetch(*kv(5_000, start=10))
    mx.eval(fetched)
    assert indices(fetched[0]) == list(range(5_010))
    del fetched
    mx.eval(cache.state)
    assert mx.get_active_memory() - before <= 4_096
    assert indices(cache.keys) == [*range(4), *range(4_950, 5_010)]


def test_long_prefill_holds_one_chunk_of_one_layer() -> None:
    """Twelve layers evaluated lazily: only one layer's chunk is alive at a time."""
    window, chunk = 1_024, 128
    layers = [RotatingKVCache(max_size=window) for _ in range(12)]

    def read(tokens: int) -> None:
        total = mx.zeros(())
        for cache in layers:
            keys, values = kv(tokens)
            keys, values = cache.update_and_fetch(keys + 0 * total, values + 0 * total)
            total = total + (keys.sum() + values.sum())
        mx.eval(total, [cache.state for cache in layers])

    read(window)
    steady = sum(cache.nbytes for cache in layers)
    extra = peak_above(lambda: [read(chunk) for _ in range(4)])
    one_layer = (window + chunk) * TOKEN_BYTES
    assert extra <= 1.25 * one_layer
    assert extra <= 0.12 * steady


def test_capacity_follows_request_length() -> None:
    cache = RotatingKVCache(max_size=100_000, keep=16, capacity=500)
    feed(cache, 400, *[1] * 100)
    assert (cache.capacity, cache.growths) == (500, 0)
    feed(cache, 1)
    assert 500 < cache.capacity < 1_000
    assert cache.growths == 1


def test_capacity_never_exceeds_window() -> None:
    cache = RotatingKVCache(max_size=20, capacity=500)
    assert cache.capacity == 20
    feed(cache, 30)
    assert cache.capacity == 20


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_size": 0}, ValueError, "max_size must be at least 1"),
        ({"max_size": -5}, ValueError, "max_size"),
        ({"max_size": 2.5}, TypeError, "max_size must be an integer"),
        ({"max_size": 8, "keep": 8}, ValueError, r"keep must lie in 0\.\.7"),
        ({"max_size": 8, "keep": -1}, ValueError, "keep"),
        ({"max_size": 8, "keep": "4"}, TypeError, "keep must be an integer"),
        ({"max_size": 8, "capacity": 0}, ValueError, "capacity"),
    ],
)
def test_bad_sizes_are_named_in_error(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        RotatingKVCache(**arguments)


def test_trim_is_possible_until_window_is_full() -> None:
    cache = RotatingKVCache(max_size=8)
    feed(cache, 6)
    assert cache.trim(2) == 2
    assert indices(feed(cache, 1, start=9)[0]) == [0, 1, 2, 3, 9]
    feed(cache, 10)
    assert not cache.is_trimmable()
    assert cache.trim(3) == 0


@pytest.mark.parametrize("lengths", [(5, 3), (30, 3), (30, 50)])
def test_merge_and_extract_preserve_kept_tokens(lengths: tuple[int, int], tmp_path: Any) -> None:
    singles = [RotatingKVCache(max_size=16, keep=4) for _ in lengths]
    for cache, length in zip(singles, lengths, strict=True):
        feed(cache, length)
    batch = RotatingKVCache.merge(singles)
    assert isinstance(batch, BatchSinkRotatingKVCache)
    assert batch.keep == 4
    for step in range(40):
        batch.update_and_fetch(*kv(1, batch=2, start=100 + step))
    save_prompt_cache(tmp_path / "batch.safetensors", [batch])
    (batch,) = load_prompt_cache(tmp_path / "batch.safetensors")
    for row, length in enumerate(lengths):
        single = batch.extract(row)
        assert isinstance(single, RotatingKVCache)
        assert (single.keep, single.offset) == (4, length + 40)
        assert set(indices(single.keys)) == set(([*range(length), *range(100, 104)])[:4]) | set(
            range(128, 140)
        )


def test_merge_requires_equal_windows() -> None:
    with pytest.raises(ValueError, match="same max_size"):
        RotatingKVCache.merge([RotatingKVCache(8), RotatingKVCache(9)])
    with pytest.raises(ValueError, match="same keep"):
        RotatingKVCache.merge([RotatingKVCache(8, keep=1), RotatingKVCache(8, keep=2)])


def test_batch_allocates_full_window_at_once() -> None:
    batch = BatchRotatingKVCache(max_size=16, left_padding=[2, 0])
    batch.update_and_fetch(*kv(5, batch=2))
    assert batch.keys.shape[2] == 16
    for step in range(100):
        batch.update_and_fetch(*kv(1, batch=2, start=step))
    batch.update_and_fetch(*kv(30, batch=2))
    assert (batch.keys.shape[2], batch.growths) == (16, 0)
    assert batch.nbytes == 2 * 16 * TOKEN_BYTES


def test_keep_requires_right_padding() -> None:
    batch = RotatingKVCache.merge([RotatingKVCache(8, keep=2)] * 2)
    with pytest.raises(ValueError, match="pad prompts on the right"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(ValueError, match="needs the lengths"):
        batch.prepare(right_padding=[1, 0])


def text_by_chunk(model: Any, cache: Any, step_size: int) -> list[int]:
    prompt = mx.random.randint(2, 300, (120,), key=mx.random.key(3))
    steps = generate_step(
        prompt, model, prompt_cache=cache, max_tokens=24, prefill_step_size=step_size
    )
    return [int(token) for token, _ in steps]


def test_text_with_keep_is_independent_of_chunk_size() -> None:
    model = model_of("llama", num_hidden_layers=2)
    for layer in model.layers:  # louder attention: what is in sight decides the text
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight * 12
    mx.eval(model.parameters())

    def ours(step_size: int) -> list[int]:
        cache = make_kv_cache(model, max_kv_size=32, keep=8)
        assert all(isinstance(layer, SinkRotatingKVCache) for layer in cache)
        return text_by_chunk(model, cache, step_size)

    def mlx_lms(step_size: int) -> list[int]:
        return text_by_chunk(
            model, [theirs.RotatingKVCache(32, keep=8) for _ in range(2)], step_size
        )

    one_by_one = ours(1)
    assert one_by_one == ours(7) == ours(50) == ours(2_048)
    assert one_by_one == mlx_lms(1), "token by token both show the kept tokens"
    assert len({tuple(mlx_lms(size)) for size in (1, 7, 50)}) > 1, (
        "negative control: hiding kept tokens from the rest of a chunk changes the text"
    )


@pytest.mark.parametrize("window_size", [2, 3, 5, 8, 12, 40])
@pytest.mark.parametrize("written", [0, 1, 4, 7, 8, 9, 13, 30])
@pytest.mark.parametrize("max_size", [8, 12])
def test_mask_of_narrower_window_matches_stored_tokens(
    max_size: int, written: int, window_size: int
) -> None:
    """The mask against the tokens that the columns hold, in any order."""
    cache = SinkRotatingKVCache(max_size, keep=3)
    for token in range(written):
        feed(cache, 1, start=token)
    mask = cache.make_mask(1, window_size=window_size)
    fetched = indices(feed(cache, 1, start=written)[0])
    held = [n for n in fetched if n < 3 or n > written - (max_size - 3)]
    wanted = {n for n in held if n > written - window_size}
    if mask is None:
        assert set(fetched) == wanted
    else:
        seen = np.array(mask).reshape(-1).tolist()
        assert {n for n, sees in zip(fetched, seen, strict=True) if sees} == wanted
