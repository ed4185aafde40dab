"""Ends of several prompts with a common prefix are computed in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_families
from cold_engine import running, settle, submit
from engine_faults import model_of

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model.runner import Runner

SHARED = tuple(tiny_families.prompt_of(100, seed=5))
CANDIDATES = (3, 1, 7, 200)
QUESTIONS = [(*SHARED, *tiny_families.prompt_of(5 + n, seed=n), 1) for n in range(12)]
PLACES = 4
SETTINGS: dict[str, Any] = {"max_batch_size": PLACES, "prefill_chunk": 256, "max_stall_ms": 0}


def ask(core: Core, prompts: Sequence[Sequence[int]], **more: Any) -> list[Handle]:
    """Request the candidates' log-probabilities at the last token of each prompt."""
    asked = {"max_tokens": 0, "prompt_logprobs": 0, "candidates": CANDIDATES, **more}
    handles = [submit(core, p, logprobs_from=len(p) - 1, **asked) for p in prompts]
    settle(core)
    return handles


def values(handles: Sequence[Handle]) -> np.ndarray[Any, Any]:
    read = []
    for handle in handles:
        assert handle.prompt_logprobs is not None
        read.append(handle.prompt_logprobs.candidate_values)
    return np.concatenate(read)


def passes_of(core: Core, prompts: Sequence[Sequence[int]]) -> tuple[int, list[Handle]]:
    """Send requests after a cached prefix; return the number of passes and the handles."""
    submit(core, SHARED, max_tokens=0)
    settle(core)
    before = core.counters.prefill_steps
    handles = ask(core, prompts)
    return core.counters.prefill_steps - before, handles


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat MLX's mixed passes as bit-identical, as those of packed layers are."""
    monkeypatch.setattr(Runner, "mixes_exactly", True)


@pytest.mark.usefixtures("exact")
def test_prompts_with_common_prefix_share_prefill_passes() -> None:
    with running(None, **SETTINGS) as core:
        passes, handles = passes_of(core, QUESTIONS)
        assert passes == len(QUESTIONS) // PLACES
        logits = [model_of("llama")(mx.array([list(p[:-1])]))[0, -1] for p in QUESTIONS]
        logprobs = [np.array(row - mx.logsumexp(row)) for row in logits]
        expected = np.stack(logprobs)[:, CANDIDATES]
        assert np.allclose(values(handles), expected, atol=2e-4)


def test_prompt_logprobs_use_separate_passes_if_mixing_changes_bits() -> None:
    with running(None, **SETTINGS) as core:
        assert not core.runner.mixes_exactly
        passes, handles = passes_of(core, QUESTIONS)
        assert passes == len(QUESTIONS)
        one_by_one = [ask(core, [prompt])[0] for prompt in QUESTIONS]
        assert np.allclose(values(handles), values(one_by_one), atol=2e-4)
        # Prompts without log-probabilities share passes here, too.
        before = core.counters.prefill_steps
        for prompt in QUESTIONS:
            submit(core, (*prompt[:-1], 2, 2), max_tokens=0)
        settle(core)
        assert core.counters.prefill_steps - before < len(QUESTIONS)


@pytest.mark.usefixtures("exact")
def test_check_detects_separate_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Runner, "mixes", False)
    with running(None, **SETTINGS) as core:
        passes, _ = passes_of(core, QUESTIONS)
        assert passes == len(QUESTIONS)


@pytest.mark.usefixtures("exact")
def test_failed_shared_pass_is_retried_per_prompt() -> None:
    with running(None, **SETTINGS) as core:
        calls, mixed = [], core.runner.mixed

        def fails_once(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise ValueError("a model's bug")
            return mixed(*arguments)

        core.runner.mixed = fails_once  # type: ignore[method-assign]
        passes, handles = passes_of(core, QUESTIONS)
        assert passes == PLACES + len(QUESTIONS) // PLACES - 1, "the first ones are read apart"
        again = passes_of(core, QUESTIONS)[1]
        assert np.allclose(values(handles), values(again), atol=2e-4)
