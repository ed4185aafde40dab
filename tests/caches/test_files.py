"""Prompt cache files: every class round trips, files are private, bad ones are refused."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers import feed, indices, kv
from mlx_lm.models import cache as theirs

from penstock import (
    BatchKVCache,
    CacheFileError,
    KVCache,
    QuantizedKVCache,
    QuantizedRotatingKVCache,
    RotatingKVCache,
    SinkRotatingKVCache,
    TurboQuantKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from penstock.caches import codec


def batch_of(kind: Any, *lengths: int) -> Any:
    singles = []
    for length in lengths:
        singles.append(kind())
        feed(singles[-1], length)
    return singles[0].merge(singles)


def fed(cache: Any, *chunks: int) -> Any:
    feed(cache, *chunks)
    return cache


CACHES = {
    "growing": lambda: fed(KVCache(), 5, 1),
    "empty": KVCache,
    "ring": lambda: fed(RotatingKVCache(8), 5, 20, 1, 1),
    "ring, kept": lambda: fed(RotatingKVCache(8, keep=3), 5, 20, 1, 1),
    "ring, in attention_window": lambda: fed(SinkRotatingKVCache(8, keep=3), 5, 20, 1, 1),
    "quantized": lambda: fed(QuantizedKVCache(bits=5), 5, 1),
    "quantized ring": lambda: fed(QuantizedRotatingKVCache(8, 2, bits=3), 5, 20, 1),
    "codes": lambda: fed(
        TurboQuantKVCache("turbo4", min_quantize_tokens=0, raw_first_tokens=64), 200, 1
    ),
    "batch": lambda: batch_of(KVCache, 5, 2),
    "batch of rings": lambda: batch_of(lambda: RotatingKVCache(8), 30, 2),
    "batch of kept rings": lambda: batch_of(lambda: RotatingKVCache(8, keep=2), 30, 2),
    "batch, quantized": lambda: batch_of(QuantizedKVCache, 5, 2),
    "batch of quantized rings": lambda: batch_of(lambda: QuantizedRotatingKVCache(8, 2), 30, 2),
}


@pytest.mark.parametrize("name", CACHES)
def test_loaded_cache_continues_as_original(name: str, tmp_path: Path) -> None:
    cache = CACHES[name]()
    save_prompt_cache(tmp_path / "cache.safetensors", [cache, cache], {"model": "m"})
    loaded, metadata = load_prompt_cache(tmp_path / "cache.safetensors", return_metadata=True)
    assert metadata == {"model": "m"}
    assert [type(other) for other in loaded] == [type(cache)] * 2
    rows = (
        cache.keys[0].shape[0]
        if isinstance(cache.keys, tuple)
        else (1 if cache.keys is None else cache.keys.shape[0])
    )
    for tokens in (1, 1, 6, 1):
        new = kv(tokens, batch=rows, start=77)
        ours, again = cache.make_mask(tokens), loaded[0].make_mask(tokens)
        assert type(ours) is type(again)
        if isinstance(ours, mx.array):
            assert mx.array_equal(ours, again)
        for side, other in zip(
            cache.update_and_fetch(*new), loaded[0].update_and_fetch(*new), strict=True
        ):
            parts = zip(side, other, strict=True) if isinstance(side, tuple) else [(side, other)]
            assert all(mx.array_equal(a, b) for a, b in parts)


def test_files_are_private_and_survive_failed_write(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(tmp_path / "cache", [fed(KVCache(), 3)])  # as MLX, it adds the suffix
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    good = path.read_bytes()
    broken = fed(KVCache(), 3)
    broken.offset = object()
    with pytest.raises(CacheFileError, match="a object in a cache's state"):
        save_prompt_cache(path, [broken])
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match=r"^there is no file .*nowhere\.safetensors$"):
        load_prompt_cache(tmp_path / "nowhere.safetensors")
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, [fed(KVCache(), 3)])
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CacheFileError):
            load_prompt_cache(path)
    mx.save_safetensors(str(path), {"weight": mx.zeros((2,))})
    with pytest.raises(CacheFileError, match="not a readable prompt cache"):
        load_prompt_cache(path)
    path.write_bytes(whole.replace(b"KVCache", b"KVCacha"))
    with pytest.raises(CacheFileError, match="of class KVCacha, which is not penstock's"):
        load_prompt_cache(path)


def test_codes_of_other_format_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, [CACHES["codes"]()])
    monkeypatch.setattr(codec, "FORMAT", 99)
    with pytest.raises(CacheFileError, match=r"codes have format \d+; this version reads 99"):
        load_prompt_cache(path)


def test_files_are_interchangeable_with_mlx_lm(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    theirs.save_prompt_cache(
        str(path), [fed(theirs.KVCache(), 5), fed(theirs.RotatingKVCache(8, keep=2), 30)]
    )
    growing, ring = load_prompt_cache(path)
    assert indices(growing.keys_and_values()[0]) == list(range(5))
    assert (type(ring), ring.capacity) == (RotatingKVCache, 8), "mlx-lm's buffer of 30 is cut"
    assert indices(ring.keys) == [0, 1, *range(24, 30)]
    save_prompt_cache(path, [growing, ring])
    growing, ring = theirs.load_prompt_cache(str(path))
    assert indices(growing.keys_and_values()[0]) == list(range(5))
    assert indices(ring.update_and_fetch(*kv(1, start=30))[0]) == [0, 1, 30, *range(25, 30)]


def test_mlx_lm_cache_lists_and_states_keep_their_class(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    state = theirs.ArraysCache(size=1)
    state[0] = mx.ones((1, 4))
    save_prompt_cache(path, [theirs.CacheList(state, fed(SinkRotatingKVCache(8, keep=2), 30))])
    (both,) = load_prompt_cache(path)
    assert isinstance(both, theirs.CacheList)
    assert mx.array_equal(both[0][0], state[0])
    assert (type(both[1]), both[1].offset) == (SinkRotatingKVCache, 30)


def test_oversized_batch_is_truncated_to_window_on_load(tmp_path: Path) -> None:
    batch = theirs.BatchRotatingKVCache(8, [2, 0])
    batch.update_and_fetch(*kv(20, batch=2))
    theirs.save_prompt_cache(str(tmp_path / "cache.safetensors"), [batch])
    (ours,) = load_prompt_cache(tmp_path / "cache.safetensors")
    assert ours.capacity == 8
    for step in (20, 21):
        mask = ours.make_mask(1)
        fetched = ours.update_and_fetch(*kv(1, batch=2, start=step))
    assert mask.all().item()
    assert set(indices(fetched[0], row=1)) == set(range(14, 22))
    assert isinstance(BatchKVCache.from_state(BatchKVCache([0]).state), BatchKVCache)


def test_loaded_window_grows_from_its_saved_size(tmp_path: Path) -> None:
    """Not to all of max_size at once."""
    path = tmp_path / "cache.safetensors"
    cache = fed(SinkRotatingKVCache(100_000, keep=16, capacity=600), 520)
    save_prompt_cache(path, [cache])
    (loaded,) = load_prompt_cache(path)
    assert loaded.nbytes == cache.nbytes
    feed(loaded, *[1] * 125)
    assert loaded.offset == 645
    assert loaded.capacity <= 1_024


@pytest.mark.parametrize("states", [["0.0", "0.1"], ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]])
def test_other_file_layouts_are_refused(states: list[str], tmp_path: Path) -> None:
    """Of mlx-lm before 0.32.2, and with more states than classes."""
    path = tmp_path / "cache.safetensors"
    header = {"0": "", "1.0": "KVCache", "2.0": ""}
    mx.save_safetensors(str(path), {key: mx.zeros((1,)) for key in states}, header)
    with pytest.raises(CacheFileError, match=r"as of mlx-lm 0\.32\.2"):
        load_prompt_cache(path)


def test_metadata_must_be_strings(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="metadata must be strings, not 'n': 3"):
        save_prompt_cache(tmp_path / "cache", [KVCache()], {"n": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_rows_extracted_from_loaded_batch_keep_class(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    for kind in (RotatingKVCache, SinkRotatingKVCache, QuantizedRotatingKVCache):
        save_prompt_cache(path, [batch_of(lambda kind=kind: kind(8, 2), 30, 2)])
        (loaded,) = load_prompt_cache(path)
        assert type(loaded.extract(0)) is kind
        kind.merge([loaded.extract(0), fed(kind(8, 2), 3)])
