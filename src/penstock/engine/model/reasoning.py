"""Reasoning of a bounded length: behind its last token the model's own mark is forced.

generated:  <think> a b c                 budget: 3
allowed:    anything ... </think> alone, then anything
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engine.request import ReasoningBudget

__all__ = ["ReasoningLimit"]


class ReasoningLimit:
    """The place of one answer in its reasoning. Used by the engine's thread alone."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._inside = budget.inside
        self._used_tokens = 0
        self._latest: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end), 1))

    @property
    def free(self) -> bool:
        """Whether any token may come next."""
        return not self._inside or self._used_tokens < self._budget.max_tokens

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """Return which of the first `size` tokens may come next, (size,): the end mark's next."""
        if self.free:
            return np.ones(size, np.bool_)
        allowed = np.zeros(size, np.bool_)
        allowed[self.forced()[0]] = True
        return allowed

    def forced(self) -> list[int]:
        """Return the rest of the end mark where only that may come; else none."""
        end = self._budget.end
        if self.free:
            return []
        begun = next(n for n in range(len(end) - 1, -1, -1) if self._ends_with(end[:n]))
        return list(end[begun:])

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many first ones of some tokens may come next, one behind the other."""
        ahead = self.copy()
        for count, token in enumerate(tokens):
            if not ahead.free and token != ahead.forced()[0]:
                return count
            ahead.accept(token)
        return len(tokens)

    def accept(self, token: int) -> bool:
        """Go on with a token; an answer never ends by this."""
        self._latest.append(token)
        if self._inside:
            self._used_tokens += 1
            self._inside = not self._ends_with(self._budget.end)
        elif self._budget.start:
            self._inside = self._ends_with(self._budget.start)
        return False

    def copy(self) -> ReasoningLimit:
        """Return another answer's place, where this one is."""
        other = ReasoningLimit(self._budget)
        other._inside, other._used_tokens = self._inside, self._used_tokens
        other._latest = self._latest.copy()
        return other

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        latest = tuple(self._latest)
        return latest[len(latest) - len(mark) :] == mark
