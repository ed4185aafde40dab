"""JSON calls between marks: the formats of most model families."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading
from penstock.server.parsing.events import Events
from penstock.server.parsing.parser import ReasoningMarks, Tools
from penstock.server.parsing.registry import NamedCalls, all_of
from penstock.server.parsing.shapes import CallShape, json_shape


@dataclass(frozen=True, slots=True)
class TaggedJson:
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    lists: tuple[str, ...] = ()
    """Openings that include a list's bracket."""
    bare: str = ""
    shape: CallShape | None = None

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        if opening in self.lists:
            yield from json_text.listed(source, out)
        else:
            yield from json_text.calls(source, out, closings=self.closings)


NEMOTRON = TaggedJson(
    ("<TOOLCALL>",), ("</TOOLCALL>",), shape=json_shape("<TOOLCALL>[", "]</TOOLCALL>")
)
"""Nemotron Nano 2 and Super 1.5."""
APRIEL = TaggedJson(
    ("<tool_calls>",), ("</tool_calls>",), shape=json_shape("<tool_calls>[", "]</tool_calls>")
)
"""Apriel 1.5 and 1.6."""
PHI = TaggedJson(
    ("<|tool_call|>", "functools["),
    ("<|/tool_call|>",),
    ("functools[",),
    shape=json_shape("<|tool_call|>[", "]<|/tool_call|>"),
)
"""Phi-4-mini: a list between marks, or after `functools`."""
GRANITE = TaggedJson(
    ("<|tool_call|>", "<tool_call>", "<function_call>"),
    ("</tool_call>", "</function_call>"),
    shape=json_shape("<|tool_call|>[", "]"),
)
"""Granite 3: a list of calls after a mark, closed in some versions."""
GRANITE_RESPONSE = ReasoningMarks("<think>", "</think>", ("<response>", "</response>"))
"""Marks of Granite 3.3, which also puts marks around the answer."""
GRANITE_WORDS = ReasoningMarks("Here is my thought process:", "Here is my response:")
"""Marks of Granite 3.2, which are plain sentences."""
HERMES = TaggedJson(
    ("<tool_call>",), ("</tool_call>",), shape=json_shape("<tool_call>", "</tool_call>")
)
"""Hermes, Qwen 2.5 and 3, Granite 4: an object between tags for each call."""
_NOT_HERMES = (
    *("<function=", "<invoke name=", "<arg_key>", "[TOOL_CALLS]", "<tool_call>\\n<function"),
    *("<start_function_call>", "<atem:"),
)
"""Texts in templates of other formats with the same tags."""


def _shows_phi(template: str) -> bool:
    return all_of("<|tool_call|>", "<|/tool_call|>")(template) or "functools[" in template


def _shows_granite(template: str) -> bool:
    named = "<|start_of_role|>" in template or "Granite" in template
    return named and "<|tool_call|>" in template


def _shows_hermes(template: str) -> bool:
    return "<tool_call>" in template and not any(sign in template for sign in _NOT_HERMES)


TAGGED_LISTS = (
    NamedCalls("nemotron", NEMOTRON, all_of("<TOOLCALL>")),
    NamedCalls("apriel", APRIEL, all_of("<tool_calls>[", "]</tool_calls>")),
)
MARKED_LISTS = (NamedCalls("phi", PHI, _shows_phi), NamedCalls("granite", GRANITE, _shows_granite))
TAGGED_OBJECTS = (NamedCalls("hermes", HERMES, _shows_hermes), NamedCalls("json_tools", HERMES))
FORMATS = (*TAGGED_LISTS, *MARKED_LISTS, *TAGGED_OBJECTS)
