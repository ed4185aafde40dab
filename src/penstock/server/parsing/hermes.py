"""Hermes, Qwen 2.5 and 3, Granite 4: one JSON object between tags for each call."""

from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

HERMES = TaggedJson(
    ("<tool_call>",), ("</tool_call>",), shape=json_shape("<tool_call>", "</tool_call>")
)
