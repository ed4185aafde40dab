"""Llama 3 and 4: JSON with `parameters`, or calls in the words of Python, with or without a mark.

{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
<|python_tag|>f.call(a=1)
<|python_start|>[f(a=1), g()]<|python_end|>
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading, accept, blanks, line
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools, names_of
from penstock.server.parsing.python_calls import closed, emit_calls
from penstock.server.parsing.shapes import CallShape

SHAPE = CallShape("", '{"name": "', '", "parameters": ', "}", json=True)
_LONGEST_NAME = 128


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    """Format of Llama's calls; without a mark a call must name a tool that is offered."""

    openings: tuple[str, ...] = ("<|python_tag|>", "<|python_start|>")
    bare: str = "{["
    shape: CallShape | None = SHAPE

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read the calls behind a mark, or those that a text begins with."""
        names = None if opening else names_of(tools)
        sign = yield from blanks(source)
        if sign == "[":
            yield from self._list(source, out, names)
        elif sign == "{":
            yield from json_text.calls(source, out, separators=(";", ","), names=names)
        else:
            yield from self._dotted(source, out)
        yield from accept(source, "<|python_end|>")

    def _list(
        self, source: AnswerText, out: Events, names: Collection[str] | None
    ) -> Reading[None]:
        """Read a list of calls of either kind."""
        source.advance()
        if (yield from blanks(source)) == "{":
            yield from json_text.listed(source, out, names)
            return
        name = yield from line(source, "(", most=_LONGEST_NAME)
        if not name.replace(".", "_").isidentifier() or (names is not None and name not in names):
            raise BrokenCall("not the name of a tool")
        emit_calls(out, (yield from closed(source, f"[{name}(")))
        source.keep()

    def _dotted(self, source: AnswerText, out: Events) -> Reading[None]:
        """Read a call of a tool of Llama's own: `brave_search.call(query="x")`."""
        name = yield from line(source, ".call(", most=_LONGEST_NAME)
        emit_calls(out, (yield from closed(source, f"{name}(")))
        source.keep()
