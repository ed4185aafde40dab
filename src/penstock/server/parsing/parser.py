"""Parsers of answers, from text to events.

    text ──feed──> [ reader of the model's format ] ──> text | reasoning | call start | arguments
                                                        | call end | call broken

A format defines the marks of a model family. The parser accepts any text: a broken call becomes
text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.server.parsing.answer_text import AnswerText, Emit, Reading, skip_whitespace, until
from penstock.server.parsing.events import BrokenCall, Events, ParsedEvent
from penstock.server.parsing.shapes import CallShape

Tools: TypeAlias = Sequence[Mapping[str, Any]]


class CallFormat(Protocol):
    """Syntax of calls in a family of models."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks that begin calls; none is a prefix of another."""

    @property
    def bare(self) -> str:
        """Characters that begin a call without an opening, if no text precedes it; may be empty."""

    @property
    def shape(self) -> CallShape | None:
        """Text around names and arguments; None if grammars do not support the format."""

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Parse calls after an opening; a `bare` character has not been consumed."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    start: str
    end: str
    dropped: tuple[str, ...] = ()


class Parser:
    def __init__(self, source: AnswerText, out: Events, reading: Reading[None]) -> None:
        self._source = source
        self._out = out
        self._reading = reading

    def feed(self, text: str) -> list[ParsedEvent]:
        self._source.push(text)
        next(self._reading, None)
        return self._out.take()

    def end(self, *, cut: bool = False) -> list[ParsedEvent]:
        self._source.close(cut=cut)
        next(self._reading, None)
        return self._out.take()


def names_of(tools: Tools) -> Collection[str]:
    return {tool["function"]["name"] for tool in tools}


def schema_of(name: str, tools: Tools) -> Mapping[str, Any]:
    schemas = (
        tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name
    )
    schema = next(schemas, None)
    return schema if isinstance(schema, Mapping) else {}


def marked_answer(
    source: AnswerText,
    out: Events,
    *,
    reasoning: ReasoningMarks | None,
    inside: bool,
    calls: CallFormat | None,
    tools: Tools,
) -> Reading[None]:
    openings = calls.openings if calls is not None else ()
    around = (reasoning.start, *reasoning.dropped) if reasoning is not None else ()
    if reasoning is not None:
        source.stops = (reasoning.end,)
        if inside:
            yield from _thought(source, out, reasoning.end, calls, tools)
    while True:
        if calls is not None and calls.bare and not out.has_text:
            sign = yield from skip_whitespace(source, out.text)
            if sign and sign in calls.bare:
                yield from call_or_text(source, out, "", calls.read(source, out, "", tools))
                continue
        mark = yield from until(source, (*openings, *around), out.text)
        if mark is None:
            return
        if calls is not None and mark in openings:
            yield from call_or_text(source, out, mark, calls.read(source, out, mark, tools))
        elif reasoning is not None and mark == reasoning.start:
            yield from _thought(source, out, reasoning.end, calls, tools)


def _thought(
    source: AnswerText, out: Events, end: str, calls: CallFormat | None, tools: Tools
) -> Reading[None]:
    """Parse reasoning and its end mark."""
    openings = calls.openings if calls is not None else ()
    drafted: list[str] = []
    emit: Emit = out.reasoning
    while (mark := (yield from until(source, (end, *openings), emit))) not in (None, end):
        assert calls is not None and mark is not None
        drafts = Events(names_of(tools))
        source.record(mark)
        try:
            yield from calls.read(source, drafts, mark, tools)
        except BrokenCall:
            text = source.recorded()
            first = text[: len(mark)] if source.rereads else text
            emit(first)
            source.unread(text[len(first) :])
        else:
            drafted.append(source.recorded())
            emit = drafted.append
    if mark is None:
        source.unread("".join(drafted))
    else:
        out.reasoning("".join(drafted))


def call_or_text(
    source: AnswerText, out: Events, opening: str, reading: Reading[None]
) -> Reading[None]:
    source.keep(opening)
    try:
        yield from reading
    except BrokenCall:
        text = source.kept()
        first = text[: len(opening) or 1] if text.startswith(opening) else ""
        if not source.rereads:
            first = text
        out.broken(first)
        source.unread(text[len(first) :])
    else:
        source.kept()
