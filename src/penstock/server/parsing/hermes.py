"""Hermes, Qwen 2.5 and 3, Granite 4: a JSON object between tags for each call."""

from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import json_shape
from penstock.server.parsing.tagged import TaggedJson

HERMES = TaggedJson(
    ("<tool_call>",), ("</tool_call>",), shape=json_shape("<tool_call>", "</tool_call>")
)
_OTHERS = (
    *("<function=", "<invoke name=", "<arg_key>", "[TOOL_CALLS]", "<tool_call>\\n<function"),
    *("<start_function_call>", "<atem:"),
)
"""Texts in templates of other formats with the same tags."""


def _shown(template: str) -> bool:
    return "<tool_call>" in template and not any(sign in template for sign in _OTHERS)


FORMATS = (NamedCalls("hermes", HERMES, _shown), NamedCalls("json_tools", HERMES))
