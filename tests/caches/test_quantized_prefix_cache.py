"""PrefixCache with codecs: size by formula, bounded, near full precision."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as theirs
from rounding import assert_same_codes

from penstock import (
    KVCache,
    PrefixCache,
    QuantizedKVCache,
    RotatingKVCache,
    SettingError,
    TurboQuantKVCache,
    attach,
    load,
)
from penstock.attention import devices
from penstock.kv import columns as col
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.tails import LayerShape, piece_bytes
from penstock.prefix.prefixes import BYTES_PER_REMEMBERED
from penstock.recall import MODEL_PATH
from penstock_bench.models import LlamaShape, ModelChoice, bench_model
from penstock_bench.recall import dialogue

SHAPE = LlamaShape(
    layers=3, hidden_size=128, intermediate_size=128, query_heads=4, kv_heads=2, head_dim=64
)
BLOCK, FIRST = 64, 128
LAYERS, HEADS, DIM = 16, 4, 64
WIDE = LAYERS * HEADS * 2 * DIM * 4
"""Bytes of a token of `noise` in float32."""
SHAPE_OF_NOISE = LayerShape(HEADS, DIM, DIM, mx.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    return bench_model(ModelChoice.RANDOM, SHAPE).model


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Disable MLX's buffer cache, which may return larger buffers than requested."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(tokens)]


def quantized(codec: str | None, limit: int | str = "200MB", **settings: Any) -> PrefixCache:
    settings = {
        "kv_cache_min_quantize_tokens": 0,
        "kv_cache_raw_first_tokens": FIRST,
        "block_size": BLOCK,
        **settings,
    }
    return PrefixCache(limit, kv_cache_quantization=codec, **settings)


def noise(
    tokens: int, kind: Any = KVCache, layers: int = LAYERS, dtype: mx.Dtype = mx.float32
) -> list[Any]:
    caches = []
    for layer in range(layers):
        keys, values = (
            mx.random.normal((1, HEADS, tokens, DIM), key=mx.random.key(2 * layer + i))
            for i in (0, 1)
        )
        caches.append(kind())
        caches[-1].update_and_fetch(keys.astype(dtype), values.astype(dtype))
        mx.eval(caches[-1].state)
    return caches


def coded_bytes(scheme: str, tokens: int, layers: int = LAYERS) -> int:
    return parse_scheme(scheme).token_bits(DIM, DIM, 32) * HEADS * layers * tokens // 8


def kv_bytes(prefix: PrefixCache) -> int:
    return sum(node.segment.nbytes for node in prefix.tree)


def forms(prefix: PrefixCache) -> list[tuple[int, int, set[type]]]:
    return sorted(
        (node.start, node.end, {type(side) for layer in node.segment.layers for side in layer})
        for node in prefix.tree
    )


def text(model: Any, prompt: list[int], caches: list[Any], tokens: int = 24) -> list[int]:
    steps = generate_step(mx.array(prompt), model, prompt_cache=caches, max_tokens=tokens)
    return [int(token) for token, _ in steps]


def chances(model: Any, prompt: list[int], caches: list[Any]) -> mx.array:
    logits = model(mx.array([prompt]), cache=caches)[0, -1]
    return logits - mx.logsumexp(logits)


# ---- what is said


@pytest.mark.parametrize("codec", ["8", "turbo8", "kivi8/turbo8"])
def test_eight_bits_match_full_precision_text(codec: str) -> None:
    """The embedded model, with prompts that end inside and past the stored prefix."""
    model, tokenizer = load(MODEL_PATH)
    told = dialogue(1, tokens=600, facts=6)
    first, *others = (
        list(tokenizer.apply_chat_template(told.ask(asked), add_generation_prompt=True))
        for asked in told.questions[:4]
    )
    prefix = quantized(codec)
    caches = theirs.make_prompt_cache(model)
    more = [*text(model, first, caches), *prompt_of(150)]
    text(model, more, caches)
    assert prefix.store([*first, *more], caches).refused is None
    for prompt in (first, *others):
        caches, rest = prefix.fetch(prompt, capacity=len(prompt) + 24)
        assert caches is not None
        assert len(prompt) - len(rest) >= 512
        assert type(caches[0]) is theirs.KVCache
        assert text(model, rest, caches) == text(model, prompt, theirs.make_prompt_cache(model))
        prefix.check()


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [("8", 0.0, 1e-4), ("turbo8", 0.0, 1e-4), ("k8v4", 1e-7, 1e-2), ("2", 1e-3, 10.0)],
)
def test_next_token_distribution_is_near_full_precision(
    codec: str, least: float, most: float, model: Any
) -> None:
    """Kullback-Leibler divergence from full precision; two bits are the negative control."""
    prompt = prompt_of(700)
    caches = theirs.make_prompt_cache(model)
    wanted = chances(model, prompt, caches)
    prefix = quantized(codec)
    prefix.store(prompt, caches)
    caches, rest = prefix.fetch(prompt)
    found = chances(model, rest, caches or [])
    # In float64, in which a sum over all tokens is not below zero by rounding.
    p, q = (np.array(each, np.float64) for each in (wanted, found))
    p, q = (each - np.log(np.exp(each).sum()) for each in (p, q))
    assert least <= float(np.sum(np.exp(p) * (p - q))) <= most


# ---- what is held


@pytest.mark.parametrize("codec", ["4", "k8v4", "turbo2.5", "kivi4/turbo3", "raw/4"])
def test_nbytes_match_formula_without_dequantized_copy(codec: str) -> None:
    caches = noise(1_000)
    prefix = quantized(codec)
    gc.collect()
    before = mx.get_active_memory()
    stored = prefix.store(range(1_000), caches)
    wanted = FIRST * WIDE + coded_bytes(codec, 960 - FIRST)
    assert (stored.new_tokens, stored.held_tokens) == (960, 960)
    assert kv_bytes(prefix) == wanted
    assert mx.get_active_memory() - before == wanted
    del caches
    gc.collect()
    assert mx.get_active_memory() - before == wanted - LAYERS * 1_024 * HEADS * 2 * DIM * 4
    prefix.check()


def test_first_tokens_stay_raw() -> None:
    prefix = quantized("4", kv_cache_raw_first_tokens=100)
    prefix.store(range(300), noise(300))
    assert forms(prefix) == [(0, 128, {mx.array}), (128, 256, {Coded})]
    prefix = quantized("4", kv_cache_raw_first_tokens=300)
    prefix.store(range(300), noise(300))
    assert forms(prefix) == [(0, 256, {mx.array})]
    prefix.store(range(600), noise(600))
    assert forms(prefix) == [(0, 256, {mx.array}), (256, 320, {mx.array}), (320, 576, {Coded})]
    prefix = quantized("4", kv_cache_raw_first_tokens=0)
    prefix.store(range(300), noise(300))
    assert forms(prefix) == [(0, 256, {Coded})]
    prefix.check()


def test_only_used_tokens_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = quantized("4")
    encoded: list[int] = []
    encode = type(parse_scheme("4").keys).encode  # type: ignore[arg-type]

    def counted(self: Any, x: mx.array, ops: CodeOps) -> Coded:
        if x.shape[2] > 1:  # else it is asked for its shapes
            encoded.append(x.shape[2])
        return encode(self, x, ops)

    monkeypatch.setattr(type(parse_scheme("4").keys), "encode", counted)
    prefix.store(range(400), noise(900, layers=1))  # mlx-lm's buffers are longer than what is used
    assert sum(encoded) == 2 * (384 - FIRST)
    encoded.clear()
    assert prefix.store(range(400), noise(900, layers=1)).new_tokens == 0
    assert encoded == []
    assert prefix.store(range(700), noise(700, layers=1)).new_tokens == 640 - 384
    assert sum(encoded) == 2 * (640 - 384)


def test_layers_can_be_skipped() -> None:
    prefix = quantized("4", kv_cache_skip_layers=(1,))
    prefix.store(range(400), noise(400, layers=3))
    (node,) = (node for node in prefix.tree if node.start)
    assert [type(keys) for keys, _ in node.segment.layers] == [Coded, mx.array, Coded]
    caches, _ = prefix.fetch(range(400))
    for cache, wanted in zip(caches or [], noise(400, layers=3), strict=True):
        same = mx.array_equal(cache.keys[:, :, :384], wanted.keys[:, :, :384])
        assert bool(same) == (cache is (caches or [])[1])


def test_values_too_large_for_scale_stay_raw_and_counted() -> None:
    caches = noise(400, layers=2)
    caches[1].keys[0, 0, 300, 5] = 1e6
    prefix = quantized("turbo4")
    assert prefix.store(range(400), caches).refused is None
    side = HEADS * DIM * (384 - FIRST)
    wanted = 2 * FIRST * HEADS * 2 * DIM * 4 + coded_bytes("turbo4", 384 - FIRST, 2)
    wanted += side * 4 - side * 4 // 8 - side // DIM * 2
    assert kv_bytes(prefix) == wanted
    prefix.check()
    caches, _ = prefix.fetch(range(400))
    assert (caches or [])[1].keys[0, 0, 300, 5].item() == 1e6


def test_raw_fallback_without_memory_is_refused() -> None:
    """Known only after encoding: nothing is stored and nothing is evicted."""
    tokens = 2_048
    as_coded = 2 * FIRST * HEADS * 2 * DIM * 4 + coded_bytes("turbo4", tokens - FIRST, 2)
    as_is = tokens * 2 * HEADS * 2 * DIM * 4
    for limit, fits in ((limit_for(as_is + 20_000), True), (limit_for(as_coded + 20_000), False)):
        caches = noise(tokens, layers=2)
        for cache in caches:
            cache.keys[0, 0, 300, 5] = cache.values[0, 0, 300, 5] = 1e6
        prefix = quantized("turbo4", limit)
        refused = prefix.store(range(tokens), caches).refused
        assert (refused is None) == fits
        assert kv_bytes(prefix) == (as_is if fits else 0)
        prefix.check()
        assert quantized("turbo4", limit).store(range(tokens), noise(tokens, layers=2)).new_tokens


def limit_for(kv_bytes: int) -> int:
    """Return a limit with room for these bytes, encoding buffers and the index."""
    return int(
        (kv_bytes + piece_bytes([SHAPE_OF_NOISE], devices.current().lanes))
        / (1 - 500 / BYTES_PER_REMEMBERED)
    )


def test_eviction_counts_coded_bytes() -> None:
    one = FIRST * WIDE + coded_bytes("4", 960 - FIRST)
    limit = limit_for(3 * one + 3 * 10_000)
    prefix = quantized("4", limit)
    for start in range(0, 6_000, 1_000):
        assert prefix.store(range(start, start + 1_000), noise(1_000)).refused is None
        prefix.check()
        assert prefix.nbytes <= limit
    assert prefix.counts.evicted_bytes + kv_bytes(prefix) == 6 * one
    assert kv_bytes(prefix) == 3 * one


def test_admission_counts_quantized_bytes() -> None:
    """In full precision it would not fit."""
    limit = limit_for(FIRST * WIDE + coded_bytes("4", 1_984 - FIRST) + 12_000)
    assert limit < 1_984 * WIDE
    assert quantized(None, limit).store(range(2_000), noise(2_000)).refused is not None
    assert quantized("4", limit).store(range(2_000), noise(2_000)).new_tokens == 1_984
    short = quantized("4", limit - 6_000)
    assert short.store(range(2_000), noise(2_000)).refused is not None
    assert len(short) == 0
    short.check()


@pytest.mark.parametrize("codec", ["4", "8", "turbo4", "kivi4"])
def test_storing_peak_memory_is_bounded(codec: str) -> None:
    caches = noise(4_096)
    prefix = quantized(codec)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prefix.store(range(4_096), caches)
    peak = mx.get_peak_memory() - before
    assert peak <= 1.1 * kv_bytes(prefix) + piece_bytes([SHAPE_OF_NOISE], devices.current().lanes)


# ---- what is fetched


def test_dequantization_has_small_peak_and_writable_result() -> None:
    prefix = quantized("4")
    prefix.store(range(4_096), noise(4_096))
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches, rest = prefix.fetch(range(4_097), capacity=4_096)
    peak = mx.get_peak_memory() - before
    assert mx.get_active_memory() - before == 4_096 * WIDE
    assert peak <= 4_096 * WIDE + piece_bytes([SHAPE_OF_NOISE], devices.current().lanes)
    assert rest == [4_096]
    for cache in caches or []:
        cache.keys[...] = 7.0
        mx.eval(cache.keys)
    again, _ = prefix.fetch(range(4_097))
    assert float(mx.abs((again or [])[0].keys[:, :, :4_096] - 7.0).min()) > 0


def test_only_matched_tokens_are_dequantized() -> None:
    prefix = quantized("kivi4")
    prefix.store(range(2_048), noise(2_048))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    caches, rest = prefix.fetch([*range(450), 1, 1], capacity=452)
    assert rest == [448, 449, 1, 1]
    assert mx.get_active_memory() - before == 452 * WIDE
    assert mx.get_peak_memory() - before <= 452 * WIDE + piece_bytes(
        [SHAPE_OF_NOISE], devices.current().lanes
    )
    codec = parse_scheme("kivi4").keys
    assert codec is not None
    wanted = codec.encode(
        noise(2_048, layers=1)[0].keys[:, :, FIRST:448], devices.current()
    ).dequantize(devices.current())
    found = (caches or [])[0].keys[:, :, FIRST:448]
    assert mx.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("kind", [KVCache, theirs.KVCache, lambda: RotatingKVCache(2_048, 16)])
def test_fetched_cache_keeps_class_and_dtype(kind: Any, dtype: mx.Dtype) -> None:
    prefix = quantized("8", kv_cache_raw_first_tokens=0)
    stored = noise(300, kind, 2, dtype)
    assert prefix.store(range(300), stored).refused is None
    caches, rest = prefix.fetch(range(300), capacity=400)
    assert caches is not None
    for cache, before in zip(caches, stored, strict=True):
        assert type(cache) is type(before)
        assert (cache.offset, len(rest)) == (256, 44)
        for side, wide in zip(cache.keys_and_values(), before.keys_and_values(), strict=True):
            assert side.dtype == dtype
            assert col.columns(side) == 256
            assert float(mx.abs(side - wide[:, :, :256]).max()) < 0.06
    assert prefix.store(range(300), noise(300, kind, 2, mx.float16)).refused is None or (
        dtype != mx.float16
    )


def test_tenants_may_use_models_of_different_shapes() -> None:
    """As in mlx-lm's server, which passes the model name as salt."""
    prefix = quantized("4", kv_cache_raw_first_tokens=0)
    prefix.store(range(256), noise(256, layers=2), salt="a")
    prefix.store(range(256), noise(256, layers=3, dtype=mx.float16), salt="b")
    assert kv_bytes(prefix) == coded_bytes("4", 256, 2) + coded_bytes("4", 256, 3)
    for salt, dtype in (("a", mx.float32), ("b", mx.float16)):
        caches, _ = prefix.fetch(range(257), salt=salt)
        assert {cache.keys.dtype for cache in caches or []} == {dtype}


