"""`PrefixCache` in loops on models with recurrent layers: text matches a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as theirs
from parity_models import (
    RECURRENT_FAMILIES,
    Step,
    assert_same,
    generate,
    model_of,
    prompt_of,
)

from penstock.caches.prefix_cache import PrefixCache
from penstock.kv.states import RecurrentState, blank
from penstock.ledger import Kind
from penstock.prefix.checkpoints import Checkpoints

every_family = pytest.mark.parametrize("family", (*RECURRENT_FAMILIES, "llama"))
BLOCK = 16


def plain(model: Any, prompt: Sequence[int], tokens: int = 12) -> list[Step]:
    return generate(model, prompt, theirs.make_prompt_cache(model), tokens)


def ask(
    cache: PrefixCache, model: Any, prompt: list[int], tokens: int = 12
) -> tuple[int, list[int]]:
    """Return the number of cached tokens, and the answer."""
    known = cache.counts.fetched_tokens
    caches, rest = cache.prefill(
        model, prompt, lambda: list(theirs.make_prompt_cache(model)), step_size=2 * BLOCK
    )
    known = cache.counts.fetched_tokens - known
    steps = generate(model, rest, caches, tokens)
    cache.check()
    return known, [step.token for step in steps]


@every_family
def test_prompt_resumes_at_stored_boundary(family: str) -> None:
    model, cache = model_of(family), PrefixCache("100MB", block_size=BLOCK)
    prompt = prompt_of(70)
    for known in (0, 64):
        found, said = ask(cache, model, prompt)
        assert found == known
        assert_same(said, plain(model, prompt), family)
    turn = [*prompt, *said, *prompt_of(9, seed=1)]
    found, answer = ask(cache, model, turn)
    assert found == 64
    assert_same(answer, plain(model, turn), family)
    other = [*prompt[:50], *prompt_of(20, seed=2)]
    assert cache.explain(other).held_tokens == 48
    found, answer = ask(cache, model, other)
    assert found == (48 if family == "llama" else 32)
    assert_same(answer, plain(model, other), family)


@every_family
def test_fetched_caches_are_writable_copies(family: str) -> None:
    model, cache = model_of(family), PrefixCache("100MB", block_size=BLOCK)
    prompt = prompt_of(70)
    ask(cache, model, prompt)
    caches, _ = cache.fetch(prompt)
    assert caches is not None
    for each in caches:
        for inner in getattr(each, "caches", (each,)):
            if hasattr(inner, "cache"):
                for array in inner.cache:
                    array[:] = mx.zeros_like(array)
            else:
                inner.keys[:] = mx.zeros_like(inner.keys)
    assert_same(ask(cache, model, prompt)[1], plain(model, prompt), family)


def test_states_inside_block_are_not_stored() -> None:
    model, cache = model_of("mamba2"), PrefixCache("100MB", block_size=BLOCK)
    prompt, caches = prompt_of(70), theirs.make_prompt_cache(model)
    model(mx.array([prompt]), cache=caches)
    assert cache.store(prompt, caches).held_tokens == 64
    assert cache.fetch(prompt) == (None, prompt)
    assert cache.explain(prompt).reusable_tokens == 0
    assert cache.ledger.by_class()[Kind.CHECKPOINTS] == 0


def test_states_are_counted_and_evicted() -> None:
    model = model_of("falcon_h1")
    cache = PrefixCache("2MB", block_size=BLOCK)
    for number in range(12):
        prompt = prompt_of(100, seed=number)
        assert_same(ask(cache, model, prompt)[1], plain(model, prompt), "falcon_h1")
        assert cache.nbytes <= cache.ledger.limit_bytes
    assert cache.counts.evicted_nodes > 0
    cache.clear()
    assert cache.ledger.by_class()[Kind.CHECKPOINTS] == 0


def test_check_detects_state_of_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    real = Checkpoints.capture

    def wrong(self: Any, path: Any, position: int, live: RecurrentState, **more: Any) -> bool:
        return real(self, path, position, RecurrentState(blank(live.owned())), **more)

    monkeypatch.setattr(Checkpoints, "capture", wrong)
    model, cache = model_of("qwen3_next"), PrefixCache("100MB", block_size=BLOCK)
    prompt = prompt_of(70)
    ask(cache, model, prompt)
    with pytest.raises(AssertionError, match="token"):
        assert_same(ask(cache, model, prompt)[1], plain(model, prompt), "qwen3_next")


def test_storing_batched_caches_is_refused() -> None:
    """It is ambiguous which row to store."""
    model, cache = model_of("mamba2"), PrefixCache("100MB", block_size=BLOCK)
    prompt, caches = prompt_of(64), theirs.make_prompt_cache(model)
    model(mx.array([prompt, prompt_of(64, seed=1)]), cache=caches)
    assert "extract its rows" in str(cache.store(prompt, caches).refused)
