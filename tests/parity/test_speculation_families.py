"""Every family gives equal text with and without speculation.

Ten greedy requests of each family, five of them asked again, so that proposals are right; `make
test-all` thus makes more than 1,000 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import tiny_families

from penstock.engine.core import Core
from penstock.engine.model import verification
from penstock.engine.model.proposals import Proposal, Speculation
from penstock.engine.model.step_costs import StepCosts
from penstock.engine.request import Request
from penstock.errors import ModelError

FAMILIES = tiny_families.families()
SMALL: dict[str, Any] = {
    "memory_limit": "400MB",
    "block_size": 16,
    "prefill_chunk": 32,
    "max_batch_size": 4,
}


def requests() -> list[Request]:
    """Return prompts that repeat themselves and each other."""
    draw = Random(7)
    words = [tuple(draw.randrange(tiny_families.VOCABULARY_TOKENS) for _ in range(9))] * 4
    words += [
        tuple(draw.randrange(tiny_families.VOCABULARY_TOKENS) for _ in range(n)) for n in (5, 23)
    ]
    return [
        Request(
            prompt=tuple(token for word in draw.sample(words, count) for token in word),
            max_tokens=tokens,
            ignore_eos=True,
        )
        for count, tokens in ((6, 28), (2, 24), (5, 20), (3, 28), (4, 16))
    ]


def answers(core: Core, asked: Sequence[Request]) -> list[list[int]]:
    """Return the answers of concurrent requests."""
    handles = [core.submit(request) for request in asked]
    while core.step():
        pass
    core.view.check()
    return [handle.result(0.0)[0].tokens for handle in handles]


def told(model: Any, proposed: int, *, times: int = 2) -> tuple[list[list[int]], Core]:
    """Return the answers to all requests, repeated this number of times, and the closed core."""
    core = Core(model, **SMALL, speculative_tokens=proposed)
    try:
        return [tokens for _ in range(times) for tokens in answers(core, requests())], core
    finally:
        core.close()


@pytest.fixture(autouse=True)
def proposals_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use constant step times, since a busy machine measures random ones."""
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_unchanged_by_speculation(family: str) -> None:
    try:
        model = tiny_families.build(family)
        expected, plain = told(model, 0, times=1)
    except (tiny_families.Unbuildable, ModelError) as error:
        pytest.skip(str(error))
    found, core = told(model, 4)
    assert found == expected * 2
    if core.limits.speculative_tokens:
        assert core.counters.accepted_tokens > 50
        assert core.counters.decode_steps < 2 * plain.counters.decode_steps
    else:
        assert not core.runner.takes_several


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2"])
def test_check_detects_verifier_that_accepts_everything(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    model = tiny_families.build(family)
    expected, _ = told(model, 0)
    monkeypatch.setattr(verification, "_accepted", lambda chosen, proposal: list(chosen))
    monkeypatch.setattr(Speculation, "propose", lambda self, tokens, most: Proposal([7] * most, 16))
    assert told(model, 4)[0] != expected


@pytest.mark.parametrize(("family", "few"), [("mistral4", 0), ("deepseek_v3", 4)])
def test_expanded_latents_check_several_tokens_if_chunk_has_room(family: str, few: int) -> None:
    """Only a chunk's scores are reserved for expanded rows; DeepSeek's are read in place."""
    model, allowed = tiny_families.build(family), {}
    numbers = model.args.qk_nope_head_dim + model.args.v_head_dim
    for chunk in (numbers - 8, numbers):
        core = Core(model, **{**SMALL, "prefill_chunk": chunk}, speculative_tokens=4)
        allowed[chunk] = core.limits.speculative_tokens
        core.close()
    assert list(allowed.values()) == [few, 4]