# ---- what stays in codes


@pytest.mark.parametrize("codec", ["turbo4", "k8v4", "kivi5/turbo3.5", "raw/4"])
def test_fetch_can_return_quantized_caches(codec: str) -> None:
    prefix = quantized(codec)
    prefix.store(range(2_000), noise(2_000))
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches, rest = prefix.fetch(range(2_000), capacity=2_048, dequantize=False)
    assert caches is not None
    assert rest == list(range(1_984, 2_000))
    peak = mx.get_peak_memory() - before
    tail = LAYERS * HEADS * 2 * DIM * 4 * 64
    held = FIRST * WIDE + coded_bytes(codec, 2_048 - FIRST) + tail
    assert sum(cache.nbytes for cache in caches) == held
    assert mx.get_active_memory() - before == held
    assert peak <= held + piece_bytes([SHAPE_OF_NOISE], devices.current().lanes)
    wide, _ = prefix.fetch(range(2_000))
    for cache, plain in zip(caches, wide or [], strict=True):
        assert (type(cache), cache.codec) == (TurboQuantKVCache, parse_scheme(codec).name)
        assert (cache.offset, cache.size(), cache.growths) == (1_984, 1_984, 0)
        for side, other in zip(cache.keys_and_values(), plain.keys_and_values(), strict=True):
            assert float(mx.abs(side - other).max()) < 1e-6
        cache.update_and_fetch(*(mx.ones((1, HEADS, 64, DIM)) for _ in range(2)))
        assert cache.codes.growths == 0
    again, _ = prefix.fetch(range(2_000))
    for cache, plain in zip(again or [], wide or [], strict=True):
        assert mx.array_equal(cache.keys, plain.keys), "what is fetched is the caller's own"
    prefix.check()


