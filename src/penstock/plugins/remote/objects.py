"""Interface of object stores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

MOST_WORDS = 300
"""Maximum number of characters of an error message."""


@dataclass(frozen=True, slots=True)
class ObjectPiece:
    nbytes: int
    raw: bytes | memoryview


class Objects(Protocol):
    """Client of a key-value store that servers share. Thread-safe.

    Every failure raises an `OSError` without secrets, within bounded time.
    """

    def get(self, name: str, offset: int, nbytes: int) -> ObjectPiece | None:
        """Return up to `nbytes` bytes of a value from `offset` on; None if it does not exist."""

    def put(self, name: str, raw: bytes) -> bool:
        """Write a value atomically; return False if the store refuses it."""

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return whether each value exists, and extend the lifetime of those that do."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove those of the values that exist; does nothing if the store is read-only."""

    def close(self) -> None: ...


def described(error: BaseException, url: str) -> str:
    """Return an error's first line, without the secrets of a URL.

    >>> described(OSError("no entry for :se%20cret@cache, or se cret"), "redis://:se%20cret@cache")
    'no entry for :***@cache, or ***'
    """
    words = str(error).partition("\n")[0]
    password = urlsplit(url).password
    for secret in filter(None, (password, unquote(password or ""))):
        words = words.replace(secret, "***")
    words = re.sub(r"(://[^\s?]*)\?\S*", r"\1", words)  # query strings may contain signatures
    return words[:MOST_WORDS] or type(error).__name__
