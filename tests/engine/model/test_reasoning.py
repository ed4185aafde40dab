"""Reasoning budgets, with end markers of one and of several tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from penstock.engine.model.reasoning import BehindReasoning, ReasoningLimit
from penstock.engine.request import ReasoningBudget, Request
from penstock.errors import SettingError

START, END = (90, 91), (95, 96, 97)


def answer(limit: ReasoningLimit, wanted: list[int], size: int = 100) -> list[int]:
    """Return the answer of a model that prefers these tokens, as far as allowed."""
    said: list[int] = []
    while wanted:
        allowed = limit.allowed(size)
        assert limit.free == bool(allowed.all())
        token = wanted.pop(0) if allowed[wanted[0]] else int(allowed.argmax())
        limit.accept(token)
        said.append(token)
    return said


@pytest.mark.parametrize(
    ("inside", "wanted", "said"),
    [
        (True, [1, 2, 3, 4], [1, 2, *END, 3, 4]),
        (True, [1, *END, 3], [1, *END, 3]),
        (True, [1, 95, 3], [1, *END, 3]),
        (False, [1, 2, 3, 4], [1, 2, 3, 4]),
        (False, [*START, 1, 2, 3], [*START, 1, 2, *END, 3]),
        (False, [*START, 1, *END, *START, 5, 6], [*START, 1, *END, *START, *END, 5, 6]),
    ],
)
def test_end_of_reasoning_is_forced_at_budget(
    inside: bool, wanted: list[int], said: list[int]
) -> None:
    budget = ReasoningBudget(max_tokens=2, start=START, end=END, inside=inside)
    assert answer(ReasoningLimit(budget), wanted) == said


def test_grammar_with_budget_requires_opened_reasoning() -> None:
    budget = ReasoningBudget(max_tokens=2, end=END)
    with pytest.raises(SettingError, match="opened by the prompt"):
        Request(prompt=(1,), grammar='start: "a"', reasoning=budget)


class Only:
    """A constraint that allows a single token, and is complete after three."""

    free = False

    def __init__(self, token: int, count: int = 0) -> None:
        self.token, self.count = token, count

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        return np.arange(size) == self.token

    def forced(self) -> list[int]:
        return [self.token]

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        return next((n for n, one in enumerate(tokens) if one != self.token), len(tokens))

    def accept(self, token: int) -> bool:
        assert token == self.token
        self.count += 1
        return self.count == 3

    def copy(self) -> Only:
        return Only(self.token, self.count)


def test_grammar_starts_after_reasoning() -> None:
    """For reasoning of any length, also where proposals extend past its end."""
    limit = ReasoningLimit(ReasoningBudget(max_tokens=9, start=START, end=END, inside=True))
    rule = BehindReasoning(limit, Only(3))
    assert rule.free and rule.allowed(6).all() and rule.forced() == []
    assert rule.allowed_tokens([1, 2, *END, 3, 3, 1]) == 4 + len(END)
    for token in (1, 2, *END):
        assert not rule.accept(token)
    ahead = rule.copy()
    assert not rule.free and rule.allowed(6).nonzero()[0].tolist() == [3]
    assert [rule.accept(3) for _ in range(3)] == [False, False, True]
    assert ahead.forced() == [3] and not ahead.accept(3), "a copy has a place of its own"
