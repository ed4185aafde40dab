"""Gemma 4 and FunctionGemma: JSON with unquoted keys, and strings between marks.

<|tool_call>call:write{path:<|"|>a.txt<|"|>,lines:[1,2]}<tool_call|>
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

import regex

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import (
    AnswerText,
    Emit,
    Pattern,
    Reading,
    accept,
    expect,
    peek,
    skip_whitespace,
    take,
    until,
)
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools, schema_of
from penstock.server.parsing.registry import NamedCalls
from penstock.server.parsing.shapes import CallShape, ParameterTags

_HEAD = regex.compile(r"\s*call:(?P<name>[\w.-]+)\s*(?=\{)")
_BARE = r"[^\s:{}\[\],<]+"
_KEY = regex.compile(rf"\s*(?P<key>{_BARE})\s*:")
_SCALAR = regex.compile(r"(?P<text>[^,{}\[\]]*)(?=[,}\]])")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    opening: str
    closing: str
    quote: str
    bare: str = ""

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @property
    def shape(self) -> CallShape:
        tags = ParameterTags("", f":{self.quote}", ":", self.quote, separator=",", notation="gemma")
        marks = (self.opening, "call:", "{", "}", self.closing)
        return CallShape(*marks, separator=None, tags=tags, names=r"[\w.-]+")

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        match = yield from take(source, _HEAD)
        if match is None:
            raise BrokenCall("not the head of a call")
        while match is not None:
            out.start(match["name"])
            keys = schema_of(match["name"], tools).get("properties") or ()
            yield from _Notation(self, source, out.arguments, keys).value()
            out.end()
            source.keep()
            match = yield from take(source, _HEAD)
        yield from accept(source, self.closing)


class _Notation:
    def __init__(
        self, form: GemmaCalls, source: AnswerText, emit: Emit, keys: Collection[str]
    ) -> None:
        self._source = source
        self._emit = emit
        self._quote, self._closing = form.quote, form.closing
        self._keys = keys
        self._open: list[str] = []

    def value(self) -> Reading[None]:
        source = self._source
        sign = yield from skip_whitespace(source)
        if len(self._open) > json_text.DEEPEST:
            raise BrokenCall("too deep")
        if sign in ("{", "["):
            self._open.append("}" if sign == "{" else "]")
            yield from self._members(self._open[-1])
            self._open.pop()
        elif (yield from accept(source, self._quote)):
            yield from self._text()
        else:
            match = yield from take(source, _SCALAR)
            if match is None:
                raise BrokenCall("a value without an end")
            self._emit(_scalar(match["text"]))

    def _members(self, end: str) -> Reading[None]:
        source, emit = self._source, self._emit
        emit(source.advance())
        mark = yield from accept(source, end)
        while mark != end:
            if end == "}":
                yield from self._key()
            yield from self.value()
            mark = yield from expect(source, ",", end)
            emit(", " if mark == "," else "")
        emit(end)

    def _key(self) -> Reading[None]:
        source = self._source
        if (yield from accept(source, self._quote)):
            parts: list[str] = []
            if not (yield from until(source, (self._quote,), parts.append)):
                raise BrokenCall("a name without an end")
            key = "".join(parts)
            yield from expect(source, ":")
        else:
            match = yield from take(source, _KEY)
            if match is None:
                raise BrokenCall("a value without a name")
            key = match["key"].strip('"')
        self._emit(f"{json.dumps(key, ensure_ascii=False)}: ")

    def _text(self) -> Reading[None]:
        def inner(part: str) -> None:
            self._emit(json.dumps(part, ensure_ascii=False)[1:-1])

        source = self._source
        self._emit('"')
        while True:
            mark = yield from until(source, (self._quote,), inner, take=False)
            if mark is None:
                raise BrokenCall("a text without an end")
            is_end = (yield from peek(source, self._rest(), len(mark))) or (
                source.closed
                and not source.cut
                and self._rest(closed=True).match(source.text, source.position + len(mark))
            )
            source.advance(len(mark))
            if is_end:
                self._emit('"')
                return
            inner(mark)

    def _rest(self, *, closed: bool = False) -> Pattern:
        """Return the pattern of what can follow a string, up to the next value or call end."""
        rest = r"\Z" if closed else f"(?:{regex.escape(self._closing)}|call:)"
        for depth, end in enumerate(self._open):
            member = r"\s*\S"
            if end == "}":
                names = "|".join(map(regex.escape, self._keys)) if not depth else ""
                member = rf"\s*(?:(?:{names or _BARE})\s*:|{regex.escape(self._quote)})"
            rest = rf"\s*(?:,{member}|{regex.escape(end)}\s*{rest})"
        return regex.compile(rest)


def _scalar(text: str) -> str:
    """Convert a scalar to JSON; an unknown word becomes a string.

    >>> _scalar("1e-7"), _scalar("None"), _scalar("Rome")
    ('1e-7', 'null', '"Rome"')
    """
    bare = text.strip()
    if bare == "None":  # Jinja templates write null as None
        return "null"
    try:
        value = json.loads(bare)
    except ValueError:
        return json.dumps(bare, ensure_ascii=False)
    return bare if not isinstance(value, float) or value == value else json.dumps(bare)


GEMMA4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")


FORMATS = (NamedCalls("gemma4", GEMMA4), NamedCalls("function_gemma", FUNCTION_GEMMA))
