"""Text that comes in pieces, and readers of it that wait for the next.

A reader is a generator that yields when it needs more text than there is, and goes on from there.
So its result cannot depend on the pieces that the text comes in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from penstock.server.parsing.events import BrokenCall

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Generator that yields where it waits for text; its result is the value that it has read."""
Emit: TypeAlias = Callable[[str], None]


class AnswerText:
    """Text so far, and the place up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        """Whether no more text will come."""
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Take in more text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def close(self) -> None:
        """Note that no more text will come."""
        self.closed = True

    @property
    def ready(self) -> bool:
        """Whether the next sign is there, or will never be."""
        return self.at < len(self.text) or self.closed

    @property
    def sign(self) -> str:
        """Next sign; empty at the end, or where it is not there yet."""
        return self.text[self.at : self.at + 1]

    def advance(self, count: int = 1) -> str:
        """Read on by so many signs, which must be there, and return them."""
        taken = self.text[self.at : self.at + count]
        self.at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def keep(self, first: str = "") -> None:
        """Keep the text that is read from now on, behind the part that has been read already."""
        self._kept = [first]

    def kept(self) -> str:
        """Return the kept text, and keep no more."""
        text = "".join(self._kept or ())
        self._kept = None
        return text


def until(
    source: AnswerText, marks: Sequence[str], emit: Emit, *, take: bool = True
) -> Reading[str | None]:
    """Emit the text in front of the first of the marks; return it, or None at the end.

    No mark may be the beginning of another.
    """
    pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
    while True:
        if match := pattern.search(source.text, source.at):
            emit(source.advance(match.start() - source.at))
            return source.advance(len(match[0])) if take else match[0]
        rest = len(source.text) - source.at
        emit(source.advance(rest if source.closed else rest - _beginning(source, marks)))
        if source.closed:
            return None
        yield


def accept(source: AnswerText, *marks: str) -> Reading[str | None]:
    """Read over blanks and the longest mark that comes next; read nothing if none does."""
    while True:
        rest = source.text[source.at :]
        bare = rest.lstrip()
        if source.closed or not any(mark != bare and mark.startswith(bare) for mark in marks):
            mark = max((mark for mark in marks if bare.startswith(mark)), key=len, default=None)
            if mark is not None:
                source.advance(len(rest) - len(bare) + len(mark))
            return mark
        yield


def expect(source: AnswerText, *marks: str) -> Reading[str]:
    """Read over blanks and one of the marks, which must come next.

    Raises:
        BrokenCall: something else comes.
    """
    mark = yield from accept(source, *marks)
    if mark is None:
        raise BrokenCall(f"{marks[0]!r} is missing")
    return mark


def blanks(source: AnswerText, emit: Emit | None = None) -> Reading[str]:
    """Read over blanks; return the sign behind them, which is not read, or nothing at the end."""
    while True:
        while not source.ready:
            yield
        if not source.sign.isspace():
            return source.sign
        blank = source.advance()
        if emit is not None:
            emit(blank)


def line(source: AnswerText, end: str, *, most: int = 256) -> Reading[str]:
    """Read up to `end` and over it; return the text in front of it.

    Raises:
        BrokenCall: it does not come within so many signs.
    """
    text = ""
    while not text.endswith(end):
        while not source.ready:
            yield
        if not source.sign or len(text) > most:
            raise BrokenCall(f"{end!r} is missing")
        text += source.advance()
    return text.removesuffix(end)


def _beginning(source: AnswerText, marks: Sequence[str]) -> int:
    """Return how many signs at the end of the text may be the start of a mark."""
    longest = max(map(len, marks), default=0)
    tail = source.text[max(source.at, len(source.text) - longest) :]
    return max(
        (
            size
            for mark in marks
            for size in range(min(len(mark) - 1, len(tail)), 0, -1)
            if tail.endswith(mark[:size])
        ),
        default=0,
    )
