"""Streaming of calls, whose arguments are sent as they are generated.

[ rest of the open call | text and reasoning | calls that begin ] order within one delta

If a call breaks after its start was sent, it stays incomplete, and its text follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.server.answers import Delta, ToolCall
from penstock.server.parsing.events import ArgumentsPart, CallBroken, CallEnd, CallStart

Growth: TypeAlias = CallStart | ArgumentsPart | CallEnd | CallBroken


@dataclass(slots=True)
class CallPart:
    index: int
    call: ToolCall
    begins: bool = False
    grown: str = ""
    ends: bool = False
    broken: bool = False
    """Whether the call ends here because it is broken."""


@dataclass(slots=True)
class CallParts:
    count: int = 0
    open: ToolCall | None = None
    _arguments: list[str] = field(default_factory=list)

    def in_order(self, delta: Delta) -> Iterator[Delta | CallPart]:
        """Yield the parts of a delta in order; yielded deltas have only text and reasoning."""
        growth = _unbroken(delta.growth)
        rest = 0
        if self.open is not None:
            ends = (i for i, event in enumerate(growth) if isinstance(event, CallEnd | CallBroken))
            rest = next(ends, len(growth) - 1) + 1
        yield from self._parts(growth[:rest])
        if delta.text or delta.reasoning:
            yield Delta(delta.text, delta.reasoning)
        yield from self._parts(growth[rest:])

    def _parts(self, growth: Sequence[Growth]) -> Iterator[CallPart]:
        part: CallPart | None = None
        for event in growth:
            if isinstance(event, CallStart):
                self.open = ToolCall(event.id or "", event.name, "")
                self._arguments.clear()
                self.count += 1
            assert self.open is not None
            part = part or CallPart(self.count - 1, self.open)
            part.begins = part.begins or isinstance(event, CallStart)
            if isinstance(event, ArgumentsPart):
                part.grown += event.text
                self._arguments.append(event.text)
            elif isinstance(event, CallEnd | CallBroken):
                part.ends, part.broken = True, isinstance(event, CallBroken)
                part.call = self._whole()
                self.open = None
                yield part
                part = None
        if part is not None:
            yield part

    def _whole(self) -> ToolCall:
        assert self.open is not None
        return ToolCall(self.open.id, self.open.name, "".join(self._arguments))


def _unbroken(growth: Sequence[Growth]) -> list[Growth]:
    """Drop calls that begin and break in one delta, which no client has seen."""
    kept: list[Growth] = []
    start: int | None = None
    for event in growth:
        if isinstance(event, CallStart):
            start = len(kept)
        if isinstance(event, CallBroken) and start is not None:
            del kept[start:]
            start = None
            continue
        if isinstance(event, CallEnd):
            start = None
        kept.append(event)
    return kept
