"""A segment for tests of the prefix tree: text in place of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(eq=False)
class Text:
    """A segment that holds its tokens, so that mix-ups are visible."""

    content: tuple[int, ...]
    token_bytes: ClassVar[int] = 100
    form: ClassVar[str] = "whole"

    @property
    def tokens(self) -> int:
        return len(self.content)

    @property
    def nbytes(self) -> int:
        return self.token_bytes * len(self.content)

    @property
    def checkpoint_nbytes(self) -> int:
        return 0

    @property
    def key_index_nbytes(self) -> int:
        return 0

    def split(self, at_tokens: int) -> tuple[Self, Self]:
        return type(self)(self.content[:at_tokens]), type(self)(self.content[at_tokens:])

    def join(self, *others: Self) -> Self:
        return type(self)(sum((other.content for other in others), self.content))

    def joins(self, other: Self) -> bool:
        return self.form == other.form
