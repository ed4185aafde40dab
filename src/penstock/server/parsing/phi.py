"""Phi-4-mini: a JSON list of calls between marks, or behind the word functools."""

from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

PHI = TaggedJson(
    ("<|tool_call|>", "functools["),
    ("<|/tool_call|>",),
    ("functools[",),
    shape=json_shape("<|tool_call|>[", "]<|/tool_call|>"),
)
