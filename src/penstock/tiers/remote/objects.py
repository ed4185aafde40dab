"""Interface of a store of bytes under names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

MOST_WORDS = 300
"""Characters of an error that are told."""


@dataclass(frozen=True, slots=True)
class ObjectPiece:
    """Some bytes of a value."""

    nbytes: int
    """Bytes of the whole value."""
    raw: bytes | memoryview
    """Bytes of the piece."""


class Objects(Protocol):
    """A store of bytes under names, which others use as well. Any thread may call.

    Every failure is an `OSError` that tells no secret, and comes in bounded time.
    """

    def get(self, name: str, at: int, nbytes: int) -> ObjectPiece | None:
        """Return up to `nbytes` bytes of a value from `at` on; None if there is no such value."""

    def put(self, name: str, raw: bytes) -> bool:
        """Keep a value, whole or not at all; False if the store takes none."""

    def has(self, names: Sequence[str]) -> list[bool]:
        """Tell which values are there; these are used now, and kept for as long as new ones."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove values, if they are there."""

    def close(self) -> None:
        """End all connections."""


def described(error: BaseException, url: str) -> str:
    """Return an error's text in one line, without the secrets of a URL.

    >>> described(OSError("no entry for :se%20cret@cache, or se cret"), "redis://:se%20cret@cache")
    'no entry for :***@cache, or ***'
    """
    words = str(error).partition("\n")[0]
    password = urlsplit(url).password
    for secret in filter(None, (password, unquote(password or ""))):
        words = words.replace(secret, "***")
    words = re.sub(r"(://[^\s?]*)\?\S*", r"\1", words)  # signatures are options of a request's URL
    return words[:MOST_WORDS] or type(error).__name__
