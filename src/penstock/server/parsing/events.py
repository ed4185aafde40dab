"""Events of a parser: parts of an answer, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import PenstockError


class BrokenCall(PenstockError):
    """Text that cannot go on as the call that it began as."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begin of a call: its tool is known."""

    name: str
    id: str | None = None
    """Name of the call, if the model gives one."""


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """Next part of the arguments of the call that has begun: JSON, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """End of a call, whose arguments are a whole JSON object."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """End of a call that has begun and is none; a part with its text follows."""


ParsedEvent: TypeAlias = TextPart | ReasoningPart | CallStart | ArgumentsPart | CallEnd | CallBroken


class Events:
    """List of events, in which consecutive parts of one kind are one."""

    def __init__(self) -> None:
        self._events: list[ParsedEvent] = []
        self._in_call = False
        self.has_text = False
        """Whether any text but blanks has come."""

    def text(self, text: str) -> None:
        """Add text; nothing if it is empty."""
        self.has_text = self.has_text or bool(text.strip())
        self._grow(TextPart, text)

    def reasoning(self, text: str) -> None:
        """Add reasoning; nothing if it is empty."""
        self._grow(ReasoningPart, text)

    def start(self, name: str, id: str | None = None) -> None:
        """Begin a call.

        Raises:
            BrokenCall: it has no name.
        """
        if not name:
            raise BrokenCall("a call without a name")
        self._in_call = True
        self._events.append(CallStart(name, id))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that has begun."""
        self._grow(ArgumentsPart, text)

    def end(self) -> None:
        """End the call that has begun."""
        self._in_call = False
        self._events.append(CallEnd())

    def broken(self, text: str) -> None:
        """Add the text of a broken call, begun or not."""
        if self._in_call:
            self._in_call = False
            self._events.append(CallBroken())
        self.text(text)

    def take(self) -> list[ParsedEvent]:
        """Return the events so far, and forget them."""
        events, self._events = self._events, []
        return events

    def _grow(
        self, kind: type[TextPart] | type[ReasoningPart] | type[ArgumentsPart], text: str
    ) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))
