"""Text that arrives in pieces, and generators that parse it.

A reader is a generator that yields when it needs more text, so its result does not depend on how
the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import regex

from penstock.server.parsing.events import BrokenCall

MOST_REREAD = 1_000_000
"""Maximum number of characters reread after broken calls; beyond it, broken calls become text
without being searched for further calls."""

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Generator that yields to wait for text, and returns the parsed value."""
Emit: TypeAlias = Callable[[str], None]
Pattern: TypeAlias = regex.Pattern[str]
Match: TypeAlias = regex.Match[str]


class AnswerText:
    """Buffer of received text, and the position up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.closed = False
        self.cut = False
        self.stops: tuple[str, ...] = ()
        """Marks of the answer's format that never occur in a call."""
        self._reread = 0
        self._kept: list[str] | None = None
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        self.text = self.text[self.position :] + text
        self.position = 0

    def close(self, *, cut: bool = False) -> None:
        self.closed, self.cut = True, cut

    def unread(self, text: str) -> None:
        self.text = text + self.text[self.position :]
        self.position = 0
        self._reread += len(text)

    @property
    def rereads(self) -> bool:
        """Whether text may still be reread after a broken call."""
        return self._reread < MOST_REREAD

    @property
    def ready(self) -> bool:
        """Whether the next character is available, or the text has ended."""
        return self.position < len(self.text) or self.closed

    @property
    def sign(self) -> str:
        return self.text[self.position : self.position + 1]

    def advance(self, count: int = 1) -> str:
        taken = self.text[self.position : self.position + count]
        self.position += count
        for parts in (self._kept, self._recorded):
            if parts is not None:
                parts.append(taken)
        return taken

    def keep(self, first: str = "") -> None:
        self._kept = [first]

    def kept(self) -> str:
        text = "".join(self._kept or ())
        self._kept = None
        return text

    def record(self, first: str = "") -> None:
        """Start recording the text read, independently of `keep`."""
        self._recorded = [first]

    def recorded(self) -> str:
        text = "".join(self._recorded or ())
        self._recorded = None
        return text


def until(
    source: AnswerText, marks: Sequence[str], emit: Emit, *, take: bool = True
) -> Reading[str | None]:
    """Emit the text before the first of `marks`; return that mark, or None at the end.

    Args:
        take: whether to consume the mark.
    """
    pattern = _any_of(tuple(marks))
    while True:
        if match := pattern.search(source.text, source.position):
            emit(source.advance(match.start() - source.position))
            return source.advance(len(match[0])) if take else match[0]
        rest = len(source.text) - source.position
        emit(source.advance(rest if source.closed else rest - _beginning(source, marks)))
        if source.closed:
            return None
        yield


def peek(source: AnswerText, pattern: Pattern, offset: int = 0) -> Reading[Match | None]:
    """Match a pattern `offset` characters ahead without consuming text."""
    while True:
        match = pattern.match(source.text, source.position + offset, partial=not source.closed)
        if match is None or not match.partial:
            return match
        yield


def take(source: AnswerText, pattern: Pattern) -> Reading[Match | None]:
    """Consume and return a pattern's match; None if it does not match."""
    match = yield from peek(source, pattern)
    if match is not None:
        source.advance(match.end() - match.start())
    return match


def accept(source: AnswerText, *marks: str) -> Reading[str | None]:
    """Consume whitespace and the longest mark after it; if no mark follows, consume nothing."""
    while True:
        rest = source.text[source.position :]
        bare = rest.lstrip()
        if source.closed or not any(mark != bare and mark.startswith(bare) for mark in marks):
            mark = max((mark for mark in marks if bare.startswith(mark)), key=len, default=None)
            if mark is not None:
                source.advance(len(rest) - len(bare) + len(mark))
            return mark
        yield


def expect(source: AnswerText, *marks: str) -> Reading[str]:
    """Consume whitespace and one of the marks; BrokenCall if none follows."""
    mark = yield from accept(source, *marks)
    if mark is None:
        raise BrokenCall(f"{marks[0]!r} is missing")
    return mark


def skip_whitespace(source: AnswerText, emit: Emit | None = None) -> Reading[str]:
    """Consume whitespace; return the next character without consuming it, or "" at the end."""
    while True:
        while not source.ready:
            yield
        if not source.sign.isspace():
            return source.sign
        blank = source.advance()
        if emit is not None:
            emit(blank)


def line(source: AnswerText, end: str, *, max_length: int = 256) -> Reading[str]:
    """Consume text through `end`; BrokenCall if it is not within `max_length` characters."""
    text = ""
    while not text.endswith(end):
        while not source.ready:
            yield
        if not source.sign or len(text) > max_length:
            raise BrokenCall(f"{end!r} is missing")
        text += source.advance()
    return text.removesuffix(end)


@lru_cache(maxsize=64)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)) or "(?!)")


def _beginning(source: AnswerText, marks: Sequence[str]) -> int:
    """Return the length of the text's end that may begin a mark."""
    longest = max(map(len, marks), default=0)
    tail = source.text[max(source.position, len(source.text) - longest) :]
    return max(
        (
            size
            for mark in marks
            for size in range(min(len(mark) - 1, len(tail)), 0, -1)
            if tail.endswith(mark[:size])
        ),
        default=0,
    )
