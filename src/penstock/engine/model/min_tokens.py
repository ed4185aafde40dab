"""Minimum answer length, before which end tokens are not allowed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["MinTokens"]


class MinTokens:
    def __init__(self, tokens: int, ends: Collection[int]) -> None:
        self._missing = tokens
        self._ends = ends

    @property
    def free(self) -> bool:
        return self._missing <= 0

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        allowed = np.ones(size, np.bool_)
        if not self.free:
            allowed[[token for token in self._ends if token < size]] = False
        return allowed

    def forced(self) -> list[int]:
        return []

    def allowed_tokens(self, tokens: Sequence[int]) -> int:
        early = tokens[: max(0, self._missing)]
        ends = (place for place, token in enumerate(early) if token in self._ends)
        return next(ends, len(tokens))

    def accept(self, token: int) -> bool:
        self._missing -= 1
        return False

    def copy(self) -> MinTokens:
        return MinTokens(self._missing, self._ends)