def test_only_matched_codes_are_fetched() -> None:
    prefix = quantized("kivi4")
    prefix.store(range(1_024), noise(1_024))
    for asked, head, codes in (([*range(450), 1], 128, 320), ([*range(100), 1], 64, 0)):
        caches, _ = prefix.fetch(asked, dequantize=False)
        assert caches is not None
        counts = [(cache.head.offset, cache.codes.offset, cache.tail.offset) for cache in caches]
        assert counts == [(head, codes, 0)] * LAYERS
        caches[0].update_and_fetch(*(mx.ones((1, HEADS, 200, DIM)) for _ in range(2)))
        assert caches[0].head.offset == 128


def test_fetched_codes_are_stored_unchanged() -> None:
    """A conversation that is never dequantized: each turn is encoded and stored once."""
    prefix, whole = quantized("turbo4"), noise(1_000, layers=2)

    def read(caches: list[Any], start: int, stop: int) -> list[Any]:
        for cache, plain in zip(caches, whole, strict=True):
            cache.update_and_fetch(*(s[:, :, start:stop] for s in plain.keys_and_values()))
        return caches

    cold = read(
        [TurboQuantKVCache("turbo4", min_quantize_tokens=0, raw_first_tokens=FIRST) for _ in whole],
        0,
        500,
    )
    assert prefix.store(range(500), cold).new_tokens == 448
    caches, _ = prefix.fetch(range(1_000), dequantize=False)
    assert (caches or [])[0].offset == 448
    read(caches or [], 448, 750)
    read(caches or [], 750, 1_000)
    before = [mx.array(side) for side in (caches or [])[1].keys_and_values()]
    assert prefix.store(range(1_000), caches or []).new_tokens == 960 - 448
    assert kv_bytes(prefix) == FIRST * 2 * HEADS * 2 * DIM * 4 + coded_bytes("turbo4", 832, 2)
    prefix.check()
    plainly = quantized("turbo4")
    plainly.store(range(1_000), whole)
    for one, other in ((False, True), (True, False)):
        found, _ = prefix.fetch(range(1_000), dequantize=one)
        wanted, _ = plainly.fetch(range(1_000), dequantize=other)
        for number in (0, 1):
            held = (found or [])[1].keys_and_values()[number]
            assert float(mx.abs(held - (wanted or [])[1].keys_and_values()[number]).max()) < 1e-6
            assert float(mx.abs(held - before[number][:, :, :960]).max()) < 1e-6
    assert type((prefix.fetch(range(1_000))[0] or [])[0]) is KVCache
    gc.collect()
    held_bytes = mx.get_active_memory()
    del caches, cold
    gc.collect()
    assert mx.get_active_memory() < held_bytes
    prefix.check()


