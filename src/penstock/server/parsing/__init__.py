"""Parsers of models' answers: reasoning, text, and calls of tools, as they grow."""

from penstock.server.parsing.events import (
    ArgumentsPart,
    CallBroken,
    CallEnd,
    CallStart,
    ParsedEvent,
    ReasoningPart,
    TextPart,
)
from penstock.server.parsing.formats import (
    AnswerFormat,
    answer_format,
    call_names,
    check_names,
    reasoning_names,
)
from penstock.server.parsing.parser import Parser, ReasoningMarks

__all__ = [
    "AnswerFormat",
    "ArgumentsPart",
    "CallBroken",
    "CallEnd",
    "CallStart",
    "ParsedEvent",
    "Parser",
    "ReasoningMarks",
    "ReasoningPart",
    "TextPart",
    "answer_format",
    "call_names",
    "check_names",
    "reasoning_names",
]
