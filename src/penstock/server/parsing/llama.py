"""Llama 3 and 4: JSON with `parameters`, or Python calls, with or without a mark.

{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
<|python_tag|>f.call(a=1)
<|python_start|>[f(a=1), g()]<|python_end|>
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading, accept, line, skip_whitespace
from penstock.server.parsing.events import Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.python_calls import closed, emit_calls
from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import CallShape

SHAPE = CallShape("", '{"name": "', '", "parameters": ', "}", json=True)
_LONGEST_NAME = 128


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    openings: tuple[str, ...] = ("<|python_tag|>", "<|python_start|>")
    bare: str = "{["
    shape: CallShape | None = SHAPE

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        sign = yield from skip_whitespace(source)
        if sign == "[":
            yield from self._list(source, out)
        elif sign == "{":
            yield from json_text.calls(source, out, separators=(";", ","))
        else:
            yield from self._dotted(source, out)
        yield from accept(source, "<|python_end|>")

    def _list(self, source: AnswerText, out: Events) -> Reading[None]:
        source.advance()
        if (yield from skip_whitespace(source)) == "{":
            yield from json_text.listed(source, out)
            return
        name = yield from line(source, "(", max_length=_LONGEST_NAME)
        out.check(name)
        emit_calls(out, (yield from closed(source, f"[{name}(")))
        source.keep()

    def _dotted(self, source: AnswerText, out: Events) -> Reading[None]:
        """Parse a call of one of Llama's built-in tools: `brave_search.call(query="x")`."""
        name = yield from line(source, ".call(", max_length=_LONGEST_NAME)
        emit_calls(out, (yield from closed(source, f"{name}(")))
        source.keep()


def _shown(template: str) -> bool:
    return "<|python_start|>" in template or '{"name": function name, "parameters":' in template


FORMATS = (NamedCalls("llama", LlamaCalls(), _shown),)