@pytest.mark.parametrize("codec", ["turbo4", "k8v4"])
@pytest.mark.parametrize(
    "read, gone, more", [(100, 0, 60), (300, 190, 59), (20, 0, 200), (0, 0, 140)]
)
def test_raw_first_tokens_in_tail_are_stored_raw(
    codec: str, read: int, gone: int, more: int
) -> None:
    """Single tokens wait in the tail, also those that stay raw."""
    prefix, plainly, whole = quantized(codec), quantized(codec), noise(400, layers=2)
    total = read - gone + more
    caches = [
        TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=FIRST) for _ in whole
    ]
    for cache, plain in zip(caches, whole, strict=True):
        sides = plain.keys_and_values()
        if read:
            cache.update_and_fetch(*(side[:, :, :read] for side in sides))
            assert cache.trim(gone) == gone
        for at in range(read - gone, total):
            cache.update_and_fetch(*(side[:, :, at : at + 1] for side in sides))
    assert caches[0].tail.offset
    blocks = total // BLOCK * BLOCK
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert prefix.store(range(total), caches).new_tokens == blocks
    raw = FIRST * 2 * HEADS * 2 * DIM * 4
    assert mx.get_peak_memory() - before <= kv_bytes(prefix) + max(
        raw, piece_bytes([SHAPE_OF_NOISE], devices.current().lanes)
    )
    plainly.store(range(total), whole)
    found, wanted = (each.fetch(range(total + 1))[0] or [] for each in (prefix, plainly))
    for one, other in zip(found, wanted, strict=True):
        for side, same in zip(one.keys_and_values(), other.keys_and_values(), strict=True):
            assert mx.array_equal(side, same)
    prefix.check()


