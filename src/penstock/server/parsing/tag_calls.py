r"""Calls with a tag for each argument, and verbatim strings.

    <tool_call>                opening
    <function=write>           head of a call
    <parameter=path>           head of an argument
    a.txt
    </parameter>               end of its value
    </function>                end of the call
    </tool_call>               closing

Strings are not escaped, so a string may contain the format's own marks. A value ends at an end
mark only if the text after it can follow a value: the head of another argument of the tool, or
the end of the call with no further end mark before the next call. If that is ambiguous, the call
becomes text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import regex

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import (
    AnswerText,
    Emit,
    Match,
    Pattern,
    Reading,
    accept,
    peek,
    skip_whitespace,
    take,
    until,
)
from penstock.server.parsing.argument_types import json_types
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools, schema_of
from penstock.server.parsing.python_calls import python_value
from penstock.server.parsing.shapes import CallShape, ParameterTags

NAME, KEY = "NAME", "KEY"
"""Placeholders for the tool's and the argument's name in head patterns."""
_ANY_KEY = r"(?P<key>[^<>\"\n]+)"
_JSON_BEGINS = regex.compile(r"""\s*(?:\{\s*["}]|\[\s*[^\s'A-Z])""")
"""Beginning of a JSON object or list, as opposed to Python's notation."""


@dataclass(frozen=True, slots=True)
class TagCalls:
    """Call format with a tag for each argument.

    Args:
        shape: text around names and arguments, as in the chat template.
        head: pattern of a call's head, with NAME; by default derived from `shape`.
        argument: pattern of an argument's head, with KEY; by default derived from `shape`. A group
            `text` that matches marks a string; without the group, the schema decides.
        nulls: texts read as null where the schema allows null.
        python: whether lists and objects are Python literals, parsed once complete.
        wrapped: optional marks around a string, inside its tags.
        doubled: whether a tool's name may be repeated, as in `look.look`.
        escaped: whether names are XML-escaped.
        block: marks around all arguments as one JSON object, instead of tags.
    """

    shape: CallShape
    head: str | None = None
    argument: str | None = None
    nulls: tuple[str, ...] = ("null",)
    python: bool = False
    wrapped: tuple[str, str] | None = None
    doubled: bool = False
    escaped: bool = False
    block: tuple[str, str] | None = None
    bare: str = ""

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.shape.opening,)

    @property
    def tags(self) -> ParameterTags:
        assert self.shape.tags is not None
        return self.shape.tags

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        head = self._head_of(tools)
        match = yield from take(source, head)
        if match is None:
            raise BrokenCall("not the head of a call")
        while match is not None:
            name = match["name"]
            out.start(name)
            out.arguments("{")
            yield from _Arguments(self, source, out, head, schema_of(name, tools)).read()
            out.arguments("}")
            out.end()
            source.keep()
            match = (yield from take(source, head)) if self.has_several else None
        yield from accept(source, self.shape.closing.strip())

    @property
    def has_several(self) -> bool:
        """Whether one opening can have several calls, each with its own mark."""
        return bool(self.shape.before.strip()) and bool(self.shape.closing)

    def _head_of(self, tools: Tools) -> Pattern:
        return self._head_named(tuple(tool["function"]["name"] for tool in tools))

    @lru_cache(maxsize=16)  # noqa: B019 - the formats of a few modules
    def _head_named(self, tools: tuple[str, ...]) -> Pattern:
        names = [re.escape(name) for name in tools]
        twice = [rf"{name}\.(?P<name>{name})" for name in names] if self.doubled else []
        choice = "|".join((*twice, *(f"(?P<name>{name})" for name in names)))
        return regex.compile((self.head or self._shown_head()).replace(NAME, f"(?:{choice})"))

    def _shown_head(self) -> str:
        shape, between = self.shape, _loose(self.shape.between)
        if not between:  # the name ends where a tag begins
            between = rf"(?=\s*(?:{_loose(self.tags.before)}|{_loose(shape.closing)}))"
        return rf"\s*{_loose(shape.before)}{NAME}{between}"

    @property
    def argument_head(self) -> Pattern:
        return self._compiled_argument()

    @lru_cache(maxsize=16)  # noqa: B019
    def _compiled_argument(self) -> Pattern:
        tags = self.tags
        shown = rf"\s*{_loose(tags.before)}{KEY}{_loose(tags.as_text)}"
        return regex.compile((self.argument or shown).replace(KEY, _ANY_KEY))


class _Arguments:
    def __init__(
        self,
        form: TagCalls,
        source: AnswerText,
        out: Events,
        head: Pattern,
        schema: Mapping[str, Any],
    ) -> None:
        self._form = form
        self._source = source
        self._out = out
        self._schema = schema
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._keys = set(self._properties)
        self._is_open = not self._keys or bool(schema.get("additionalProperties"))
        self._given: set[str] = set()
        self._argument = form.argument_head
        tags = form.tags
        self._ends = (f"{tags.gap}{tags.end}", tags.end) if tags.gap else (tags.end,)
        self._call_head = head
        self._call_end, self._closing, self._behind = _ends(form, head.pattern, source.stops)

    def read(self) -> Reading[None]:
        source, form = self._source, self._form
        if form.block is not None and (yield from accept(source, form.block[0])):
            yield from self._block(form.block[1])
        while match := (yield from take(source, self._argument)):
            yield from self._value(match)
        yield from self._end_of_call()

    def _block(self, end: str) -> Reading[None]:
        parts: list[str] = []
        yield from json_text.value(self._source, parts.append)
        text = json_text.arguments_text(json.loads("".join(parts)))
        self._out.arguments(text[1:-1])
        self._given.add("")
        if not (yield from accept(self._source, end)):
            raise BrokenCall("arguments without an end")

    def _value(self, head: Match) -> Reading[None]:
        key = html.unescape(head["key"]) if self._form.escaped else head["key"]
        if key in self._given:
            raise BrokenCall("an argument twice")
        comma = ", " if self._given else ""
        self._given.add(key)
        self._out.arguments(f"{comma}{_quoted(key)}: ")
        types = json_types(self._properties.get(key), self._schema)
        if "text" in self._argument.groupindex:
            types = {"string"} if head["text"] is not None else types - {"string"} or {"object"}
        if self._form.tags.as_text.endswith("\n"):
            yield from take(self._source, regex.compile(r"\n|(?=[^\n])"))
        if types == {"string"}:
            yield from self._text()
        elif (
            types
            and "string" not in types
            and not self._form.python
            and (yield from peek(self._source, _JSON_BEGINS))
        ):
            yield from self._json()
        else:
            parts: list[str] = []
            yield from self._until_end(parts.append)
            self._out.arguments(json_of("".join(parts), types, self._form.nulls))

    def _text(self) -> Reading[None]:
        out = self._out
        out.arguments('"')
        yield from self._until_end(lambda part: out.arguments(_quoted(part)[1:-1]))
        out.arguments('"')

    def _json(self) -> Reading[None]:
        yield from skip_whitespace(self._source)
        yield from json_text.value(self._source, self._out.arguments)
        if not (yield from accept(self._source, self._form.tags.end)):
            raise BrokenCall("a value without an end")

    def _until_end(self, emit: Emit) -> Reading[None]:
        source, wrapped = self._source, self._form.wrapped
        ends = self._ends
        if wrapped and (yield from take(source, regex.compile(re.escape(wrapped[0])))):
            ends = (f"{wrapped[1]}{ends[-1]}",)
        while True:
            end = yield from until(source, ends, emit, take=False)
            if end is None:
                raise BrokenCall("a value without an end")
            is_end = yield from self._follows(len(end))
            part = source.advance(len(end))
            if is_end:
                return
            emit(part)

    def _follows(self, offset: int) -> Reading[bool]:
        """Return whether the text after an end mark can follow a value; BrokenCall if ambiguous."""
        source, shape = self._source, self._form.shape
        match = yield from peek(source, self._argument, offset)
        if match is not None:
            key = match["key"]
            if key in self._given or not (self._is_open or key in self._keys):
                raise BrokenCall("a text that may go on, or an argument that the tool lacks")
            return True
        call_end = yield from peek(source, self._call_end, offset)
        if call_end is None:
            return self._may_end(offset, shape.after) and not source.cut
        offset = call_end.end() - source.position
        if self._form.has_several and (yield from peek(source, self._call_head, offset)):
            return True
        closing = yield from peek(source, self._closing, offset)
        if closing is None:
            is_whole = bool(shape.after.strip()) or not source.cut
            return self._may_end(offset, shape.closing) and is_whole
        return (yield from self._is_last(closing.end() - source.position))

    def _may_end(self, offset: int, mark: str) -> bool:
        """Return whether the answer ends here, possibly within `mark`."""
        rest = self._source.text[self._source.position + offset :].strip()
        return self._source.closed and mark.strip().startswith(rest)

    def _is_last(self, offset: int) -> Reading[bool]:
        """Return whether no value ends before the next call or the answer's end."""
        source = self._source
        while True:
            match = self._behind.search(
                source.text, source.position + offset, partial=not source.closed
            )
            if match is not None and not match.partial:
                return match["end"] is None
            if source.closed:
                return True
            # No mark begins before a partial match.
            offset = (len(source.text) if match is None else match.start()) - source.position
            yield

    def _end_of_call(self) -> Reading[None]:
        source, after = self._source, self._form.shape.after.strip()
        if after and (yield from accept(source, after)):
            return
        if not after and (yield from peek(source, self._closing)):
            return
        rest = yield from skip_whitespace(source)
        if (rest and not self._may_end(0, after or self._form.shape.closing)) or source.cut:
            raise BrokenCall("a call without an end")


@lru_cache(maxsize=16)
def _ends(form: TagCalls, head: str, stops: tuple[str, ...]) -> tuple[Pattern, Pattern, Pattern]:
    """Return patterns of a call's end, of the closing, and of what may follow both."""
    shape = form.shape
    behind = rf"(?P<end>{re.escape(form.tags.end)})|(?P<call>{re.escape(shape.opening)}{head})"
    stop = "|".join(map(re.escape, stops)) or "(?!)"
    return (
        regex.compile(rf"\s*{re.escape(shape.after.strip())}"),
        regex.compile(rf"\s*{re.escape(shape.closing.strip())}"),
        regex.compile(rf"{behind}|(?P<stop>{stop})", regex.DOTALL),
    )


def json_of(text: str, types: Collection[str], nulls: Iterable[str] = ("null",)) -> str:
    """Convert a value between tags to JSON, according to the types its schema allows.

    >>> json_of("1e-7", {"number"}), json_of("True", {"boolean"}), json_of("5", {"string", "null"})
    ('1e-7', 'true', '"5"')
    """
    if "string" in types:
        return "null" if "null" in types and text in nulls else _quoted(text)
    bare = text.strip()
    try:
        json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return bare
    if not types:
        return _quoted(text)
    try:
        return json.dumps(python_value(bare), ensure_ascii=False, allow_nan=False)
    except (BrokenCall, ValueError, TypeError):
        return _quoted(text)


def _refuse(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _loose(text: str) -> str:
    r"""Return a pattern in which whitespace between words and tags may vary.

    >>> _loose('\n<invoke name="')
    '<invoke\\s+name="'
    """
    return r"\s*".join(
        r"\s+".join(map(re.escape, part.split())) for part in re.split(r"(?<=>)\s*(?=<)", text)
    )


_quoted = partial(json.dumps, ensure_ascii=False)
