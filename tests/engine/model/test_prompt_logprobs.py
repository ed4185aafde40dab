"""Prompt log-probabilities against the model alone, for every way of computing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_families
from cold_engine import running, settle, submit
from core_parts import evict_unpinned, placed_sequences
from engine_faults import VOCABULARY_TOKENS, model_of
from helpers import peak_above

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model import prompt_logprobs
from penstock.engine.model.prompt_logprobs import MOST_BYTES, PromptToken, score
from penstock.engine.request import Request
from penstock.engine.schedule import costs
from penstock.errors import NeverFits, SettingError
from penstock.ledger import Kind

NEAR = 2e-4
"""Largest difference of two log-probabilities; float32, summed up in other orders."""
SHARED = tuple(tiny_families.prompt_of(100, seed=5))
ENDS = ((5, 6, 7, 8), (9, 10, 11), (12,), (5, 6, 9))
"""Choices of one question."""


def alone(model: Any, prompt: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the log-probabilities after each token by the model alone, (n, vocabulary)."""
    with mx.stream(mx.cpu):
        logits = model(mx.array([list(prompt)]))[0].astype(mx.float32)
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def tokens_of(handle: Handle) -> list[PromptToken]:
    assert handle.prompt_logprobs is not None and handle.prompt_logprobs.done
    return list(handle.prompt_logprobs)


def check(model: Any, handle: Handle, near: float = NEAR, first_tokens: int | None = None) -> None:
    """Compare each log-probability of a prompt, or of its first tokens, with the model's."""
    prompt = handle.request.prompt
    # Without the last token, as mlx-lm cuts a prompt: some models' numbers depend on it.
    expected = alone(model, prompt[: max(1, len(prompt) - 1)])[:first_tokens]
    first, *rest = tokens_of(handle)
    assert (first.token, first.logprob, first.top) == (prompt[0], None, ())
    assert len(rest) == len(prompt) - 1
    for row, token, one in zip(expected, prompt[1:], rest, strict=False):
        assert one.token == token and one.logprob is not None
        # A token that does not exist has no probability in some families.
        assert one.logprob == row[token] or abs(one.logprob - row[token]) < near
        assert (row > row[token] + near).sum() < one.rank <= (row > row[token] - near).sum() + 1
        likeliest = np.sort(row)[::-1][: len(one.top)]
        assert np.allclose([value for _, value in one.top], likeliest, atol=near)
        assert all(abs(row[other] - value) < near for other, value in one.top)


def ask(core: Core, *prompts: Sequence[int], top: int = 2, **more: Any) -> list[Handle]:
    asked = {"max_tokens": 0, "prompt_logprobs": top, **more}
    handles = [submit(core, prompt, **asked) for prompt in prompts]
    settle(core)
    return handles


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
@pytest.mark.parametrize("settings", [{}, {"block_size": 48}, {"max_kv_size": 64, "keep": 4}])
def test_prompt_logprobs_match_model_cold_and_cached(family: str, settings: dict[str, Any]) -> None:
    model = model_of(family)
    prompts = [(*SHARED, *end) for end in ENDS]
    with running(None, family, **settings) as core:
        seen = core.limits.max_kv_size  # beyond it, a window has dropped tokens
        cold = ask(core, *prompts)
        submit(core, (*SHARED, *range(30, 60)))  # cached, but its logits were not read
        settle(core)
        warm = ask(core, *prompts, (*SHARED, *range(30, 60)), SHARED[:50], (7, 8), (7,))
        for handle in (*cold, *warm):
            check(model, handle, first_tokens=seen)
            (choice,) = handle.result(0.0)
            assert choice.finish is not None and choice.finish.reason == "length"
            assert choice.tokens == [] and choice.text == ""


@pytest.mark.parametrize("family", ["phi3small", "minicpm3", "deepseek_v2", "qwen3_moe"])
def test_prompt_logprobs_match_model_in_other_families(family: str) -> None:
    model = tiny_families.build(family)
    prompts = [tiny_families.prompt_of(40, seed=3), [*tiny_families.prompt_of(37, seed=3), 1]]
    with (
        tiny_families.uncompiled(),
        running(None, model=model, block_size=8, memory_limit="400MB") as core,
    ):
        for handle in (*ask(core, *prompts), *ask(core, *prompts)):
            check(model, handle, 1e-3)