def test_values_too_large_in_tail_are_refused() -> None:
    prefix, cache = (
        quantized("4"),
        TurboQuantKVCache("4", min_quantize_tokens=0, raw_first_tokens=FIRST),
    )
    cache.update_and_fetch(*(mx.ones((1, HEADS, 128, DIM)) for _ in range(2)))
    assert prefix.store(range(128), [cache]).new_tokens == 128
    for _ in range(64):
        cache.update_and_fetch(*(mx.full((1, HEADS, 1, DIM), 1e6) for _ in range(2)))
    refused = prefix.store(range(192), [cache]).refused
    assert refused is not None
    assert "affine4 cannot store values as large as 1e+06" in refused
    assert prefix.counts.refused == 1
    prefix.check()
    assert prefix.fetch(range(200))[1] == list(range(128, 200))


def test_quantized_kv_for_skipped_layer_is_refused() -> None:
    prefix = quantized("4", kv_cache_skip_layers=(1,))
    made = noise(
        300, lambda: TurboQuantKVCache("4", min_quantize_tokens=0, raw_first_tokens=FIRST), 2
    )
    refused = prefix.store(range(300), made).refused
    assert refused is not None
    assert refused.startswith("layer 1: it is a TurboQuantKVCache, but kv_cache_skip_layers")
    assert prefix.store(range(300), [made[0], *noise(300, layers=1)]).new_tokens == 256
    for asked in (300, 100):  # of the first tokens alone all layers are raw
        caches, _ = prefix.fetch(range(asked), dequantize=False)
        assert [type(cache) for cache in caches or []] == [TurboQuantKVCache, KVCache]


