"""Harmony, the answer format of gpt-oss: messages with a channel, some addressed to a tool.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The answer begins after `<|start|>assistant`. Its text is in messages of the channel `final`, and
in those of `commentary` without a recipient.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from penstock.server.parsing import json_text
from penstock.server.parsing.answer_text import AnswerText, Reading, skip_whitespace, until
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.parser import Tools, call_or_text, names_of
from penstock.server.parsing.shapes import CallShape

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
REASONING = (f"{CHANNEL}analysis{MESSAGE}", END)
SHAPE = CallShape(
    opening=CHANNEL,
    before="commentary to=functions.",
    between=f" {CONSTRAIN}json{MESSAGE}",
    after="",  # the arguments are followed by the mark that ends the answer
    separator=None,
)
_LONGEST_HEADER = 512
_OVER = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(?P<channel>[^\s<]+)")
_CONSTRAIN = re.compile(rf"{re.escape(CONSTRAIN)}\s*")

Head: TypeAlias = tuple[Literal["text", "reasoning", "call"], str]


def harmony_answer(source: AnswerText, out: Events, tools: Tools) -> Reading[None]:
    """Parse the messages of an answer; without tools, calls are text."""
    if (yield from begins_with_a_header(source)):
        yield from _message(source, out, tools, "")
    while (mark := (yield from until(source, _OVER, out.text))) is not None:
        if mark in (START, CHANNEL):
            yield from _message(source, out, tools, mark)
        else:
            yield from skip_whitespace(source)


def begins_with_a_header(source: AnswerText) -> Reading[bool]:
    yield from skip_whitespace(source)
    while True:
        rest = source.text[source.position :]
        if rest.startswith(("<|", "to=")):
            return True
        if source.closed or not any(mark.startswith(rest) for mark in ("<|", "to=")):
            return False
        yield


def _message(source: AnswerText, out: Events, tools: Tools, opening: str) -> Reading[None]:
    header: list[str] = []
    source.keep(opening)
    mark = yield from until(source, (MESSAGE, END, CALL, RETURN, START), header.append, take=False)
    head = _read_header(f"{opening}{''.join(header)}", tools)
    if mark != MESSAGE or head is None:
        out.text(source.kept())
        return
    source.advance(len(MESSAGE))
    kind, name = head
    if kind == "call":
        begun = source.kept()
        yield from call_or_text(source, out, begun, _call(source, out, name))
    else:
        source.kept()
        emit = out.text if kind == "text" else out.reasoning
        yield from until(source, _OVER, emit, take=False)


def _read_header(header: str, tools: Tools) -> Head | None:
    """Parse the header of a message; None if malformed."""
    match = _CHANNEL.search(header)
    channel = "" if match is None else match["channel"]
    words = _words(_CHANNEL.sub(" ", header, count=1))
    if len(header) > _LONGEST_HEADER or len(words) > 2 or CHANNEL in "".join(words):
        return None
    named = next((word for word in words if word.startswith("to=")), "".join(words[:1]))
    recipient = named.removeprefix("to=")
    name = recipient.removeprefix("functions.")
    if tools and name and (name != recipient or name in names_of(tools)):
        return "call", name
    return ("reasoning" if channel == "analysis" else "text"), ""


def _words(header: str) -> list[str]:
    """Split a header, whose channel was removed, into words without its role.

    >>> _words("<|start|>assistant to=functions.f<|constrain|> json")
    ['to=functions.f', '<|constrain|>json']
    """
    begun = header.removeprefix(START)
    words = _CONSTRAIN.sub(f" {CONSTRAIN}", begun).split()
    has_role = begun != header and not begun.lstrip().startswith("to=")
    return words[1:] if has_role else words


def _call(source: AnswerText, out: Events, name: str) -> Reading[None]:
    if (yield from skip_whitespace(source)) != "{":
        raise BrokenCall("arguments that are no object")
    out.start(name)
    yield from json_text.value(source, out.arguments)
    out.end()
    source.keep()
    yield from skip_whitespace(source)
