"""TurboQuantKVCache: reads codes in place, alone and batched, without a raw copy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import mlx.core as mx
import pytest
from combinations import each
from hypothesis import strategies as st

from penstock import (
    BatchTurboQuantKVCache,
    CacheFileError,
    ModelError,
    SettingError,
    TurboQuantKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from penstock.attention import devices
from penstock.kv.codecs.names import parse_scheme

HEADS, KV_HEADS, DIM, SCALE = 8, 2, 64, 64**-0.5
TOKEN = 2 * KV_HEADS * DIM * 4
CODECS = ("affine4", "k8v4", "turbo4", "turbo2.5", "kivi4", "kivi5/turbo3.5", "raw/4", "4/raw")
codecs = pytest.mark.parametrize("codec", CODECS)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Disable MLX's buffer cache, which may return larger buffers than requested."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def noise(tokens: int, seed: int = 0, rows: int = 1, heads: int = KV_HEADS) -> mx.array:
    made = mx.random.normal((rows, heads, tokens, DIM), key=mx.random.key(seed))
    mx.eval(made)
    return made


def sides(tokens: int, seed: int = 0, rows: int = 1) -> tuple[mx.array, mx.array]:
    return noise(tokens, 2 * seed, rows), noise(tokens, 2 * seed + 1, rows)


def fed(cache: Any, *chunks: int, seed: int = 0) -> Any:
    for i, tokens in enumerate(chunks):
        mx.eval(cache.update_and_fetch(*sides(tokens, seed + i)))
        mx.eval(cache.state)
    return cache


def plain(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        queries, keys.astype(mx.float32), values.astype(mx.float32), scale=SCALE, mask=mask
    )


def off(found: mx.array, wanted: mx.array) -> float:
    return float(mx.abs(found - wanted).max())


def step(cache: Any, seed: int, rows: int = 1) -> tuple[mx.array, mx.array]:
    """Write a token to every row; return attention in place and as expected."""
    queries, mask = noise(1, 900 + seed, rows, HEADS), cache.make_mask(1)
    given = cache.update_and_fetch(*sides(1, 500 + seed, rows))
    found = cache.attend(queries, *given, SCALE, mask)
    assert found is not None
    return found, plain(queries, *cache.keys_and_values(), mask)


# ---- what is read


@codecs
def test_attention_over_codes_matches_dequantized(codec: str) -> None:
    cache = fed(TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=64), 200, 70, 1)
    for seed in range(130):  # the tail is committed twice
        found, wanted = step(cache, seed)
        assert off(found, wanted) < 1e-5
    assert (cache.offset, cache.head.offset, cache.codes.offset) == (401, 64, 320)
    assert len(cache.sides()[0]) == 3


@codecs
def test_fetch_returns_all_tokens_dequantized(codec: str) -> None:
    """Without the seam: raw tokens are exact, coded ones approximate."""
    cache = TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=64)
    written = [sides(tokens, seed) for seed, tokens in enumerate((200, 70, 1, 1))]
    for new in written:
        fetched = cache.update_and_fetch(*new)
    for number, side in enumerate(fetched):
        whole = mx.concatenate([new[number] for new in written], axis=2)
        assert side.shape == whole.shape
        for start, stop in ((0, 64), (256, 272)):
            assert mx.array_equal(side[:, :, start:stop], whole[:, :, start:stop])
        some = (side - whole)[:, :, 64:256]
        coded = (cache.scheme.keys, cache.scheme.values)[number] is not None
        assert (float(mx.abs(some).max()) > 0) == coded
        assert float((some * some).mean()) < 0.09


def test_chunk_attends_itself_raw_and_past_dequantized() -> None:
    cache = fed(TurboQuantKVCache("turbo2", min_quantize_tokens=0), 128)
    held = cache.keys_and_values()
    new = sides(192, 5)
    for side, before, own in zip(cache.update_and_fetch(*new), held, new, strict=True):
        assert mx.array_equal(side, mx.concatenate([before, own], axis=2))
    later = cache.keys_and_values()
    assert off(later[0][:, :, 128:], new[0]) > 0.1
    assert mx.array_equal(later[0][:, :, :128], held[0])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_input_keeps_dtype(dtype: mx.Dtype) -> None:
    cache = TurboQuantKVCache("turbo8", min_quantize_tokens=0, raw_first_tokens=64)
    for tokens in (200, 1):
        fetched = cache.update_and_fetch(*(side.astype(dtype) for side in sides(tokens)))
        assert {side.dtype for side in fetched} == {dtype}
    queries = noise(1, 9, heads=HEADS)
    given = cache.update_and_fetch(*(side.astype(dtype) for side in sides(1, 3)))
    found = cache.attend(queries.astype(dtype), *given, SCALE, None)
    assert found is not None
    assert found.dtype == dtype
    assert off(found, plain(queries, *cache.keys_and_values())) < 0.02


def test_attention_matches_reference_with_sinks_and_window() -> None:
    cache = fed(TurboQuantKVCache("turbo8", min_quantize_tokens=0, raw_first_tokens=64), 300)
    sinks = noise(1, 77, heads=HEADS)[0, :, 0, 0]
    queries, mask = noise(1, 9, heads=HEADS), cache.make_mask(1, window_size=100)
    assert mask.shape == (1, 301)
    given = cache.update_and_fetch(*sides(1, 3))
    found = cache.attend(queries, *given, SCALE, mask, sinks)
    wanted = mx.fast.scaled_dot_product_attention(
        queries, *cache.keys_and_values(), scale=SCALE, mask=mask, sinks=sinks
    )
    assert off(found, wanted) < 1e-5
    assert off(found, plain(queries, *cache.keys_and_values())) > 1e-3, "a negative control"


def test_unknown_arrays_and_masks_use_model_attention() -> None:
    cache = fed(TurboQuantKVCache("turbo8"), 300)
    queries = noise(1, 9, heads=HEADS)
    keys, values = cache.update_and_fetch(*sides(1))
    assert cache.attend(queries, keys + 0, values, SCALE, None) is None
    assert cache.attend(queries, keys, values, SCALE, mx.zeros((1, 301))) is None
    chunk = cache.update_and_fetch(*sides(5))
    assert cache.attend(noise(5, 9, heads=HEADS), *chunk, SCALE, "causal") is None


def test_mixing_in_place_and_copied_reads_is_error() -> None:
    cache = fed(TurboQuantKVCache("turbo8"), 300)
    step(cache, 0)
    short, _ = cache.update_and_fetch(*sides(1))
    assert short.shape[2] == 1
    with pytest.raises(ModelError, match=r"call penstock\.attach"):
        cache.update_and_fetch(*sides(1))
    assert cache.update_and_fetch(*sides(1))[0].shape[2] == 303


# ---- what is held


@pytest.mark.parametrize("codec", CODECS)
def test_nbytes_match_formula_without_dequantized_copy(codec: str) -> None:
    gc.collect()
    before = mx.get_active_memory()
    cache = fed(
        TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=64, capacity=1_024),
        512,
        500,
        1,
        1,
    )
    codes = parse_scheme(codec).token_bits(DIM, DIM, 32) * KV_HEADS * (1_024 - 64) // 8
    assert cache.codes.nbytes == codes
    assert cache.nbytes == codes + 128 * TOKEN  # head and tail
    gc.collect()
    assert mx.get_active_memory() - before == cache.nbytes
    assert (cache.capacity, cache.growths) == (1_024 + 64, 0)
    assert cache.codes.growths == 0


def test_buffer_without_capacity_grows_in_small_steps() -> None:
    cache = fed(TurboQuantKVCache("4", min_quantize_tokens=0), 640)
    assert cache.codes.capacity == 640
    for seed in range(65):
        step(cache, seed)
    assert cache.codes.capacity == 800 // 64 * 64 + 64
    assert cache.codes.growths == 1


def test_empty_cache_has_size_zero() -> None:
    cache = TurboQuantKVCache("turbo4")
    assert (cache.nbytes, cache.size(), cache.offset, cache.empty()) == (0, 0, 0, True)
    assert cache.make_mask(1) is None
    assert cache.make_mask(3) == "causal"
    assert cache.trim(3) == 0
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.keys_and_values()


# ---- bounds


def test_bounded_window_keeps_first_and_last_tokens() -> None:
    cache = TurboQuantKVCache(
        "turbo8", max_size=512, keep=100, min_quantize_tokens=0, raw_first_tokens=64
    )
    written: list[mx.array] = []
    for seed, tokens in enumerate((300, 150, *[1] * 150, 700, *[1] * 70, 5)):
        new = sides(tokens, seed)
        written.append(new[0])
        past = cache.size()
        mask = cache.make_mask(tokens, return_array=True)
        queries = noise(tokens, 3, heads=HEADS)
        fetched = cache.update_and_fetch(*new)
        found = cache.attend(queries, *fetched, SCALE, mask)
        if tokens == 1:
            assert found is not None
            assert off(found, plain(queries, *cache.keys_and_values())) < 1e-5
        else:
            assert mask.shape == (tokens, past + tokens)
            assert fetched[0].shape[2] == past + tokens
        mx.eval(cache.state)
        assert cache.size() <= 512
        whole = mx.concatenate(written, axis=2)
        assert cache.offset == whole.shape[2]
        held, recent = cache.keys_and_values()[0], cache.size() - 128
        if cache.offset > 512:
            assert cache.size() > 512 - 128
            assert off(held[:, :, :128], whole[:, :, :128]) < 0.1
            assert off(held[:, :, -recent:], whole[:, :, -recent:]) < 0.1
        assert not cache.is_trimmable() or cache.offset <= 512
    assert cache.trim(3) == 0
    assert cache.capacity <= 512
    assert cache.codes.growths == 0
    mask = cache.make_mask(1, window_size=200)
    assert mask.shape == (1, cache.size() + 1)
    assert int(mask.sum()) == 200


@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_keep_of_window_minus_one_stays_within_window(tokens: int) -> None:
    cache = TurboQuantKVCache("kivi4", max_size=200, keep=199)
    for seed in range(max(3, 300 // tokens)):
        cache.update_and_fetch(*sides(tokens, seed))
        assert cache.size() <= 200
        assert cache.nbytes <= 3 * 64 * TOKEN
    assert cache.head.offset + cache.codes.offset == 128


# ---- trim


CUTS = (0, 3, 20, 40, 200, 260, 310, 400)


@pytest.mark.parametrize(
    ("codec", "n"), sorted({*each(CODECS, CUTS), *each(CODECS, CUTS[3:] + CUTS[:3])})
)
def test_trimmed_tokens_are_overwritten(codec: str, n: int) -> None:
    cache = fed(
        TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=64), 250, *[1] * 75
    )
    wide = cache.keys_and_values()
    mx.eval(wide)
    assert cache.trim(n) == min(n, 325)
    left = max(0, 325 - n)
    assert cache.offset == cache.size() == left
    if left:
        for side, before in zip(cache.keys_and_values(), wide, strict=True):
            assert off(side, before[:, :, :left]) < 1e-6
    for seed in range(70):
        if left:
            found, wanted = step(cache, seed)
            assert off(found, wanted) < 1e-5
    fed(cache, 200)
    assert cache.offset == left + 200 + (70 if left else 0)


# ---- batches


def test_batched_rows_match_single() -> None:
    lengths = (300, 20, 140)
    singles = [
        fed(TurboQuantKVCache("turbo4", min_quantize_tokens=0, raw_first_tokens=64), n, seed=n)
        for n in lengths
    ]
    batch = singles[0].merge(singles)
    assert isinstance(batch, BatchTurboQuantKVCache)
    assert batch.offset.tolist() == list(lengths)
    assert batch.left_padding.tolist() == [0, 280, 160]
    for seed in range(70):
        queries, new = noise(1, seed, 3, HEADS), sides(1, 40 + seed, 3)
        mask = batch.make_mask(1, window_size=90 if seed % 2 else None)
        given = batch.update_and_fetch(*new)
        found = batch.attend(queries, *given, SCALE, mask)
        assert found is not None
        assert off(found, plain(queries, *batch.keys_and_values(), mask)) < 1e-5
        for i, single in enumerate(singles):
            seen = single.make_mask(1, window_size=90 if seed % 2 else None)
            given = single.update_and_fetch(*(side[i : i + 1] for side in new))
            alone = single.attend(queries[i : i + 1], *given, SCALE, seen)
            assert off(found[i : i + 1], alone) < 1e-6
    for i, single in enumerate(singles):
        assert same(batch.extract(i), single)


def test_right_padding_is_not_attended() -> None:
    lengths, chunks = (150, 4, 90), (100, 50)
    made = [fed(TurboQuantKVCache("8", min_quantize_tokens=0), n, seed=n) for n in (70, 10, 64)]
    batch = made[0].merge(made)
    keys, values = sides(150, 7, 3)
    batch.prepare(lengths=lengths, right_padding=[150 - n for n in lengths])
    start = 0
    for tokens in chunks:
        mask = batch.make_mask(tokens)
        some = (keys[:, :, start : start + tokens], values[:, :, start : start + tokens])
        fetched = batch.update_and_fetch(*some)
        queries = noise(tokens, 70 + start, 3, HEADS)
        assert mask.shape[3] == fetched[0].shape[2]
        together = plain(queries, *fetched, mask)
        for i, single in enumerate(made):
            count = max(0, min(tokens, lengths[i] - start))
            if count:
                own = single.update_and_fetch(*(side[i : i + 1, :, :count] for side in some))
                seen = mx.tril(mx.ones((count, own[0].shape[2]), mx.bool_), own[0].shape[2] - count)
                alone = plain(queries[i : i + 1, :, :count], *own, seen)
                assert off(together[i : i + 1, :, :count], alone) < 1e-5
        start += tokens
    batch.finalize()
    assert batch.offset.tolist() == [220, 14, 154]
    for i, single in enumerate(made):
        assert same(batch.extract(i), single)


def same(one: TurboQuantKVCache, other: TurboQuantKVCache) -> bool:
    """Return whether two caches are bit-identical."""
    pairs = zip(one.keys_and_values(), other.keys_and_values(), strict=True)
    counts = [[store.offset for store in cache._stores] for cache in (one, other)]
    return counts[0] == counts[1] and all(bool(mx.array_equal(a, b)) for a, b in pairs)


def test_extend_filter_and_extract_keep_rows_separate() -> None:
    def single(n: int) -> TurboQuantKVCache:
        return fed(TurboQuantKVCache("turbo4", min_quantize_tokens=0), n, seed=n)

    first = single(200)
    batch = first.merge([first, single(100)])
    batch.extend(first.merge([single(300)]))
    batch.filter([2, 0])
    batch.update_and_fetch(*sides(1, 50, 2))
    assert same(first, single(200)), "a batch is written to, and what it was made of is not"
    taken = batch.extract(1)
    batch.update_and_fetch(*sides(100, 51, 2))
    assert (taken.offset, batch.offset.tolist()) == (201, [401, 301])
    taken.update_and_fetch(*sides(70, 52))
    expected = single(200)
    expected.update_and_fetch(*(side[1:] for side in sides(1, 50, 2)))
    expected.update_and_fetch(*(side[1:] for side in sides(100, 51, 2)))
    assert same(batch.extract(1), expected)
    assert batch.trim(2) == 2
    assert batch.offset.tolist() == [399, 299]
    assert batch.nbytes == sum(batch.extract(i).nbytes for i in (0, 1))


def test_merge_copies_nothing() -> None:
    made = [
        fed(TurboQuantKVCache("8", min_quantize_tokens=0, capacity=n), n, seed=n)
        for n in (2_048, 256)
    ]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    batch = made[0].merge(made)
    assert mx.get_peak_memory() <= before
    assert batch.nbytes == sum(single.nbytes for single in made)


# ---- files

KINDS: dict[str, Callable[[], Any]] = {
    "long": lambda: fed(
        TurboQuantKVCache("k8v4", min_quantize_tokens=0, raw_first_tokens=64), 300, 1, 1
    ),
    "short": lambda: fed(TurboQuantKVCache("turbo2.5"), 70, 1),
    "kivi": lambda: fed(TurboQuantKVCache("kivi4/turbo3.5", min_quantize_tokens=0), 128),
    "one side": lambda: fed(TurboQuantKVCache("raw/4", min_quantize_tokens=0), 130),
    "window": lambda: fed(TurboQuantKVCache("8", max_size=256, keep=100), 500, 1, 1),
}


@pytest.mark.parametrize("name", KINDS)
def test_saved_cache_loads_with_same_state(name: str, tmp_path: Path) -> None:
    cache = KINDS[name]()
    batch = cache.merge([cache, cache])
    save_prompt_cache(tmp_path / "it.safetensors", [cache, batch, TurboQuantKVCache("4")])
    loaded, both, empty = load_prompt_cache(tmp_path / "it.safetensors")
    assert (type(loaded), type(both)) == (TurboQuantKVCache, BatchTurboQuantKVCache)
    assert same(loaded, cache)
    assert same(both.extract(1), cache)
    assert empty.empty()
    for given in (loaded, both.extract(0)):
        settings = (given.codec, given.first, given.max_size, given.keep, given.offset)
        assert settings == (cache.codec, cache.first, cache.max_size, cache.keep, cache.offset)
        assert given.nbytes == cache.nbytes
    for seed in range(70):
        found, _ = step(loaded, seed)
        assert off(found, step(cache, seed)[0]) == 0
    assert same(loaded, cache)


def test_file_with_unknown_codec_is_refused(tmp_path: Path) -> None:
    cache = KINDS["long"]()
    cache.scheme = type(cache.scheme)("turbo99", cache.scheme.keys, cache.scheme.values)
    save_prompt_cache(tmp_path / "it.safetensors", [cache])
    with pytest.raises(CacheFileError, match="'turbo99' is not a codec"):
        load_prompt_cache(tmp_path / "it.safetensors")


# ---- what is refused


@pytest.mark.parametrize(
    ("codec", "settings", "error", "words"),
    [
        ("turbo9", {}, SettingError, "'turbo9' is not a codec"),
        ("raw", {}, SettingError, "raw is not a codec; use KVCache"),
        ("turbo3c", {}, SettingError, "'turbo3c' is not a codec"),
        ("4", {"min_quantize_tokens": -1}, SettingError, "must be at least 0, not -1"),
        ("4", {"max_size": 127}, ValueError, "max_size must be at least 128, not 127"),
        ("4", {"max_size": 128, "keep": 128}, ValueError, r"keep must lie in 0\.\.127, not 128"),
        ("4", {"capacity": 0}, ValueError, "capacity must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(
    codec: str, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        TurboQuantKVCache(codec, **settings)


def test_invalid_shapes_are_refused() -> None:
    cache = TurboQuantKVCache("4", min_quantize_tokens=0)
    with pytest.raises(ValueError, match="do not divide a head of 80"):
        cache.update_and_fetch(mx.zeros((1, 2, 3, 80)), mx.zeros((1, 2, 3, 80)))
    with pytest.raises(ValueError, match="merge caches of one"):
        cache.update_and_fetch(*sides(3, rows=2))
    fed(cache, 100)
    with pytest.raises(ValueError, match="kv_heads is 3"):
        cache.update_and_fetch(noise(1, heads=3), noise(1, heads=3))
    assert cache.offset == 100
    large = sides(64)
    large[0][0, 0, 3, 5] = 1e6
    with pytest.raises(SettingError, match=r"affine4 cannot store values as large as 1e\+06"):
        cache.update_and_fetch(*large)
    with pytest.raises(ValueError, match="same codec, not of"):
        cache.merge([TurboQuantKVCache("4"), TurboQuantKVCache("8")])
    batch = cache.merge(
        [TurboQuantKVCache("4", max_size=256), TurboQuantKVCache("4", max_size=256)]
    )
    with pytest.raises(ValueError, match="pad on the right"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(ValueError, match="needs the lengths"):
        batch.prepare(right_padding=[1, 0])


# ---- short sequences


def roundtrip(side: mx.array, codec: Any) -> mx.array:
    return codec.encode(side, devices.current()).dequantize(devices.current()).astype(side.dtype)


def forms(cache: TurboQuantKVCache, whole: tuple[mx.array, mx.array], codec: str) -> str:
    """Return a letter per token: r if raw, c if quantized; equal for keys and values."""
    found = []
    scheme = parse_scheme(codec)
    held = zip(cache.keys_and_values(), whole, (scheme.keys, scheme.values), strict=True)
    for side, given, own in held:
        coded = roundtrip(given, own)
        raw = (side == given).all(axis=(0, 1, 3)).tolist()
        same = (side == coded).all(axis=(0, 1, 3)).tolist()
        assert all(map(max, zip(raw, same, strict=True))), "neither as given nor as encoded"
        found.append("".join("r" if each else "c" for each in raw))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("codec", ["turbo4", "8"])
@pytest.mark.parametrize("tokens", [1, 63, 255, 256, 257, 320, 512])
def test_only_prompts_above_min_tokens_are_quantized(tokens: int, codec: str) -> None:
    whole = sides(tokens)
    cache = TurboQuantKVCache(codec)
    mx.eval(cache.update_and_fetch(*whole))
    coded = 0 if tokens < 256 else tokens - tokens % 64
    assert forms(cache, whole, codec) == "c" * coded + "r" * (tokens - coded)
    assert (cache.offset, cache.size()) == (tokens, tokens)


def test_512_tokens_in_8_bits_match_vllm_mlx_nbytes() -> None:
    """8 heads of 64: 64 codes, a scale and a bias. 256 raw tokens would add 802,816 bytes."""
    cache = TurboQuantKVCache("8", capacity=512)
    keys = mx.random.normal((1, 8, 512, 64), key=mx.random.key(0)).astype(mx.float16)
    mx.eval(cache.update_and_fetch(keys, keys))
    assert cache.head.nbytes + cache.codes.nbytes == 512 * 8 * 2 * (64 + 4) == 557_056


chunks = st.lists(st.one_of(st.just(1), st.integers(1, 200)), min_size=1, max_size=40)


@hypothesis.given(
    chunks=chunks,
    least=st.one_of(st.integers(0, 400), st.just(256)),
    first=st.sampled_from([0, 64, 128, 320]),
    cut=st.integers(0, 200),
    bound=st.sampled_from([None, None, 640, 1_024]),
)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_only_sequences_above_min_tokens_are_quantized_for_any_chunks(
    chunks: list[int], least: int, first: int, cut: int, bound: int | None
) -> None:
    """The first tokens stay raw; of a long sequence all but the last two blocks are encoded."""
    cache = TurboQuantKVCache(
        "8", min_quantize_tokens=least, raw_first_tokens=first, max_size=bound
    )
    keys, values = sides(8_200)
    end = 0
    for tokens in [*chunks, -cut, 70]:
        if tokens <= 0:
            end -= cache.trim(-tokens)
        else:
            new = keys[:, :, end : end + tokens], values[:, :, end : end + tokens]
            mx.eval(cache.update_and_fetch(*new))
            end += tokens
        assert cache.offset == end
        if bound is not None and cache.size() < end:
            assert cache.size() <= bound
            return
        mx.eval(cache.state)
        if cache.empty() or not end:
            continue
        found = forms(cache, (keys[:, :, :end], values[:, :, :end]), "8")
        assert "c" not in found[: cache.first]
        if tokens > 0 and end >= least + 128:
            assert "r" not in found[cache.first : end - 128]
        if end < least and "c" not in found:
            assert cache.codes.offset == 0
    if end < least and cut == 0:
        assert cache.codes.offset == 0


@pytest.mark.parametrize("prompt", [60, 200, 255])
def test_sequence_is_quantized_once_longer_than_min_tokens(prompt: int) -> None:
    cache = fed(TurboQuantKVCache("turbo4"), prompt)
    for seed in range(200):
        found, wanted = step(cache, seed)
        assert off(found, wanted) < 2e-5
    assert cache.codes.offset >= 256
    assert cache.head.nbytes == 0


def test_batch_and_file_may_mix_raw_and_quantized_sequences(tmp_path: Path) -> None:
    singles = [fed(TurboQuantKVCache("turbo4"), n, seed=n) for n in (70, 300, 250)]
    batch = singles[0].merge(singles)
    for seed in range(80):
        found, wanted = step(batch, seed, rows=3)
        assert off(found, wanted) < 2e-5
    assert [row.codes.offset > 0 for row in batch.rows] == [False, True, True]
    path = str(tmp_path / "short.safetensors")
    save_prompt_cache(path, [batch.rows[0]])
    (loaded,) = load_prompt_cache(path)
    fed(loaded, 300)
    assert loaded.codes.offset >= 256
