"""Phi-4-mini: a JSON list of calls between marks, or after `functools`."""

from penstock.server.parsing.registry import NamedCalls, all_of
from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

PHI = TaggedJson(
    ("<|tool_call|>", "functools["),
    ("<|/tool_call|>",),
    ("functools[",),
    shape=json_shape("<|tool_call|>[", "]<|/tool_call|>"),
)


def _shown(template: str) -> bool:
    marked = all_of("<|tool_call|>", "<|/tool_call|>")
    return marked(template) or "functools[" in template


FORMATS = (NamedCalls("phi", PHI, _shown),)
