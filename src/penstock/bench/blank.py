"""A segment without arrays, for benches of the index alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for the KV of `tokens` tokens; counts one byte each and holds none."""

    tokens: int

    @property
    def nbytes(self) -> int:
        """One byte a token."""
        return self.tokens

    @property
    def checkpoint_nbytes(self) -> int:
        """It has none."""
        return 0

    def split(self, at_tokens: int) -> tuple[Self, Self]:
        """Return two blanks of the parts' lengths."""
        return type(self)(at_tokens), type(self)(self.tokens - at_tokens)

    def join(self, *others: Self) -> Self:
        """Return one blank of all lengths together."""
        return type(self)(self.tokens + sum(other.tokens for other in others))

    def joins(self, _: Self) -> bool:
        """All are alike."""
        return True
