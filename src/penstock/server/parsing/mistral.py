"""Mistral: a JSON list of calls after a mark, or a name and JSON arguments for each call.

[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading, accept, skip_whitespace, take
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import CallShape, json_shape

MARK = "[TOOL_CALLS]"
_HEAD = regex.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]")


@dataclass(frozen=True, slots=True)
class MistralCalls:
    shape: CallShape
    openings: tuple[str, ...] = (MARK,)
    bare: str = ""

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        if (yield from accept(source, "[")):
            yield from json_text.listed(source, out)
            return
        head = yield from take(source, _HEAD)
        if head is None:
            raise BrokenCall("not the head of a call")
        while head is not None:
            if (yield from skip_whitespace(source)) != "{":
                raise BrokenCall("arguments that are no object")
            out.start(head["name"], head["id"])
            yield from json_text.value(source, out.arguments)
            out.end()
            source.keep()
            head = yield from take(source, _HEAD)


LISTED = MistralCalls(json_shape(f"{MARK}[", "]"))
HEADED = MistralCalls(CallShape(MARK, "", "[ARGS]", "", separator=None))


def _variant(template: str) -> MistralCalls:
    return HEADED if "[ARGS]" in template else LISTED


FORMATS = (NamedCalls("mistral", LISTED, variant=_variant),)
