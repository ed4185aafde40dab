"""Answers parsed whole or in pieces, and reassembled."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any

from written_answers import TOOLS, Written

from penstock.server.parsing.events import (
    ArgumentsPart,
    CallBroken,
    CallEnd,
    CallStart,
    Events,
    ParsedEvent,
    ReasoningPart,
    TextPart,
)
from penstock.server.parsing.formats import AnswerFormat


def parse(
    pieces: Iterable[str], form: AnswerFormat, tools: list[dict[str, Any]] | None = None
) -> list[ParsedEvent]:
    """Parse an answer that comes in pieces; consecutive parts of one kind are one."""
    parser = form.parser(TOOLS if tools is None else tools)
    events = [event for piece in pieces for event in parser.feed(piece)]
    merged = Events()
    for event in [*events, *parser.end()]:
        match event:
            case TextPart(text):
                merged.text(text)
            case ReasoningPart(text):
                merged.reasoning(text)
            case ArgumentsPart(text):
                merged.arguments(text)
            case CallStart(name, id):
                merged.start(name, id)
            case CallEnd():
                merged.end()
            case CallBroken():
                merged.broken("")
    return merged.take()


def read(events: list[ParsedEvent]) -> Written:
    """Reassemble an answer from its events."""
    text = "".join(event.text for event in events if isinstance(event, TextPart))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningPart))
    calls: list[tuple[str, Any]] = []
    name, arguments = "", ""
    for event in events:
        match event:
            case CallStart(name=name):
                arguments = ""
            case ArgumentsPart(text=part):
                arguments += part
            case CallEnd():
                calls.append((name, json.loads(arguments)))
    return Written("", reasoning, text, calls)


def halves(text: str, cut: int) -> list[str]:
    """Split a text at a byte; a split character moves to the second piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    data = text.encode()
    return [decoder.decode(data[:cut]), decoder.decode(data[cut:], final=True)]
