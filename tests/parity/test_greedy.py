"""Greedy generation with penstock's caches matches mlx-lm's tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from combinations import each, pairs
from mlx_lm.models import cache as theirs
from parity_models import (
    FAMILIES,
    Step,
    assert_same,
    bounded,
    generate,
    generate_batch,
    model_of,
    prompt_of,
    tokens_of,
    twins,
)

from penstock import caches

family = pytest.mark.parametrize("family", FAMILIES)
WINDOW = 32
LENGTHS = (5, 61, 17, 34)
TOKENS = (40, 9, 52, 23)
KINDS = ("llama", "gemma3")
"""One without windows of its own, and one with them; to a cache the others are like the first."""


def of_both_kinds(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combine values with both kinds of families, and each other family with one value."""
    others = tuple(family for family in FAMILIES if family not in KINDS)
    return [*itertools.product(KINDS, values), *each(others, values)]


@pytest.mark.parametrize(
    ("family", "prompt_tokens", "step_size"), pairs(FAMILIES, (1, 20, 300), (16, 2_048))
)
def test_kv_cache_matches_mlx_lm(family: str, prompt_tokens: int, step_size: int) -> None:
    model, prompt = model_of(family), prompt_of(prompt_tokens)
    cache = theirs.make_prompt_cache(model)
    ours = twins(cache)
    reference = generate(model, prompt, cache, 24, step_size)
    assert_same(tokens_of(generate(model, prompt, ours, 24, step_size)), reference, family)


@pytest.mark.parametrize(
    ("family", "keep", "prompt_tokens", "step_size"),
    pairs(FAMILIES, (0, 4), (10, 100), (5, 32, 50, 2_048)),
)
def test_rotating_cache_matches_mlx_lm(
    family: str, keep: int, prompt_tokens: int, step_size: int
) -> None:
    """The window wraps twice; chunks are shorter and longer than it."""
    model, prompt = model_of(family), prompt_of(prompt_tokens)
    cache = bounded(model, WINDOW, keep)
    ours = twins(cache)
    reference = generate(model, prompt, cache, 80, step_size)
    assert_same(tokens_of(generate(model, prompt, ours, 80, step_size)), reference, family)
    assert {c.keys.shape[2] for c in ours} <= {WINDOW, 24}


@family
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_cache_matches_mlx_lm(family: str, bits: int) -> None:
    model, prompt = model_of(family), prompt_of(70)
    if family == "gemma3":
        cache = [
            theirs.QuantizedKVCache(bits=bits) if type(c) is theirs.KVCache else c
            for c in theirs.make_prompt_cache(model)
        ]
    else:
        cache = [theirs.QuantizedKVCache(bits=bits) for _ in model.layers]
    ours = twins(cache)
    reference = generate(model, prompt, cache, 40, 32)
    assert_same(tokens_of(generate(model, prompt, ours, 40, 32)), reference, family)


@family
def test_conversion_to_quantized_during_generation_matches_mlx_lm(family: str) -> None:
    """`to_quantized` halfway, as mlx-lm does past `quantized_kv_start`."""
    model, prompt = model_of(family), prompt_of(40)
    cache = theirs.make_prompt_cache(model)
    ours = twins(cache)
    results = []
    for layers in (cache, ours):
        first = generate(model, prompt, layers, 10)
        quantized = [c.to_quantized(64, 8) if c.is_trimmable() else c for c in layers]
        results.append(first + generate(model, [first[-1].token], quantized, 20))
    assert_same(tokens_of(results[1]), results[0], family)


@functools.cache
def unbounded(family: str, prompt_tokens: int, step_size: int) -> list[Step]:
    model, prompt = model_of(family), prompt_of(prompt_tokens)
    return generate(model, prompt, theirs.make_prompt_cache(model), 24, step_size)


@pytest.mark.parametrize(("family", "capacity"), pairs(FAMILIES, (None, 16, 256)))
def test_window_longer_than_text_matches_mlx_lm(family: str, capacity: int | None) -> None:
    model, prompt = model_of(family), prompt_of(50)
    ours = caches.make_kv_cache(model, max_kv_size=4_096, keep=64, capacity=capacity)
    reference = unbounded(family, 50, 16)
    assert_same(tokens_of(generate(model, prompt, ours, 24, 16)), reference, family)


@family
def test_batch_matches_single_runs(family: str) -> None:
    model = model_of(family)
    prompts = [prompt_of(tokens) for tokens in LENGTHS]
    caches = [twins(theirs.make_prompt_cache(model)) for _ in prompts]
    settings = {"prefill_batch_size": 2, "completion_batch_size": 3, "prefill_step_size": 16}
    finished = generate_batch(model, prompts, caches, TOKENS, **settings)
    for prompt, tokens, sequence in zip(prompts, TOKENS, finished, strict=True):
        reference = generate(model, prompt, theirs.make_prompt_cache(model), tokens)
        assert_same(sequence.tokens, reference, f"{family}, {len(prompt)} tokens")


@family
def test_batch_of_windows_matches_single_runs(family: str) -> None:
    model = model_of(family)
    prompts = [prompt_of(tokens) for tokens in LENGTHS]
    caches = [twins(bounded(model, WINDOW, 0)) for _ in prompts]
    finished = generate_batch(model, prompts, caches, TOKENS, prefill_step_size=15)
    for prompt, tokens, sequence in zip(prompts, TOKENS, finished, strict=True):
        reference = generate(model, prompt, bounded(model, WINDOW, 0), tokens)
        assert_same(sequence.tokens, reference, f"{family}, {len(prompt)} tokens")


