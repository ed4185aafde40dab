"""Families whose calls mlx-lm reads: between its marks, each text as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.server.parsing.answer_text import AnswerText, Reading, until
from penstock.server.parsing.argument_types import with_plain_types
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.json_text import arguments_text
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.shapes import CallShape, ParameterTags, json_shape

_PROBE = {"name": "probe", "arguments": {"n": 1}}
_CALL_ID = re.compile(r"^(\s*[\w-]+)\[CALL_ID\]\w+(?=\s*\[ARGS\])")
"""Name of a call in front of its arguments, which mlx-lm takes for that of the tool."""
SEED = CallShape(
    *("<seed:tool_call>", "\n<function=", ">\n", "</function>", "\n</seed:tool_call>"),
    separator=None,
    tags=ParameterTags("<parameter=", ">", ">", "</parameter>", after="\n"),
)
"""Shape of Seed-OSS, whose calls the parser of Qwen3-Coder reads."""
_WRITTEN = {
    "gemma4": CallShape(
        *("<|tool_call>", "call:", "{", "}", "<tool_call|>"),
        separator=None,
        tags=ParameterTags("", ':<|"|>', ":", '<|"|>', separator=",", notation="gemma"),
        names=r"[\w-]+",
    ),
    "kimi_k2": CallShape(
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions."),
        *(":0<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        separator=None,  # the next call has another number
    ),
    "kimi_k3": CallShape(
        *("<|open|>tools<|sep|>", '<|open|>call tool="', '" index="1"<|sep|>'),
        *("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
        separator=None,  # the next call has another number
        tags=ParameterTags(
            *('<|open|>argument key="', '" type="string"<|sep|>', '" type="TYPE"<|sep|>'),
            end="<|close|>argument<|sep|>",
            outside=("<|open|>", "<|close|>call", "<|close|>json"),
        ),
        names=r'[^"&]+',
    ),
    "minicpm5": CallShape(
        *("<function name=", '"', '">', "", "</function>"),
        separator=None,
        tags=ParameterTags('<param name="', '">', '">', "</param>"),
    ),
    "minimax_m2": CallShape(
        *("<minimax:tool_call>", '\n<invoke name="', '">\n', "</invoke>"),
        closing="\n</minimax:tool_call>",
        tags=ParameterTags('<parameter name="', '">', '">', "</parameter>", after="\n"),
    ),
    "pythonic": CallShape(
        *("<|tool_call_start|>[", "", "(", ")", "]<|tool_call_end|>"),
        separator=", ",
        tags=ParameterTags(
            *("", "=", "=", ""),
            separator=", ",
            notation="json",  # which Python reads, too
            keys=r"[A-Za-z_][A-Za-z0-9_]{0,127}",
        ),
        names=r"[A-Za-z_][A-Za-z0-9_.]*",
    ),
    "qwen3_coder": CallShape(
        *("<tool_call>", "\n<function=", ">\n", "</function>", "\n</tool_call>"),
        separator=None,
        tags=ParameterTags("<parameter=", ">\n", ">\n", "</parameter>", gap="\n", after="\n"),
    ),
}
"""Shapes by the names of mlx-lm's parsers, where its marks and JSON do not tell them."""


@dataclass(frozen=True, slots=True)
class MlxLmCalls:
    """Format of a parser of mlx-lm."""

    parse: Callable[[str, Any], Any]
    start: str
    end: str
    """Mark behind each call; models without one write the next start, or nothing."""
    bare: str = ""
    written: CallShape | None = None
    """Text around its calls, where that is no JSON between its marks."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Its one mark."""
        return (self.start,)

    @property
    def shape(self) -> CallShape | None:
        """Its marks around JSON, if its parser reads that between them."""
        if self.written is not None or not self.end:
            return self.written
        try:
            read = self.parse(json.dumps(_PROBE), None)
        # A boundary: a parser of another way of writing may raise anything.
        except Exception:  # noqa: BLE001
            return None
        return json_shape(self.start, self.end) if read == _PROBE else None

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read the calls between a start and its end."""
        text: list[str] = []
        if self.end:
            yield from until(source, (self.end,), text.append)
        else:
            yield from until(source, (self.start,), text.append, take=False)
        try:
            plain = _CALL_ID.sub(r"\1", "".join(text))
            parsed = self.parse(plain, with_plain_types(tools))
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        # A boundary: the text is the model's, and the parsers are mlx-lm's, one a family.
        except Exception as error:
            raise BrokenCall("mlx-lm reads no call") from error
        for name, id, arguments in calls:
            out.start(name, id)
            out.arguments(arguments)
            out.end()


def written_shape(name: str, template: str) -> CallShape | None:
    """Return the text around the calls of a parser; None where it is not known.

    Args:
        name: of mlx-lm's parser.
        template: of the model: Mistral's newer ones have no JSON around the arguments.
    """
    if name != "mistral":
        return _WRITTEN.get(name)
    if "[ARGS]" in template:
        return CallShape("[TOOL_CALLS]", "", "[ARGS]", "", separator=None)
    return json_shape("[TOOL_CALLS][", "]")


def _call(parsed: Any) -> tuple[str, str | None, str]:
    name, id = parsed["name"], parsed.get("id")
    if not isinstance(name, str) or not name:
        raise BrokenCall("a call without a name")
    return name, str(id) if id else None, arguments_text(parsed.get("arguments"))