def test_contiguous_first_tokens_are_stored_without_copy() -> None:
    """They are cut as views; only parts in the tail are joined first."""
    cache, raw = (
        TurboQuantKVCache("4", min_quantize_tokens=0, raw_first_tokens=FIRST),
        FIRST * HEADS * 2 * DIM * 4,
    )
    cache.update_and_fetch(*(mx.ones((1, HEADS, FIRST, DIM)) for _ in range(2)))
    assert quantized("4", 2 * raw - 1).store(range(FIRST), [cache]).new_tokens == FIRST
    cache.trim(28)
    for _ in range(28):
        cache.update_and_fetch(*(mx.ones((1, HEADS, 1, DIM)) for _ in range(2)))
    assert "do not fit" in str(quantized("4", 2 * raw - 1).store(range(FIRST), [cache]).refused)
    assert quantized("4", 2 * raw + 20_000).store(range(FIRST), [cache]).new_tokens == FIRST


def test_prefill_keeps_caches_quantized_across_turns(model: Any) -> None:
    attach(model)
    prefix, prompt = quantized("4"), prompt_of(1_600)

    def make() -> list[Any]:
        return [
            TurboQuantKVCache("4", min_quantize_tokens=0, raw_first_tokens=FIRST)
            for _ in model.layers
        ]

    held = []
    for end in (1_000, 1_600):
        caches, rest = prefix.prefill(model, prompt[:end], make, step_size=256, dequantize=False)
        assert {type(cache) for cache in caches} == {TurboQuantKVCache}
        held.append((caches[0].offset, sum(cache.nbytes for cache in caches)))
        assert len(rest) == (end - 1) % BLOCK + 1
    one = held[1][0] * parse_scheme("4").token_bits(64, 64, 32) * 2 * SHAPE.layers // 8
    assert held[1][1] < 2 * one, "full precision takes seven times as much"
    wide = quantized("4")
    wide.prefill(model, prompt, lambda: [KVCache() for _ in model.layers])
    sides = [(each.fetch(prompt)[0] or [])[0].keys_and_values() for each in (prefix, wide)]
    for found, wanted in zip(*sides, strict=True):
        found, wanted = found[:, :, FIRST:], wanted[:, :, FIRST:]
        assert_same_codes(found, wanted, bits=4, group_size=64)
        with pytest.raises(AssertionError, match="by more than one code"):
            assert_same_codes(found[:, :, 1:], wanted[:, :, :-1], bits=4, group_size=64)


