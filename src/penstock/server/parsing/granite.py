"""Granite 3: a JSON list of calls after a mark, closed in some versions."""

from penstock.server.parsing.parser import ReasoningMarks
from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

GRANITE = TaggedJson(
    ("<|tool_call|>", "<tool_call>", "<function_call>"),
    ("</tool_call>", "</function_call>"),
    shape=json_shape("<|tool_call|>[", "]"),
)
RESPONSE = ReasoningMarks("<think>", "</think>", ("<response>", "</response>"))
"""Marks of Granite 3.3, which also puts marks around the answer."""
WORDED = ReasoningMarks("Here is my thought process:", "Here is my response:")
"""Marks of Granite 3.2, which are plain sentences."""


def _shown(template: str) -> bool:
    named = "<|start_of_role|>" in template or "Granite" in template
    return named and "<|tool_call|>" in template


FORMATS = (NamedCalls("granite", GRANITE, _shown),)