@family
def test_batch_with_kept_tokens_matches_single_runs(family: str) -> None:
    """Compared with our own single runs: mlx-lm loses `keep` when batching."""
    model = model_of(family)
    prompts = [prompt_of(tokens) for tokens in LENGTHS]

    def made() -> list[Any]:
        return caches.make_kv_cache(model, max_kv_size=WINDOW, keep=4)

    finished = generate_batch(model, prompts, [made() for _ in prompts], TOKENS)
    for prompt, tokens, sequence in zip(prompts, TOKENS, finished, strict=True):
        reference = generate(model, prompt, made(), tokens)
        assert_same(sequence.tokens, reference, f"{family}, {len(prompt)} tokens")


@pytest.mark.parametrize(("family", "keep"), of_both_kinds((None, 0, 4)))
def test_second_batch_turn_continues_from_returned_caches(family: str, keep: int | None) -> None:
    """Two turns through batches equal two single turns. `keep` None: unbounded."""
    model = model_of(family)
    first = [prompt_of(tokens, 1) for tokens in LENGTHS]
    second = [prompt_of(tokens, 2) for tokens in reversed(LENGTHS)]

    def made() -> list[Any]:
        if keep is None:
            return twins(theirs.make_prompt_cache(model))
        return caches.make_kv_cache(model, max_kv_size=WINDOW, keep=keep)

    turns = generate_batch(model, first, [made() for _ in first], TOKENS)
    turns = generate_batch(model, second, [turn.cache for turn in turns], TOKENS)
    for at, sequence in enumerate(turns):
        cache = made()
        # Alone or in a batch, the cache of a finished turn holds its last token too.
        generate(model, first[at], cache, TOKENS[at])
        reference = generate(model, second[at], cache, TOKENS[at])
        assert_same(sequence.tokens, reference, f"{family}, sequence {at}")


@pytest.mark.parametrize(
    ("family", "made"), of_both_kinds(["growing", "rotating", "kept", "quantized"])
)
def test_cache_saved_during_generation_matches_mlx_lm(
    family: str, made: str, tmp_path: Path
) -> None:
    model, prompt = model_of(family), prompt_of(45)
    cache = {
        "growing": lambda: twins(theirs.make_prompt_cache(model)),
        "rotating": lambda: twins(bounded(model, WINDOW, 0)),
        "kept": lambda: caches.make_kv_cache(model, max_kv_size=WINDOW, keep=4),
        "quantized": lambda: caches.make_kv_cache(model, max_kv_size=WINDOW, keep=4, kv_bits=8),
    }[made]
    whole, halved = cache(), cache()
    reference = generate(model, prompt, whole, 40)
    first = generate(model, prompt, halved, 20)
    path = str(tmp_path / "cache.safetensors")
    caches.save_prompt_cache(path, halved, {"model": family})
    loaded, metadata = caches.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": family}
    # A run reads its last token too, so the next one to read is the one after it.
    rest = generate(model, [reference[20].token], loaded, 19)
    assert_same(tokens_of(first), reference[:20], f"{family}, {made}, before")
    assert_same(tokens_of(rest), reference[21:], f"{family}, {made}, after")


@functools.cache
def reference_of_files(family: str, keep: int | None) -> list[Step]:
    model = model_of(family)
    cache = theirs.make_prompt_cache(model) if keep is None else bounded(model, WINDOW, keep)
    return generate(model, prompt_of(45), cache, 40)


@pytest.mark.parametrize(
    ("family", "keep", "writer"), pairs(FAMILIES, (None, 0, 4), ("ours", "theirs"))
)
def test_files_are_interchangeable_with_mlx_lm(
    family: str, keep: int | None, writer: str, tmp_path: Path
) -> None:
    """Saved right after a chunk, when mlx-lm's ring exceeds its window, and later."""
    model, prompt = model_of(family), prompt_of(45)
    path = str(tmp_path / "cache.safetensors")
    for before in (1, 20):
        reference = reference_of_files(family, keep)[: before + 20]
        cache = theirs.make_prompt_cache(model) if keep is None else bounded(model, WINDOW, keep)
        first, save, load = (
            (twins(cache), caches.save_prompt_cache, theirs.load_prompt_cache)
            if writer == "ours"
            else (cache, theirs.save_prompt_cache, caches.load_prompt_cache)
        )
        generate(model, prompt, first, before)
        save(path, first)
        rest = generate(model, [reference[before].token], load(path), 19)
        assert_same(tokens_of(rest), reference[before + 1 :], f"{family}, written by {writer}")


def test_check_detects_dropped_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keys of the first token zeroed."""
    model, prompt = model_of("llama"), prompt_of(20)
    reference = generate(model, prompt, theirs.make_prompt_cache(model), 40)
    update = caches.KVCache.update_and_fetch

    def forgetful(self: Any, keys: mx.array, values: mx.array) -> Any:
        fetched, values = update(self, keys, values)
        return mx.concatenate([mx.zeros_like(fetched[..., :1, :]), fetched[..., 1:, :]], 2), values

    monkeypatch.setattr(caches.KVCache, "update_and_fetch", forgetful)
    ours = tokens_of(generate(model, prompt, [caches.KVCache() for _ in model.layers], 40))
    with pytest.raises(AssertionError, match="which led by"):
        assert_same(ours, reference, "forgetful")