@pytest.mark.parametrize("codec", ["turbo4", "kivi4"])
def test_quantized_and_dequantized_caches_give_equal_text(codec: str, model: Any) -> None:
    attach(model)
    prompt = prompt_of(650)
    made = [
        TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=FIRST)
        for _ in model.layers
    ]
    text(model, prompt, made)
    prefix = quantized(codec)
    prefix.store(prompt, made)
    said = []
    for dequantize in (False, True):
        caches, rest = prefix.fetch(prompt, dequantize=dequantize)
        assert len(rest) == 10
        said.append(text(model, rest, caches or [], 40))
    assert said[0] == said[1]
    assert made[0]._in_place


def test_raw_layers_keep_their_class() -> None:
    prefix = quantized("4", kv_cache_skip_layers=(0,))
    stored = noise(400, layers=3)
    stored[2].keys[0, 0, 300, 5] = 1e6
    prefix.store(range(400), stored)
    caches, _ = prefix.fetch(range(400), dequantize=False)
    kinds = [type(cache) for cache in caches or []]
    assert kinds == [KVCache, TurboQuantKVCache, KVCache]
    assert prefix.store([*range(384), *range(100)], noise(484, layers=3)).refused is None
    windows = quantized("4")
    windows.store(range(400), noise(400, lambda: RotatingKVCache(2_048), 1))
    caches, _ = windows.fetch(range(400), dequantize=False)
    assert type((caches or [])[0]) is RotatingKVCache


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (
            lambda: TurboQuantKVCache("8", min_quantize_tokens=0, raw_first_tokens=FIRST),
            "holds affine8 after 128",
        ),
        (lambda: TurboQuantKVCache("4"), "after 0 tokens, from 256 tokens on, which differs"),
        (
            lambda: TurboQuantKVCache(
                "4", min_quantize_tokens=0, raw_first_tokens=FIRST, max_size=512
            ),
            "with a window",
        ),
    ],
)
def test_codes_of_other_codec_are_refused(cache: Any, words: str) -> None:
    for prefix in (quantized("4"), quantized(None)):
        refused = prefix.store(range(300), noise(300, cache, 1)).refused
        assert refused is not None
        assert words in refused or ("behind" in refused and prefix._rule is None)


