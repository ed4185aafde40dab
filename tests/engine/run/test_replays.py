"""Rejected rows of recurrent models: one further pass, whatever was accepted of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tiny_families

from penstock.engine.core import Core
from penstock.engine.model import wide_steps
from penstock.engine.model.step_costs import StepCosts
from penstock.engine.request import Request

SMALL: dict[str, Any] = {
    "memory_limit": "400MB",
    "block_size": 32,
    "max_batch_size": 4,
    "speculative_tokens": 8,
}
FAMILIES = ["qwen3_5", "qwen3_next", "falcon_h1", "mamba2", "lfm2", "granitemoehybrid"]


def requests() -> list[Request]:
    """Return requests that foresee their answers, but for a token in different places."""
    return [
        Request(prompt=tuple(tiny_families.prompt_of(20, seed)), max_tokens=24, ignore_eos=True)
        for seed in range(4)
    ]


def foreseeing(asked: Sequence[Request], answers: Sequence[list[int]]) -> list[Request]:
    predicted = []
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        wrong = list(answer)
        for place in range(2 + number, len(wrong), 7 + number):
            wrong[place] = (wrong[place] + 1) % tiny_families.VOCABULARY_TOKENS
        predicted.append(request.model_copy(update={"prediction": tuple(wrong)}))
    return predicted


def answers(core: Core, asked: Sequence[Request]) -> list[list[int]]:
    handles = [core.submit(request) for request in asked]
    while core.step():
        pass
    core.view.check()
    return [handle.result(0.0)[0].tokens for handle in handles]


@pytest.fixture(autouse=True)
def proposals_pay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)
    with tiny_families.uncompiled():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_lengths_are_computed_in_one_pass(family: str) -> None:
    model = tiny_families.build(family)
    core = Core(model, **{**SMALL, "speculative_tokens": 0})
    expected = answers(core, requests())
    core.close()
    passes = {}
    for together in (True, False):
        core = Core(model, **SMALL)
        assert core.executor._skips_padding
        core.executor._skips_padding = together
        decode, calls = core.runner.decode, []

        def noted(*given: Any, decode: Any = decode, calls: list[Any] = calls) -> Any:
            calls.append(given[4] if len(given) > 4 else None)
            return decode(*given)

        core.runner.decode = noted  # type: ignore[method-assign]
        assert answers(core, foreseeing(requests(), expected)) == expected
        steps = core.counters.decode_steps
        passes[together] = len(calls) - steps
        assert any(calls) == together, "rows of different lengths"
        assert passes[together] <= steps or not together
        core.close()
    assert passes[True] < passes[False]


def test_check_detects_states_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a model that takes padding in is told by its states."""
    core = Core(tiny_families.build("qwen3_5"), **SMALL)
    decode = core.runner.decode
    assert wide_steps.skips_padding(core.runner)
    monkeypatch.setattr(core.runner, "decode", lambda *given: decode(*given[:4]))
    assert not wide_steps.skips_padding(core.runner)
    core.close()
