"""LFM2: a list of calls in Python syntax, between marks.

<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.server.parsing.answer_text import AnswerText, Reading, accept, expect
from penstock.server.parsing.events import Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.python_calls import closed, emit_calls
from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import CallShape, ParameterTags

OPENING, CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"

SHAPE = CallShape(
    *(f"{OPENING}[", "", "(", ")", f"]{CLOSING}"),
    separator=", ",
    tags=ParameterTags(
        *("", "=", "=", ""),
        separator=", ",
        notation="json",  # which Python reads, too
        keys=r"[A-Za-z_][A-Za-z0-9_]{0,127}",
    ),
    names=r"[A-Za-z_][A-Za-z0-9_.]*",
)


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    openings: tuple[str, ...] = (OPENING,)
    bare: str = ""
    verbatim: bool = False
    shape: CallShape = SHAPE

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        yield from expect(source, "[")
        emit_calls(out, (yield from closed(source, "[", verbatim=self.verbatim)))
        source.keep()
        yield from accept(source, CLOSING)


_VERBATIM = re.compile(r"""["']'["']\s*[+~]\s*\w+\s*[+~]\s*["']'["']""")
"""Pattern of templates that put strings between single quotes without escapes."""


def _variant(template: str) -> PythonicCalls:
    return PythonicCalls(verbatim=_VERBATIM.search(template) is not None)


FORMATS = (NamedCalls("pythonic", PythonicCalls(), variant=_variant),)