def test_fetching_codes_without_codec_is_refused() -> None:
    with pytest.raises(SettingError, match="no codec is set"):
        quantized(None).fetch(range(300), dequantize=False)


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_quantization": "turbo9"}, "'turbo9' is not a codec; supported:"),
        ({"kv_cache_quantization": "kivi4", "block_size": 48}, "do not divide a block_size of 48"),
        ({"kv_cache_min_quantize_tokens": -1}, "kv_cache_min_quantize_tokens must be at least 0"),
        ({"kv_cache_min_quantize_tokens": 1.5}, "must be a whole number, not 1.5"),
        ({"kv_cache_raw_first_tokens": -1}, "kv_cache_raw_first_tokens must be at least 0"),
        ({"kv_cache_raw_first_tokens": 1.5}, "kv_cache_raw_first_tokens must be a whole number"),
        ({"kv_cache_quantization": 8}, "must be a name like '8', not 8"),
    ],
)
def test_invalid_settings_are_refused_at_construction(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        PrefixCache("1MB", **settings)


def test_unsupported_settings_are_named_in_error() -> None:
    with pytest.raises(SettingError, match=r"affine4g128: layer 0: .* do not divide a head of 64"):
        quantized("4g128").store(range(300), noise(300, layers=1))
    with pytest.raises(SettingError, match=r"kv_cache_skip_layers \[2\]: .* are 0 to 1"):
        quantized("4", kv_cache_skip_layers=[2]).store(range(300), noise(300, layers=2))


def test_raw_disables_codec_and_codes_are_not_reencoded() -> None:
    prefix = quantized("raw")
    prefix.store(range(300), noise(300))
    assert forms(prefix) == [(0, 256, {mx.array})]
    refused = quantized("4").store(range(300), noise(300, QuantizedKVCache, 1)).refused
    assert refused is not None and "QuantizedKVCache is quantized already" in refused


# ---- short prompts


def fetched(prefix: PrefixCache, prompt: list[int]) -> list[mx.array]:
    caches, _ = prefix.fetch([*prompt, 1])
    return [] if caches is None else [s for cache in caches for s in cache.keys_and_values()]


def same(one: list[mx.array], other: list[mx.array]) -> bool:
    return len(one) == len(other) > 0 and all(map(mx.array_equal, one, other))


@pytest.mark.parametrize("codec", ["8", "turbo4"])
@pytest.mark.parametrize(("short", "least"), [(64, 256), (192, 256), (255, 256), (300, 301)])
def test_short_prompt_stays_raw_until_extended(short: int, least: int, codec: str) -> None:
    """Bytes and bits are then those of the longer prompt alone."""
    rules = {"kv_cache_min_quantize_tokens": least, "kv_cache_raw_first_tokens": 0}
    prefix, fresh = (quantized(codec, **rules) for _ in range(2))
    prompt, made = prompt_of(600), noise(600, layers=3)
    begin = noise(short, layers=3)
    for few, many in zip(begin, made, strict=True):  # as the longer one begins
        few.keys[:, :, :short] = many.keys[:, :, :short]
        few.values[:, :, :short] = many.values[:, :, :short]
    blocks = short - short % BLOCK
    assert prefix.store(prompt[:short], begin).held_tokens == blocks
    raw = [col.take(side, 0, blocks) for c in made for side in (c.keys, c.values)]
    assert same(fetched(prefix, prompt[:short]), raw)  # type: ignore[arg-type]
    prefix.check()
    for each in (prefix, fresh):
        assert each.store(prompt, made).held_tokens == 576
        each.check()
    assert same(fetched(prefix, prompt), fetched(fresh, prompt))
    assert not same(fetched(prefix, prompt[:short]), raw)  # type: ignore[arg-type]
    assert prefix.tree.nbytes == fresh.tree.nbytes
    codes = [s for node in prefix.tree for layer in node.segment.layers for s in layer]
    assert all(isinstance(side, Coded) for side in codes)


@pytest.mark.parametrize("turns", [(100, 190, 250), (100, 300, 400), (255, 257, 700)])
@pytest.mark.parametrize("first", [0, 64])
def test_conversation_is_quantized_when_it_becomes_long(turns: tuple[int, ...], first: int) -> None:
    """Each turn is stored from caches that were fetched without dequantizing."""
    prefix = quantized("turbo4", kv_cache_min_quantize_tokens=256, kv_cache_raw_first_tokens=first)
    whole = noise(700, layers=3)
    prompt, at = prompt_of(700), 0
    for end in turns:
        caches, rest = prefix.fetch(prompt[:end], dequantize=False)
        if caches is None:
            caches = [TurboQuantKVCache("turbo4", raw_first_tokens=first) for _ in whole]
        at = end - len(rest)
        assert all(type(cache) is TurboQuantKVCache for cache in caches)
        for cache, given in zip(caches, whole, strict=True):
            cache.update_and_fetch(given.keys[:, :, at:end], given.values[:, :, at:end])
        stored = prefix.store(prompt[:end], caches)
        assert (stored.refused, stored.held_tokens) == (None, end - end % BLOCK)
        prefix.check()
        coded = [
            isinstance(side, Coded)
            for node in prefix.tree
            if node.end > first
            for layer in node.segment.layers
            for side in layer
        ]
        assert all(coded) if end >= 256 else not any(coded)


def test_512_tokens_in_8_bits_match_vllm_mlx_nbytes() -> None:
    prefix = PrefixCache("10MB", block_size=64, kv_cache_quantization="8")
    cache = KVCache()
    keys = mx.random.normal((1, 8, 512, 64), key=mx.random.key(0)).astype(mx.float16)
    cache.update_and_fetch(keys, keys)
    assert prefix.store(prompt_of(512), [cache]).refused is None
    assert prefix.tree.nbytes == 557_056


def test_memory_stays_within_limit_when_short_prompt_is_extended() -> None:
    prefix = quantized("turbo4", 40_000_000, kv_cache_min_quantize_tokens=256)
    made = noise(600)
    for seed in range(4):
        prompt = prompt_of(600, seed)
        short = noise(192)
        prefix.store(prompt[:192], short)
        del short
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        prefix.store(prompt, made)
        assert mx.get_peak_memory() - before <= 40_000_000
        prefix.check()
