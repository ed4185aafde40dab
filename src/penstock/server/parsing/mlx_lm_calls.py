"""Families whose calls mlx-lm reads: between its marks, each text as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.models.mlx_lm import tool_parser
from penstock.server.parsing.answer_text import AnswerText, Reading, until
from penstock.server.parsing.argument_types import json_types, with_plain_types
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.json_text import arguments_text
from penstock.server.parsing.parser import Tools, names_of
from penstock.server.parsing.shapes import CallShape, ParameterTags, json_shape

_PROBE = {"name": "probe", "arguments": {"n": 1}}
_CALL_ID = re.compile(r"^(\s*[\w-]+)\[CALL_ID\]\w+(?=\s*\[ARGS\])")
"""Name of a call in front of its arguments, which mlx-lm takes for that of the tool."""
GEMMA_QUOTE, FUNCTION_GEMMA_QUOTE = '<|"|>', "<escape>"
"""Marks around texts of Gemma 4 and of FunctionGemma, which write calls alike but for these."""
_MUSE_PART = re.compile(
    r'<atem:invoke\b[^>]*?\bname="(?P<tool>[^"]+)">'
    r'|(?P<head><atem:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>)'
    r"(?P<text>.*?)(?=</atem:parameter>)",
    re.DOTALL,
)
"""Head of a call of Muse Spark's, or an argument up to its end."""
SEED = CallShape(
    *("<seed:tool_call>", "\n<function=", ">\n", "</function>", "\n</seed:tool_call>"),
    separator=None,
    tags=ParameterTags("<parameter=", ">", ">", "</parameter>", after="\n"),
)
"""Shape of Seed-OSS, whose calls the parser of Qwen3-Coder reads."""


def _gemma_shape(opening: str, closing: str, quote: str) -> CallShape:
    """Return the shape of calls in Gemma's notation, with a mark around each text."""
    tags = ParameterTags("", f":{quote}", ":", quote, separator=",", notation="gemma")
    return CallShape(
        *(opening, "call:", "{", "}", closing), separator=None, tags=tags, names=r"[\w-]+"
    )


_WRITTEN = {
    "function_gemma": _gemma_shape(
        "<start_function_call>", "<end_function_call>", FUNCTION_GEMMA_QUOTE
    ),
    "gemma4": _gemma_shape("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
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
    "muse_spark": CallShape(
        *("<atem:function_calls>", '\n<atem:invoke name="', '">\n', "</atem:invoke>"),
        closing="\n</atem:function_calls>",
        tags=ParameterTags('<atem:parameter name="', '">', '">', "</atem:parameter>", after="\n"),
        names=r'[^"]+',
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
        """Marks that open a call: the one of the parser."""
        return (self.start,)

    @property
    def shape(self) -> CallShape | None:
        """Shape of its calls, if its parser reads JSON between its marks."""
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
            parsed = self._parsed(_CALL_ID.sub(r"\1", "".join(text)), tools)
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        # A boundary: the text is the model's, and the parsers are mlx-lm's, one a family.
        except Exception as error:
            raise BrokenCall("mlx-lm reads no call") from error
        for name, id, arguments in calls:
            out.start(_offered(name, tools), id)
            out.arguments(arguments)
            out.end()

    def _parsed(self, text: str, tools: Tools) -> Any:
        """Return the calls in a text as mlx-lm does; its parser may raise anything."""
        name, plain = self.parse.__module__.rpartition(".")[2], with_plain_types(tools)
        if name == "muse_spark":
            text = quoted_texts(text, tools)
        if name == "function_gemma":
            gemma, _, _ = tool_parser("gemma4")
            with suppress(ValueError):  # a text without marks, which its own parser reads
                return gemma(text.replace(FUNCTION_GEMMA_QUOTE, GEMMA_QUOTE), plain)
        return self.parse(text, plain)


def quoted_texts(text: str, tools: Tools) -> str:
    r"""Return Muse Spark's calls with JSON for texts: mlx-lm reads every text as JSON that can be.

    >>> schema = {"properties": {"id": {"type": "string"}, "n": {"type": "integer"}}}
    >>> tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    >>> id, n = (f'<atem:parameter name="{key}">1</atem:parameter>' for key in ("id", "n"))
    >>> print(quoted_texts(f'<atem:invoke name="f">\n{id}\n{n}\n</atem:invoke>', tools))
    <atem:invoke name="f">
    <atem:parameter name="id">"1"</atem:parameter>
    <atem:parameter name="n">1</atem:parameter>
    </atem:invoke>
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    schema: Mapping[str, Any] = {}

    def quoted(match: re.Match[str]) -> str:
        nonlocal schema
        if match["tool"] is not None:
            schema = schemas.get(match["tool"]) or {}
            return match[0]
        types = json_types((schema.get("properties") or {}).get(match["key"]), schema)
        is_null = match["text"] == "null" and "null" in types
        if "string" not in types or is_null:
            return match[0]
        return f"{match['head']}{json.dumps(match['text'])}"

    return _MUSE_PART.sub(quoted, text)


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


def _offered(name: str, tools: Tools) -> str:
    """Return a tool's name; Muse Glimmer writes one without a namespace twice, as `look.look`.

    >>> _offered("look.look", [{"function": {"name": "look"}}])
    'look'
    """
    names, (first, _, second) = names_of(tools), name.partition(".")
    return first if name not in names and first == second and first in names else name


def _call(parsed: Any) -> tuple[str, str | None, str]:
    name, id = parsed["name"], parsed.get("id")
    if not isinstance(name, str) or not name:
        raise BrokenCall("a call without a name")
    return name, str(id) if id else None, arguments_text(parsed.get("arguments"))
