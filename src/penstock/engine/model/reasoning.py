"""Reasoning budgets: after the last allowed token, the model's end marker is forced.

generated:  <think> a b c                 budget: 3
allowed:    anything ... only </think>, then anything
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.engine.request import ReasoningBudget

if TYPE_CHECKING:
    from penstock.engine.model.sampling import Rule

__all__ = ["BehindReasoning", "ReasoningLimit"]


class ReasoningLimit:
    """State of one answer's reasoning; implements `Rule`. Used only by the engine's thread."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._inside = budget.inside
        self._used_tokens = 0
        self._latest: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end), 1))

    @property
    def inside(self) -> bool:
        return self._inside

    @property
    def free(self) -> bool:
        return not self._inside or self._used_tokens < self._budget.max_tokens

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        if self.free:
            return np.ones(size, np.bool_)
        allowed = np.zeros(size, np.bool_)
        allowed[self.forced()[0]] = True
        return allowed

    def forced(self) -> list[int]:
        """Return the rest of the end marker once it is forced; else an empty list."""
        end = self._budget.end
        if self.free:
            return []
        begun = next(n for n in range(len(end) - 1, -1, -1) if self._ends_with(end[:n]))
        return list(end[begun:])

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        ahead = self.copy()
        for count, token in enumerate(tokens):
            if not ahead.free and token != ahead.forced()[0]:
                return count
            ahead.accept(token)
        return len(tokens)

    def accept(self, token: int) -> bool:
        self._latest.append(token)
        if self._inside:
            self._used_tokens += 1
            self._inside = not self._ends_with(self._budget.end)
        elif self._budget.start:
            self._inside = self._ends_with(self._budget.start)
        return False

    def copy(self) -> ReasoningLimit:
        other = ReasoningLimit(self._budget)
        other._inside, other._used_tokens = self._inside, self._used_tokens
        other._latest = self._latest.copy()
        return other

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        latest = tuple(self._latest)
        return latest[len(latest) - len(mark) :] == mark


class BehindReasoning:
    """A `Rule` that applies another rule after the reasoning, which the prompt has opened."""

    def __init__(self, limit: ReasoningLimit, grammar: Rule) -> None:
        self._limit, self._grammar = limit, grammar

    @property
    def _rule(self) -> Rule:
        return self._limit if self._limit.inside else self._grammar

    @property
    def free(self) -> bool:
        return self._rule.free

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        return self._rule.allowed(size)

    def forced(self) -> list[int]:
        return self._rule.forced()

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        limit = self._limit.copy()
        for count, token in enumerate(tokens):
            if not limit.inside:
                return count + self._grammar.allowed_tokens(tokens[count:])
            if not limit.allowed_tokens([token]):
                return count
            limit.accept(token)
        return len(tokens)

    def accept(self, token: int) -> bool:
        return self._rule.accept(token)

    def copy(self) -> BehindReasoning:
        return BehindReasoning(self._limit.copy(), self._grammar.copy())
