"""Answers of a least length: before it the tokens that end an answer are not allowed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["MinTokens"]


class MinTokens:
    """The place of one answer before its least length. Used by the engine's thread alone.

    Args:
        tokens: of the answer before one of `ends` may come.
        ends: tokens that end it.
    """

    def __init__(self, tokens: int, ends: Collection[int]) -> None:
        self._missing = tokens
        self._ends = ends

    @property
    def free(self) -> bool:
        """Whether any token may come next."""
        return self._missing <= 0

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """Return which of the first `size` tokens may come next, (size,): none that ends."""
        allowed = np.ones(size, np.bool_)
        if not self.free:
            allowed[[token for token in self._ends if token < size]] = False
        return allowed

    def forced(self) -> list[int]:
        """Return no token: there is a choice."""
        return []

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many first ones of some tokens may come next, one behind the other."""
        early = tokens[: max(0, self._missing)]
        ends = (place for place, token in enumerate(early) if token in self._ends)
        return next(ends, len(tokens))

    def accept(self, token: int) -> bool:
        """Go on with a token; an answer never ends by this."""
        self._missing -= 1
        return False

    def copy(self) -> MinTokens:
        """Return another answer's place, where this one is."""
        return MinTokens(self._missing, self._ends)
