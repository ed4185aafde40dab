"""DeepSeek: V3 and R1 fence their JSON, V3.1 does not, V3.2 and V4 write tags of their own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import (
    AnswerText,
    Emit,
    Reading,
    accept,
    blanks,
    expect,
    line,
    until,
)
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.shapes import CallShape, ParameterTags

BEGIN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_INVOKE, _PARAMETER = "<｜DSML｜invoke", "<｜DSML｜parameter"
_NAME = re.compile(r'name="([^"]+)"')


@dataclass(frozen=True, slots=True)
class DeepSeekCalls:
    r"""Format of V3, R1 and V3.1.

    <begin><call>function<sep>NAME\n```json\n{...}\n```<end><close>
    <begin><call>NAME<sep>{...}<end><close>
    """

    openings: tuple[str, ...] = (BEGIN, CALL)
    bare: str = ""
    fenced: bool = True
    """Whether the model fences the arguments, as V3 and R1 do."""

    @property
    def shape(self) -> CallShape:
        """Text around its calls, as the templates of V3 and R1, or of V3.1, write it."""
        if self.fenced:
            between, end = "\n```json\n", f"\n```{END}"
            return CallShape(BEGIN, f"{CALL}function{SEP}", between, end, CLOSE, "\n")
        return CallShape(BEGIN, CALL, SEP, END, CLOSE)

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read all calls, and the mark that closes them, if it is there."""
        if opening == BEGIN:
            yield from expect(source, CALL)
        while True:
            yield from self._call(source, out)
            source.keep()
            if (yield from accept(source, CALL, CLOSE)) != CALL:
                return

    def _call(self, source: AnswerText, out: Events) -> Reading[None]:
        name = yield from line(source, SEP)
        fenced = (yield from blanks(source)) != "{"
        if fenced:
            name = yield from line(source, "\n")
            yield from expect(source, "```json", "```")
        if (yield from blanks(source)) != "{":
            raise BrokenCall("arguments that are no object")
        out.start(name.strip())
        yield from json_text.value(source, out.arguments)
        out.end()
        source.keep()
        if fenced:
            yield from accept(source, "```")
        yield from accept(source, END)


@dataclass(frozen=True, slots=True)
class DeepSeekTags:
    """Format of V3.2 and V4: a tag for each call, and one for each of its arguments."""

    openings: tuple[str, ...] = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    """Tags that begin calls; the first is the one that the model writes."""
    bare: str = ""

    @property
    def shape(self) -> CallShape:
        """Text around its calls, as the templates of V3.2 and V4 write it."""
        opening = self.openings[0]
        tags = ParameterTags(
            f'{_PARAMETER} name="',
            '" string="true">',
            '" string="false">',
            end=_end(_PARAMETER),
            after="\n",
        )
        invoke = (f'\n{_INVOKE} name="', '">\n', _end(_INVOKE))
        return CallShape(opening, *invoke, f"\n{_end(opening[:-1])}", tags=tags)

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        """Read all calls, and the tag that closes them, if it is there."""
        closing = opening.replace("<", "</")
        yield from expect(source, _INVOKE)
        while True:
            out.start(_name((yield from line(source, ">"))))
            out.arguments("{")
            yield from self._parameters(source, out)
            out.arguments("}")
            out.end()
            source.keep()
            if (yield from accept(source, _INVOKE, closing)) != _INVOKE:
                return

    def _parameters(self, source: AnswerText, out: Events) -> Reading[None]:
        comma = ""
        while (yield from expect(source, _PARAMETER, _end(_INVOKE))) == _PARAMETER:
            head = yield from line(source, ">")
            out.arguments(f"{comma}{json.dumps(_name(head), ensure_ascii=False)}: ")
            comma = ", "
            if 'string="false"' in head:
                yield from json_text.value(source, out.arguments)
                yield from expect(source, _end(_PARAMETER))
            else:
                yield from _text(source, out.arguments)


def _text(source: AnswerText, emit: Emit) -> Reading[None]:
    """Read a parameter that is a text, and emit it as a JSON string."""
    emit('"')
    end = yield from until(
        source,
        (_end(_PARAMETER),),
        lambda part: emit(json.dumps(part, ensure_ascii=False)[1:-1]),
    )
    if end is None:
        raise BrokenCall("a parameter without an end")
    emit('"')


def _end(tag: str) -> str:
    return f"</{tag[1:]}>"


def _name(head: str) -> str:
    match = _NAME.search(head)
    if match is None:
        raise BrokenCall("a tag without a name")
    return match[1]