def test_choices_share_prompt_prefill() -> None:
    prompts = [(*SHARED, *end) for end in ENDS]
    with running(None) as core:
        whole = len(SHARED) // 16 * 16
        ask(core, *prompts)
        most = len(SHARED) + sum(len(end) + 16 for end in ENDS)
        assert core.counters.prefilled_tokens <= most
        before = core.counters.prefilled_tokens
        for handle in ask(core, *prompts):
            finish = handle.choices[0].finish
            assert finish is None or finish.usage.cached_tokens >= whole
        computed = core.counters.prefilled_tokens - before
        assert computed <= sum(len(prompt) - 1 - whole for prompt in prompts)
        core.clear()
        assert core.stores.scored.nbytes == 0
        before = core.counters.prefilled_tokens
        ask(core, prompts[0])
        assert core.counters.prefilled_tokens - before == len(prompts[0]) - 1


def test_cached_prompt_without_logits_is_recomputed() -> None:
    """Negative control: without the rule its log-probabilities would be missing."""
    model = model_of("llama")
    with running(None) as core:
        submit(core, SHARED)
        settle(core)
        (handle,) = ask(core, SHARED)
        check(model, handle)
        assert core.counters.prefilled_tokens == 2 * (len(SHARED) - 1)
    with running(None) as core, pytest.MonkeyPatch.context() as patch:
        submit(core, SHARED)
        settle(core)
        patch.setattr(prompt_logprobs.PromptLogprobs, "done", True)
        (handle,) = ask(core, SHARED)
        with pytest.raises((AssertionError, TypeError)):
            check(model, handle)


def test_larger_number_of_top_logprobs_is_recomputed() -> None:
    model = model_of("llama")
    with running(None) as core:
        for top in (0, 20, 3):
            (handle,) = ask(core, SHARED, top=top)
            check(model, handle)
            assert {len(one.top) for one in tokens_of(handle)[1:]} == {top}
        (again,) = ask(core, SHARED, top=20)
        assert again.result(0.0)[0].finish.usage.cached_tokens == 96  # type: ignore[union-attr]


def test_prompt_logprobs_do_not_change_answer() -> None:
    with running(None) as core:
        expected = submit(core, SHARED, max_tokens=6)
        settle(core)
        (handle,) = ask(core, SHARED, max_tokens=6, n=3)
        texts = [choice.tokens for choice in handle.result(0.0)]
        assert texts == [expected.result(0.0)[0].tokens] * 3
        check(model_of("llama"), handle)


def test_preempted_prompt_has_all_logprobs() -> None:
    model = model_of("llama")
    with running(None, max_batch_size=1) as core:
        handle = submit(core, SHARED, max_tokens=4, prompt_logprobs=1)
        core.step()
        (sequence,) = placed_sequences(core)
        assert 0 < sequence.position < len(SHARED) - 1
        core.admission.preempt(sequence)
        settle(core)
        check(model, handle)
        assert len(handle.result(0.0)[0].tokens) == 4


def test_cached_logprobs_are_bounded_and_evicted() -> None:
    with running(None, memory_limit="60MB") as core:
        scored, most = core.stores.scored, 60_000_000 // 128
        for seed in range(40):
            ask(core, tiny_families.prompt_of(200, seed=seed), top=20)
            assert scored.nbytes <= min(most, MOST_BYTES)
        held = scored.nbytes
        assert held > most // 2
        assert core.ledger.by_class()[Kind.PROMPTS] == held == scored.recount()
        assert evict_unpinned(core)
        assert scored.nbytes == 0
        core.view.check()


def test_logits_are_reserved_before_allocation() -> None:
    """The logits of a chunk, and everything computed from them, fit the reserved bytes."""
    model = model_of("llama")
    with running(None) as core:
        size = core.estimator.logits_tokens
        assert size == 64
        tokens = list(SHARED[:size])
        core.runner.read(tokens, (), 0)

        def read() -> None:
            logits, _ = core.runner.read(tokens, (), 0)
            score(logits, tokens, 20)

        with_logits, without = (
            peak_above(read),
            peak_above(lambda: core.runner.prefill(tokens, (), 0)),
        )
        assert with_logits - without <= core.estimator.logits_bytes
        handle = submit(core, SHARED, max_tokens=0, prompt_logprobs=20)
        before = core.ledger.by_class()[Kind.BUFFERS]
        core.step()
        assert core.ledger.by_class()[Kind.BUFFERS] - before >= core.estimator.logits_bytes
        settle(core)
        check(model, handle)
        assert core.ledger.by_class()[Kind.BUFFERS] == before


def test_full_vocabulary_scores_are_reserved_before_allocation() -> None:
    """Two prompts hold their scores until their sequences end."""
    model = model_of("llama")
    with running(None) as core:
        kept = 8 * len(SHARED) * (1 + VOCABULARY_TOKENS)
        before = core.ledger.by_class()[Kind.BUFFERS]
        asked = {"max_tokens": 2, "prompt_logprobs": -1}
        handles = [submit(core, (at, *SHARED[1:]), **asked) for at in (3, 4)]
        for handle in handles:
            assert handle.prompt_logprobs is not None and handle.prompt_logprobs.nbytes == kept
        core.step()
        held = core.ledger.by_class()[Kind.BUFFERS] - before
        assert held >= 2 * kept + core.estimator.logits_bytes
        settle(core)
        assert core.ledger.by_class()[Kind.BUFFERS] == before
        for handle in handles:
            check(model, handle)
            assert all(len(one.top) == VOCABULARY_TOKENS for one in tokens_of(handle)[1:])


