"""Kimi K2: a section of calls, each with a numbered name and JSON arguments.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading, accept, skip_whitespace, take
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import CallShape

SECTION, CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
ARGUMENTS, END, SECTION_END = (
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
)
_HEAD = regex.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>]+?):\d+)\s*" + regex.escape(ARGUMENTS)
)

SHAPE = CallShape(
    *(SECTION, f"{CALL}functions.", f":0{ARGUMENTS}", END, SECTION_END),
    separator=None,  # the next call has another number
)


@dataclass(frozen=True, slots=True)
class KimiCalls:
    openings: tuple[str, ...] = (SECTION, CALL)
    bare: str = ""
    shape: CallShape = SHAPE

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        if opening == SECTION and not (yield from accept(source, CALL)):
            raise BrokenCall("a section without calls")
        while True:
            head = yield from take(source, _HEAD)
            if head is None or (yield from skip_whitespace(source)) != "{":
                raise BrokenCall("not the head of a call")
            out.start(head["name"], head["id"])
            yield from json_text.value(source, out.arguments)
            out.end()
            source.keep()
            yield from accept(source, END)
            if (yield from accept(source, CALL, SECTION_END)) != CALL:
                return


FORMATS = (NamedCalls("kimi_k2", KimiCalls()),)
