"""Granite 3: a JSON list of calls behind a mark, closed by some of its versions."""

from penstock.server.parsing.parser import ReasoningMarks
from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

GRANITE = TaggedJson(
    ("<|tool_call|>", "<tool_call>", "<function_call>"),
    ("</tool_call>", "</function_call>"),
    shape=json_shape("<|tool_call|>[", "]"),
)
RESPONSE = ReasoningMarks("<think>", "</think>", ("<response>", "</response>"))
"""Marks of Granite 3.3, whose answers stand between marks of their own."""
WORDED = ReasoningMarks("Here is my thought process:", "Here is my response:")
"""Marks of Granite 3.2, in words."""
