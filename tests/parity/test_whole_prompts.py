"""A model whose text depends on the prompt's chunks: run as mlx-lm's generate does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from asking import ask, drain
from cold_engine import running, settle
from combinations import SOAK
from mlx_lm.generate import generate_step
from tiny_families import plain_greedy, prompt_of

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Sampling
from penstock.engine.schedule.sequence import Sequence as Answer
from penstock.ledger import Kind

FAMILY = "phi3small"
SMALL: dict[str, Any] = {
    "memory_limit": "900MB",
    "block_size": 16,
    "prefill_chunk": 32,
    "max_batch_size": 4,
}


@functools.cache
def model() -> Any:
    return tiny_families.build(FAMILY)


@contextmanager
def engine(**settings: Any) -> Iterator[Core]:
    with tiny_families.uncompiled():
        core = Core(model(), **{**SMALL, **settings})
        try:
            yield core
            core.view.check()
            assert core.view.idle
        finally:
            core.close()


@functools.cache
def generated(prompt: tuple[int, ...], tokens: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model(), max_tokens=tokens)]


def check(*handles: Handle) -> None:
    for handle in handles:
        for choice in handle.result(timeout_seconds=0):
            assert choice.finish is not None
            assert choice.finish.usage.cached_tokens == 0
            assert choice.tokens == generated(handle.request.prompt, handle.request.max_tokens)


MORE = (4_200,) if SOAK else ()


@pytest.mark.parametrize(
    ("size", "lengths"), [(16, (1, 2, 3, 33, 65, 200, 2_049, *MORE)), (24, (33, 2_060))]
)
def test_text_matches_mlx_lm_generate(size: int, lengths: tuple[int, ...]) -> None:
    """Also where the prefill ends inside a block."""
    with engine(block_size=size, max_batch_size=1) as core:
        handles = [ask(core, prompt_of(tokens, seed=7), 20) for tokens in lengths]
        drain(core)
        check(*handles)


def test_other_prompt_splits_change_text() -> None:
    """Why this model needs its own path: mlx-lm itself differs."""
    prompt = prompt_of(70, seed=1)
    whole, _ = plain_greedy(model(), prompt, 8, cuts=(69,))
    in_two, _ = plain_greedy(model(), prompt, 8, cuts=(32, 69))
    assert whole == generated(tuple(prompt), 8) != in_two


def test_concurrent_and_repeated_requests_match_plain() -> None:
    with engine() as core:
        prompts = [prompt_of(n, seed=n) for n in (70, 70, 33, 1)]
        handles = [ask(core, prompt, 20) for prompt in prompts]
        drain(core, 5)
        handles += [ask(core, prompts[0][:50], 9), ask(core, prompts[0], n=2)]
        drain(core)
        again = ask(core, [*prompts[0], *generated(tuple(prompts[0]), 20), 5])
        drain(core)
        check(*handles, again)
        assert core.ledger.by_class()[Kind.NODES] == 0


def test_preempted_sequence_matches_plain() -> None:
    """Its prompt is prefilled as before, and its answer token by token."""
    for steps in (2, 20):
        with engine(max_batch_size=1) as core:
            first = ask(core, prompt_of(70, seed=1), 30)
            drain(core, steps)
            urgent = ask(core, prompt_of(30, seed=5), priority=1)
            drain(core)
            assert core.counters.preemptions == 1
            check(first, urgent)


def test_no_token_is_dropped_past_window() -> None:
    with engine(max_kv_size=32, keep=4) as core:
        handle = ask(core, prompt_of(70, seed=1), 20)
        drain(core)
        check(handle)


def test_no_prompt_is_cached_or_written(tmp_path: Path) -> None:
    with tiny_families.uncompiled():
        for _ in range(2):
            with running(tmp_path, model=model(), **SMALL) as core:
                handle = ask(core, prompt_of(70, seed=1))
                settle(core)
                check(handle)
                assert core.view.explain(handle.request.prompt).held_tokens == 0
                assert "prefixes of this model are not shared" in core.view.explain([1]).reason
                assert not list(tmp_path.glob("**/*.safetensors"))


def test_seeded_draws_are_reproducible() -> None:
    hot = Sampling(temperature=1.0, seed=3)
    with engine() as core:
        handles = [ask(core, prompt_of(40, seed=2), 12, sampling=hot) for _ in range(2)]
        drain(core)
        first, second = (handle.result(timeout_seconds=0)[0].tokens for handle in handles)
        assert first == second


def test_check_detects_other_prompt_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Answer, "whole_stop", property(lambda self: self.position + 1))
    with engine() as core:
        handle = ask(core, prompt_of(70, seed=1))
        drain(core)
        with pytest.raises(AssertionError):
            check(handle)
