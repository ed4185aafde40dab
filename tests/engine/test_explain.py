"""`EngineView.explain` of prompts that are not fully cached."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from combinations import pairs
from core_parts import evict_all
from small_cores import ask, core_of, run
from tiny_families import prompt_of

import penstock
from penstock.engine.core import Core
from penstock.models.mlx_lm import encode
from penstock.recall import MODEL_PATH


def test_explain_reports_first_differing_token_with_text() -> None:
    model, tokenizer = penstock.load(MODEL_PATH)
    core = Core(model, tokenizer, memory_limit="100MB", block_size=8)
    told = encode(tokenizer, "The code of the amber falcon is 4821. Animals are good company.")
    asked = encode(tokenizer, "The code of the amber falcon is 4821. Animals are small company.")
    core.submit(penstock.Request(prompt=tuple(told), max_tokens=2))
    while core.step():
        pass
    found = core.view.explain(asked)
    at = next(i for i, (a, b) in enumerate(zip(told, asked, strict=True)) if a != b)
    assert (found.diverges_at, found.held_tokens) == (at, at // 8 * 8)
    assert (found.held_text, found.given_text) == (" good", " small")
    assert core.view.explain(told).given_text is None
    evict_all(core)
    gone = core.view.explain(told)
    assert (gone.held_tokens, gone.evicted_for) == (0, "cleared")
    core.close()


def test_explain_quotes_text_that_changes_between_prompts() -> None:
    model, tokenizer = penstock.load(MODEL_PATH)
    core = Core(model, tokenizer, memory_limit="100MB", block_size=8)
    told, asked, other = (
        encode(tokenizer, f"The code of the amber falcon is {text}. Animals are good company.")
        for text in ("4821", "4822", "amber")
    )
    core.submit(penstock.Request(prompt=tuple(told), max_tokens=2))
    while core.step():
        pass
    found = core.view.explain(asked)
    assert found.diverges_at == next(
        i for i, (a, b) in enumerate(zip(told, asked, strict=True)) if a != b
    )
    assert (found.volatile, found.volatile_held, found.volatile_given) == (
        "counter",
        "4821",
        "4822",
    )
    assert "Kind of the changed text: counter" in found.reason
    assert core.view.explain(other).volatile is None
    core.close()


FORMS = [
    (None, "at-rest"),
    *itertools.product(("turbo4", "turbo8"), ("at-rest", "active")),
]
CASES = pairs(("llama", "gemma3_text", "falcon_h1"), FORMS, (1, 5, 16, 32), (1, 24, 64))


@pytest.mark.parametrize(("family", "form", "block_size", "chunk"), CASES)
def test_request_reuses_tokens_reported_by_explain(
    family: str, form: tuple[str | None, str], block_size: int, chunk: int
) -> None:
    """Whole blocks, inside a block, at and after the end of an answer, and on a branch."""
    core = in_form(family, form, block_size=block_size, prefill_chunk=chunk)
    try:
        told = tuple(prompt_of(70))
        told += ask(core, told)
        branch = (*told[:40], *prompt_of(30, 2))
        more = (*told, *prompt_of(20, 1))
        for prompt in (told[:32], told[:33], told[:64], told[:70], told, branch, more, more[:80]):
            explained = core.view.explain(prompt)
            reusable = explained.reusable_tokens
            reusable = explained.held_tokens if reusable is None else reusable
            handle = core.submit(penstock.Request(prompt=prompt, max_tokens=3, ignore_eos=True))
            run(core)
            finish = handle.result(0.0)[0].finish
            assert finish is not None
            assert finish.usage.cached_tokens == min(reusable, len(prompt) - 1)
    finally:
        core.close()


def test_last_block_of_quantized_prompt_is_not_reused() -> None:
    told = tuple(prompt_of(64))
    for form, reusable in ((("turbo8", "active"), 48), (("turbo8", "at-rest"), None)):
        core = in_form("llama", form)
        ask(core, told)
        explained = core.view.explain(told)
        assert (explained.held_tokens, explained.reusable_tokens) == (64, reusable)
        assert ("from 48 on are recomputed" in explained.reason) == (reusable == 48)
        assert core.view.explain((*told, 5)).reusable_tokens is None
        core.close()


def in_form(family: str, form: tuple[str | None, str], **settings: Any) -> Core:
    """Return an engine that quantizes all blocks as early as possible."""
    codec, when = form
    coded = {"kv_cache_quantization": codec, "kv_cache_quantize_when": when}
    all_of_it = {"kv_cache_min_quantize_tokens": 0, "kv_cache_raw_first_tokens": 0}
    return core_of(family, **coded, **all_of_it, **settings)
