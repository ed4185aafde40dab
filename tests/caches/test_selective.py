"""Selective caches in mlx-lm's own loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import penstock
from penstock.attention.devices import current, using
from penstock.attention.mlx_backend import GPUBackend
from penstock.caches import factory
from penstock.engine.core import Core
from penstock.engine.request import Request
from penstock.errors import ModelError, SettingError
from penstock.models.loading import load
from penstock.models.mlx_lm import render
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue
from support.worst_blocks import choose_worst_blocks

ANSWER_TOKENS = 8


@pytest.fixture(scope="module")
def asked() -> tuple[Any, Any, list[list[int]], list[str]]:
    """The embedded model, its tokenizer, and questions about a dialogue, with their answers."""
    model, tokenizer = load(MODEL_PATH)
    penstock.attach(model)
    talk = dialogue(3, tokens=1_000, facts=3)
    prompts = [render(tokenizer, talk.ask(question)) for question in talk.questions]
    return model, tokenizer, prompts, [question.answer for question in talk.questions]


def said(model: Any, prompt: Sequence[int], caches: list[Any]) -> list[int]:
    steps = generate_step(
        mx.array(list(prompt)), model, max_tokens=ANSWER_TOKENS, prompt_cache=caches
    )
    return [int(token) for token, _ in steps]


def engine_says(model: Any, prompts: Sequence[Sequence[int]], **more: Any) -> list[list[int]]:
    core = Core(model, memory_limit="200MB", max_batch_size=1, attend_tokens=128, **more)
    answers = []
    try:
        for prompt in prompts:
            asked = Request(prompt=tuple(prompt), max_tokens=ANSWER_TOKENS, ignore_eos=True)
            handle = core.submit(asked)
            while core.step():
                pass
            answers.append(list(handle.result(0.0)[0].tokens))
    finally:
        core.close()
    return answers


def known(asked: Any, **settings: Any) -> int:
    model, tokenizer, prompts, answers = asked
    right = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = said(model, prompt, penstock.make_kv_cache(model, **settings))
        ends = [n for n, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
        text = tokenizer.decode(tokens[: ends[0]] if ends else tokens)
        right += text.strip() == answer
    return right


def test_full_budget_matches_full_attention(asked: Any) -> None:
    model, _, prompts, _ = asked
    prompt = prompts[0]
    covering = penstock.make_kv_cache(model, attend=len(prompt) + ANSWER_TOKENS)
    assert said(model, prompt, covering) == said(model, prompt, penstock.make_kv_cache(model))
    logits = []
    for attend in (None, len(prompt) + 1, 128):
        caches = penstock.make_kv_cache(model, attend=attend)
        model(mx.array([prompt]), cache=caches)
        logits.append(model(mx.array([[5]]), cache=caches))
    assert mx.array_equal(logits[0], logits[1]), "to the bit"
    assert not mx.array_equal(logits[0], logits[2])


def test_selection_matches_engine_and_recalls_more_than_window(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, prompts, _ = asked
    assert known(asked, attend=128) == 3
    assert known(asked, max_kv_size=128, keep=16) <= 1
    for prompt, expected in zip(prompts, engine_says(model, prompts), strict=True):
        assert said(model, prompt, penstock.make_kv_cache(model, attend=128)) == expected
    choose_worst_blocks(monkeypatch)
    assert known(asked, attend=128) <= 1, "it is the choice that finds them"


@pytest.mark.parametrize("rest", [False, True])
def test_both_backends_select_same_tokens(asked: Any, rest: bool) -> None:
    model, _, prompts, _ = asked
    logits = []
    for device in (current(), GPUBackend()):
        with using(device):
            caches = penstock.make_kv_cache(model, attend=128, attend_rest=rest)
            model(mx.array([prompts[0]]), cache=caches)
            logits.append(model(mx.array([[5]]), cache=caches))
    assert mx.allclose(logits[0], logits[1], atol=0.3)
    assert int(mx.argmax(logits[0])) == int(mx.argmax(logits[1]))


@pytest.mark.parametrize("rest", [False, True])
def test_copied_trimmed_and_loaded_caches_continue_equally(
    asked: Any, tmp_path: Path, rest: bool
) -> None:
    model, _, prompts, _ = asked
    caches = penstock.make_kv_cache(model, attend=128, attend_rest=rest)
    tokens = said(model, prompts[0], caches)
    assert all(cache.nbytes > cache.keys.nbytes + cache.values.nbytes for cache in caches)
    whole = copy.deepcopy(caches)
    penstock.save_prompt_cache(tmp_path / "kept.safetensors", caches)
    back = penstock.load_prompt_cache(tmp_path / "kept.safetensors")
    assert [cache.attend_tokens for cache in back] == [128] * len(caches)
    assert [cache.attend_rest for cache in back] == [rest] * len(caches)
    ends = [model(mx.array([[7]]), cache=held) for held in (caches, whole, back)]
    assert mx.array_equal(ends[0], ends[1]) and mx.array_equal(ends[0], ends[2])
    for cache in caches:
        assert cache.trim(len(tokens) + 40) == len(tokens) + 40
    fresh = penstock.make_kv_cache(model, attend=128, attend_rest=rest)
    left = caches[0].offset
    model(mx.array([prompts[0][:left]]), cache=fresh)
    for held in (caches, fresh):
        model(mx.array([prompts[0][left:]]), cache=held)
    once, anew = (model(mx.array([[7]]), cache=held) for held in (caches, fresh))
    assert mx.allclose(once, anew, atol=1e-3)


def test_attending_unselected_tokens_matches_engine(asked: Any) -> None:
    model, _, prompts, _ = asked
    expected = engine_says(model, prompts, attend_rest=True)
    for prompt, tokens in zip(prompts, expected, strict=True):
        caches = penstock.make_kv_cache(model, attend=128, attend_rest=True)
        assert said(model, prompt, caches) == tokens
        without = penstock.make_kv_cache(model, attend=128)
        said(model, prompt, without)
        assert caches[0].nbytes > without[0].nbytes, "it takes a larger index"


def test_center_calibration_memory_is_bounded(asked: Any) -> None:
    """Preallocating caches must not preallocate for the calibration run."""
    model, _, _, _ = asked
    factory._known.pop(id(model), None)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    made = penstock.make_kv_cache(model, max_kv_size=2**20, attend=128, capacity="window")
    assert made[0].centers is not None
    assert mx.get_peak_memory() - before < 2**26, "a window of these tokens takes 2 GiB"


def test_batches_use_full_attention(asked: Any) -> None:
    model, _, prompts, _ = asked
    rows = []
    for attend in (128, None):
        caches = penstock.make_kv_cache(model, attend=attend)
        model(mx.array([prompts[0][:300]]), cache=caches)
        rows.append([type(cache).merge([cache, cache]) for cache in caches])
    logits = [model(mx.array([[7], [9]]), cache=batch) for batch in rows]
    assert mx.array_equal(*logits)


def test_use_without_attach_is_error() -> None:
    cache = penstock.SelectiveKVCache(1_000, attend=128)
    sides = mx.zeros((1, 2, 200, 32)), mx.zeros((1, 2, 200, 32))
    cache.update_and_fetch(*sides)
    one = [side[:, :, :1] for side in sides]
    cache.update_and_fetch(*one)
    with pytest.raises(ModelError, match=r"penstock\.attach"):
        cache.update_and_fetch(*one)


def test_unsupported_attend_combinations_are_refused(asked: Any) -> None:
    model = asked[0]
    with pytest.raises(ValueError, match="attend"):
        penstock.make_kv_cache(model, attend=127)
    for more in ({"kv_bits": 8}, {"kv_cache_quantization": "turbo4"}):
        with pytest.raises(SettingError, match="attend 128"):
            penstock.make_kv_cache(model, attend=128, **more)
