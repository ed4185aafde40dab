"""TurboQuantKVCache in mlx-lm's loops: in place or dequantized, single or batched."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as theirs
from parity_models import (
    assert_same,
    generate,
    generate_batch,
    model_of,
    prompt_of,
    tokens_of,
)

from penstock import (
    TurboQuantKVCache,
    attach,
    load,
    load_prompt_cache,
    save_prompt_cache,
)
from penstock.recall import MODEL_PATH
from penstock_bench.models import LlamaShape, ModelChoice, bench_model
from penstock_bench.recall import dialogue

family = pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt_oss", "phi3"])
LENGTHS, TOKENS = (150, 61, 17, 200), (40, 9, 52, 23)


@pytest.fixture
def unseamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the attention seam from mlx-lm's modules."""
    for name, module in list(sys.modules.items()):
        found = getattr(module, "scaled_dot_product_attention", None)
        if name.startswith("mlx_lm.models.") and hasattr(found, "penstock_seam"):
            monkeypatch.setattr(module, "scaled_dot_product_attention", found.__wrapped__)
    yield


def made(model: Any, codec: str = "turbo4", first: int = 64) -> list[TurboQuantKVCache]:
    return [
        TurboQuantKVCache(codec, min_quantize_tokens=0, raw_first_tokens=first)
        for _ in model.layers
    ]


@family
@pytest.mark.parametrize("codec", ["turbo4", "k8v4"])
def test_dequantized_and_in_place_reads_are_equal(family: str, codec: str, unseamed: None) -> None:
    model, prompt = model_of(family), prompt_of(150)
    dequantized = made(model, codec)
    reference = generate(model, prompt, dequantized, 80, 40)
    assert not dequantized[0]._in_place
    assert attach(model)
    caches = made(model, codec)
    assert_same(tokens_of(generate(model, prompt, caches, 80, 40)), reference, family)
    assert caches[0]._in_place


def test_model_with_custom_attention_uses_dequantized_kv(unseamed: None) -> None:
    """Gemma 2 computes its attention scores itself."""
    model, prompt = model_of("gemma2"), prompt_of(150)
    reference = generate(model, prompt, made(model), 30, 40)
    attach(model)
    assert_same(tokens_of(generate(model, prompt, made(model), 30, 40)), reference, "gemma2")


@pytest.mark.parametrize("codec", ["8", "turbo8", "k8v8", "kivi8/turbo8"])
def test_eight_bits_match_full_precision_text(codec: str) -> None:
    model, tokenizer = load(MODEL_PATH)
    attach(model)
    told = dialogue(1, tokens=600, facts=6)
    for asked in told.questions[:4]:
        prompt = tokenizer.apply_chat_template(told.ask(asked), add_generation_prompt=True)
        reference = generate(model, prompt, theirs.make_prompt_cache(model), 12)
        caches = made(model, codec)
        assert_same(tokens_of(generate(model, prompt, caches, 12, 200)), reference, codec)
        assert caches[0].codes.offset >= 448


def test_check_detects_loss_of_2_bit_codec() -> None:
    """Negative control: the codes are what is read."""
    model = model_of("llama")
    attach(model)
    reference = generate(model, prompt_of(150), theirs.make_prompt_cache(model), 40)
    found = tokens_of(generate(model, prompt_of(150), made(model, "turbo2", 0), 40))
    with pytest.raises(AssertionError, match="which led by"):
        assert_same(found, reference, "turbo2")


@family
def test_batches_match_single_runs(family: str) -> None:
    """Through mlx-lm's `BatchGenerator`: right padding, join, leave and resume."""
    model = model_of(family)
    attach(model)
    prompts = [prompt_of(tokens) for tokens in LENGTHS]
    settings = {"prefill_batch_size": 2, "completion_batch_size": 3, "prefill_step_size": 100}
    caches = [made(model) for _ in prompts]
    turns = generate_batch(model, prompts, caches, TOKENS, **settings)
    more = [prompt_of(tokens, 3) for tokens in reversed(LENGTHS)]
    turns_again = generate_batch(model, more, [turn.cache for turn in turns], TOKENS, **settings)
    for at, (first, second) in enumerate(zip(turns, turns_again, strict=True)):
        cache = made(model)
        alone = generate(model, prompts[at], cache, TOKENS[at], 100)
        assert_same(first.tokens, alone, f"{family}, sequence {at}")
        alone = generate(model, more[at], cache, TOKENS[at], 100)
        assert_same(second.tokens, alone, f"{family}, sequence {at}, second turn")


@pytest.mark.parametrize("codec", ["turbo4", "kivi4"])
def test_cache_saved_during_generation_continues_equally(codec: str, tmp_path: Path) -> None:
    model, prompt = model_of("llama"), prompt_of(150)
    attach(model)
    reference = generate(model, prompt, made(model, codec), 60)
    halved = made(model, codec)
    generate(model, prompt, halved, 30)
    save_prompt_cache(tmp_path / "it.safetensors", halved)
    loaded = load_prompt_cache(tmp_path / "it.safetensors")
    rest = generate(model, [reference[30].token], loaded, 29)
    assert_same(tokens_of(rest), reference[31:], codec)


@pytest.mark.parametrize(("codec", "tokens"), [("turbo4", 1_024), ("k8v4", 1_024), ("4", 2_048)])
def test_peak_memory_is_below_full_precision(codec: str, tokens: int) -> None:
    shape = LlamaShape(
        layers=8, hidden_size=256, intermediate_size=256, query_heads=4, kv_heads=4, head_dim=64
    )
    model = bench_model(ModelChoice.RANDOM, shape).model
    attach(model)
    mx.eval(model.parameters())
    before = mx.set_cache_limit(0)
    prompt = mx.random.randint(0, 500, (tokens,), key=mx.random.key(1))

    def peak(caches: list[Any]) -> int:
        gc.collect()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        steps = generate_step(
            prompt, model, prompt_cache=caches, max_tokens=3, prefill_step_size=256
        )
        assert len([token for token, _ in steps]) == 3
        return int(mx.get_peak_memory()) - int(held)

    raw = peak(theirs.make_prompt_cache(model))
    caches = [TurboQuantKVCache(codec, min_quantize_tokens=0) for _ in model.layers]
    coded = peak(caches)
    mx.set_cache_limit(before)
    assert coded < 0.9 * raw
    assert sum(cache.nbytes for cache in caches) < 0.35 * tokens * 8 * 4 * 2 * 64 * 4
