"""Apriel 1.5 and 1.6: a JSON list of calls between tags."""

from penstock.server.parsing.registry import NamedCalls, all_of
from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

APRIEL = TaggedJson(
    ("<tool_calls>",), ("</tool_calls>",), shape=json_shape("<tool_calls>[", "]</tool_calls>")
)
FORMATS = (NamedCalls("apriel", APRIEL, all_of("<tool_calls>[", "]</tool_calls>")),)
