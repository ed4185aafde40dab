"""DeepSeek V3 and R1, which fence JSON arguments, and V3.1, which does not."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import (
    AnswerText,
    Reading,
    accept,
    expect,
    line,
    skip_whitespace,
)
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools
from penstock.server.parsing.registry import NamedCalls, all_of
from penstock.server.parsing.shapes import CallShape
from penstock.server.parsing.tag_calls import TagCalls
from penstock.server.parsing.tag_formats import DSML, DSML_TOOLS

BEGIN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass(frozen=True, slots=True)
class DeepSeekCalls:
    r"""Calls of V3, R1 and V3.1.

    <begin><call>function<sep>NAME\n```json\n{...}\n```<end><close>
    <begin><call>NAME<sep>{...}<end><close>
    """

    openings: tuple[str, ...] = (BEGIN, CALL)
    bare: str = ""
    fenced: bool = True
    """Whether arguments are fenced, as in V3 and R1."""

    @property
    def shape(self) -> CallShape:
        if self.fenced:
            between, end = "\n```json\n", f"\n```{END}"
            return CallShape(BEGIN, f"{CALL}function{SEP}", between, end, CLOSE, "\n")
        return CallShape(BEGIN, CALL, SEP, END, CLOSE)

    def read(self, source: AnswerText, out: Events, opening: str, tools: Tools) -> Reading[None]:
        if opening == BEGIN:
            yield from expect(source, CALL)
        while True:
            yield from self._call(source, out)
            source.keep()
            if (yield from accept(source, CALL, CLOSE)) != CALL:
                return

    def _call(self, source: AnswerText, out: Events) -> Reading[None]:
        name = yield from line(source, SEP)
        fenced = (yield from skip_whitespace(source)) != "{"
        if fenced:
            name = yield from line(source, "\n")
            yield from expect(source, "```json", "```")
        if (yield from skip_whitespace(source)) != "{":
            raise BrokenCall("arguments that are no object")
        out.start(name.strip())
        yield from json_text.value(source, out.arguments)
        out.end()
        source.keep()
        if fenced:
            yield from accept(source, "```")
        yield from accept(source, END)


def _variant(template: str) -> DeepSeekCalls:
    return DeepSeekCalls(fenced="```json" in template or not template)


def _tags(template: str) -> TagCalls:
    return DSML_TOOLS if "tool_calls>" in template else DSML


FORMATS = (
    NamedCalls("deepseek_tags", DSML, all_of("｜DSML｜"), _tags),
    NamedCalls("deepseek", DeepSeekCalls(), all_of(BEGIN), _variant),
)
