"""min_tokens: which tokens are forbidden, for how long, and with proposals."""

from __future__ import annotations

import pytest

from penstock.engine.model.min_tokens import MinTokens
from penstock.engine.request import ReasoningBudget, Request
from penstock.errors import SettingError

ENDS = (3, 7, 99)


def test_eos_is_forbidden_until_min_tokens() -> None:
    rule = MinTokens(2, ENDS)
    other = rule.copy()
    for _ in range(2):
        assert not rule.free
        assert [token for token, ok in enumerate(rule.allowed(10)) if not ok] == [3, 7]
        assert not rule.accept(1)
    assert rule.free and rule.allowed(10).all()
    assert not other.free, "a copy goes its own way"


@pytest.mark.parametrize(
    ("proposal", "allowed"),
    [([1, 2, 3], 3), ([1, 3, 2], 1), ([3], 0), ([1, 2, 3, 7], 4), ([], 0)],
)
def test_proposal_is_cut_before_early_eos(proposal: list[int], allowed: int) -> None:
    rule = MinTokens(2, ENDS)
    assert rule.allowed_tokens(proposal) == allowed
    free = MinTokens(0, ENDS)
    assert free.allowed_tokens(proposal) == len(proposal)


def test_min_tokens_with_reasoning_budget_is_refused() -> None:
    with pytest.raises(SettingError, match="cannot be combined"):
        Request(prompt=(1,), min_tokens=2, reasoning=ReasoningBudget(max_tokens=2, end=(5,)))
