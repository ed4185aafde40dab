"""Events of a parser: the parts of an answer, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import PenstockError


class BrokenCall(PenstockError):
    """Raised when the text after the start of a call is not a valid call."""


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str
    id: str | None = None
    """Id of the call, if the model writes one."""


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    pass


@dataclass(frozen=True, slots=True)
class CallBroken:
    """End of a started call that turned out to be broken; its raw text follows."""


ParsedEvent: TypeAlias = TextPart | ReasoningPart | CallStart | ArgumentsPart | CallEnd | CallBroken


class Events:
    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._events: list[ParsedEvent] = []
        self._in_call = False
        self.has_text = False
        """Whether text other than whitespace has been added."""

    def text(self, text: str) -> None:
        self.has_text = self.has_text or bool(text.strip())
        self._grow(TextPart, text)

    def reasoning(self, text: str) -> None:
        self._grow(ReasoningPart, text)

    def start(self, name: str, id: str | None = None) -> None:
        self.check(name)
        self._in_call = True
        self._events.append(CallStart(name, id))

    def check(self, name: str) -> None:
        """Raise BrokenCall unless a tool of this name is offered."""
        if not name or (self._names is not None and name not in self._names):
            raise BrokenCall("not the name of a tool that is offered")

    def arguments(self, text: str) -> None:
        self._grow(ArgumentsPart, text)

    def end(self) -> None:
        self._in_call = False
        self._events.append(CallEnd())

    def broken(self, text: str) -> None:
        if self._in_call:
            self._in_call = False
            self._events.append(CallBroken())
        self.text(text)

    def extend(self, events: Iterable[ParsedEvent]) -> None:
        self._events += events

    def take(self) -> list[ParsedEvent]:
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