def test_scores_beyond_memory_are_refused_with_their_bytes() -> None:
    with running(None, memory_limit="32MB") as core:
        prompt = tuple(tiny_families.prompt_of(4_000, seed=5))
        with pytest.raises(NeverFits, match=r"with [\d.]+ MB of logits"):
            core.submit(Request(prompt=prompt, prompt_logprobs=-1, max_tokens=1))
        core.submit(Request(prompt=prompt, prompt_logprobs=0, max_tokens=1)).cancel()
        core.submit(Request(prompt=prompt[:9], prompt_logprobs=-1, max_tokens=1)).cancel()


def test_logits_beyond_memory_are_refused_with_their_bytes() -> None:
    with running(None, memory_limit="40MB") as core, pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "LOGIT_BYTES", 10_000)
        with pytest.raises(NeverFits, match=r"with [\d.]+ MB of logits"):
            core.submit(Request(prompt=SHARED, prompt_logprobs=0))
        core.submit(Request(prompt=SHARED)).cancel()


def test_large_vocabulary_scores_are_computed_in_pieces() -> None:
    logits = mx.random.normal((5, 3 * VOCABULARY_TOKENS), key=mx.random.key(1)) * 3
    targets = [0, 7, 1_535, 3, 3]
    whole = score(logits, targets, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_logprobs, "PIECE_LOGITS", 2 * 3 * VOCABULARY_TOKENS)
        pieces = score(logits, targets, 4)
    assert np.array_equal(whole.values, pieces.values)
    assert np.array_equal(whole.numbers, pieces.numbers)
    rows = np.array(logits)
    assert [int(rank) for rank in whole.numbers[:, 0]] == [
        int((row > row[target]).sum()) + 1 for row, target in zip(rows, targets, strict=True)
    ]


# ---- candidates at the end of a prompt


def test_candidates_after_cached_prompt_match_model() -> None:
    model = model_of("llama")
    candidates = (3, 1, 7, 200)
    base = (*SHARED, 4)  # ends inside a block
    with running(None) as core:
        submit(core, base, max_tokens=0)
        settle(core)
        before = core.counters.prefilled_tokens
        asked = {"logprobs_from": len(base), "candidates": candidates, "top": 0}
        handles = ask(core, *((*base, *end) for end in ENDS), **asked)
        computed = core.counters.prefilled_tokens - before
        assert computed == sum(len(end) for end in ENDS)
        for handle, end in zip(handles, ENDS, strict=True):
            expected = alone(model, (*base, *end[:-1]))[len(base) - 1 :]
            assert handle.prompt_logprobs is not None
            rows = handle.prompt_logprobs.candidate_values
            assert np.allclose(rows, expected[:, candidates], atol=NEAR)
            tokens = tokens_of(handle)
            assert [one.logprob is None for one in tokens] == [True] * len(base) + [False] * len(
                end
            )
            for row, one, token in zip(expected, tokens[len(base) :], end, strict=True):
                assert one.logprob is not None and abs(one.logprob - row[token]) < NEAR
                assert [number for number, _ in one.top] == list(candidates)


def test_candidate_logprobs_ignore_cached_top_logprobs() -> None:
    """Both are kept in the same columns: only the likeliest may be read again."""
    model = model_of("llama")
    with running(None) as core:
        ask(core, (*SHARED, 5))
        for first in (0, 1, 40, 96, 99):
            asked = {"logprobs_from": first, "candidates": (8, 2)}
            (handle,) = ask(core, (*SHARED, 5), top=0, **asked)
            expected = alone(model, SHARED)[max(0, first - 1) :, (8, 2)]
            assert handle.prompt_logprobs is not None
            assert np.allclose(handle.prompt_logprobs.candidate_values, expected, atol=NEAR)
        (plain,) = ask(core, (*SHARED, 5))
        check(model, plain)


def test_logprobs_start_beyond_prompt_is_refused() -> None:
    with pytest.raises(SettingError, match="logprobs_from 3 is beyond the prompt's 3 tokens"):
        Request(prompt=(1, 2, 3), prompt_logprobs=0, logprobs_from=3)
    with pytest.raises(SettingError, match="need prompt_logprobs"):
        Request(prompt=(1, 2, 3), candidates=(1,))
