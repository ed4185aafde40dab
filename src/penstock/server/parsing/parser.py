"""Parsers of answers: text comes in, events go out.

    text ──feed──> [ reader of the model's format ] ──> text | reasoning | call start | arguments
                                                        | call end | call broken

A format knows the marks of a family of models. No text of a model raises here: a call that breaks
is text again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.server.parsing.answer_text import AnswerText, Reading, blanks, until
from penstock.server.parsing.events import BrokenCall, Events, ParsedEvent
from penstock.server.parsing.shapes import CallShape

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools that a request offers, in OpenAI's form."""


class CallFormat(Protocol):
    """Way in which a family of models writes calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks that begin calls; none is the beginning of another."""

    @property
    def bare(self) -> str:
        """Signs that may begin calls without a mark, where a text begins."""

    @property
    def shape(self) -> CallShape | None:
        """Text around names and arguments that are JSON; None if they are written otherwise."""

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read the text behind an opening; a bare sign has not been read.

        Raises:
            BrokenCall: it is no call; everything after the last call's end is text then.
        """


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks around the model's reasoning."""

    start: str
    end: str
    dropped: tuple[str, ...] = ()
    """Marks in the text behind it that are left out."""


class Parser:
    """Parser of one answer: a reader of the format, which gets the text as it comes.

    Args:
        source: of the reader.
        out: of the reader.
        reading: the reader itself.
    """

    def __init__(self, source: AnswerText, out: Events, reading: Reading[None]) -> None:
        self._source = source
        self._out = out
        self._reading = reading

    def feed(self, text: str) -> list[ParsedEvent]:
        """Take in text; return the events that are certain with it."""
        self._source.push(text)
        next(self._reading, None)
        return self._out.take()

    def end(self) -> list[ParsedEvent]:
        """Take in the end; return the rest."""
        self._source.close()
        next(self._reading, None)
        return self._out.take()


def names_of(tools: Tools) -> Collection[str]:
    """Return the names of tools."""
    return {tool["function"]["name"] for tool in tools}


def marked_answer(
    source: AnswerText,
    out: Events,
    *,
    reasoning: ReasoningMarks | None,
    inside: bool,
    calls: CallFormat | None,
    tools: Tools,
) -> Reading[None]:
    """Read an answer whose reasoning and calls stand between marks in its text.

    Args:
        source: its text.
        out: takes the events.
        reasoning: marks of the reasoning; None looks for none.
        inside: whether it begins inside the reasoning.
        calls: format of calls; None looks for none.
        tools: tools of the request.
    """
    if inside and reasoning is not None:
        yield from until(source, (reasoning.end,), out.reasoning)
    openings = calls.openings if calls is not None else ()
    around = (reasoning.start, *reasoning.dropped) if reasoning is not None else ()
    while True:
        if calls is not None and calls.bare and not out.has_text:
            sign = yield from blanks(source, out.text)
            if sign and sign in calls.bare:
                yield from call_or_text(source, out, "", calls.read(source, out, "", tools))
                continue
        mark = yield from until(source, (*openings, *around), out.text)
        if mark is None:
            return
        if calls is not None and mark in openings:
            yield from call_or_text(source, out, mark, calls.read(source, out, mark, tools))
        elif reasoning is not None and mark == reasoning.start:
            yield from until(source, (reasoning.end,), out.reasoning)


def call_or_text(
    source: AnswerText, out: Events, opening: str, reading: Reading[None]
) -> Reading[None]:
    """Read calls; the rest goes out as text, from the last call's end on."""
    source.keep(opening)
    try:
        yield from reading
    except BrokenCall:
        out.broken(source.kept())
    else:
        source.kept()
