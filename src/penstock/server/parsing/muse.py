"""Muse Spark and Muse Glimmer: messages with a recipient in their headers.

     to=self<|message|>reasoning<|eom|><|start|>assistant to=user<|message|>text<|eot|>
     to=look_up<|message|><atem:function_calls>...</atem:function_calls><|eot|>

The answer begins after `<|start|>assistant`. A message to `self` is reasoning; all others may
contain calls.
"""

from __future__ import annotations

import re

from penstock.server.parsing.answer_text import AnswerText, Reading, skip_whitespace, until
from penstock.server.parsing.events import Events
from penstock.server.parsing.harmony import MESSAGE, START, begins_with_a_header
from penstock.server.parsing.parser import CallFormat, ReasoningMarks, Tools, call_or_text

MUSE = "muse_spark"
END, END_OF_TURN = "<|eom|>", "<|eot|>"
REASONING = ReasoningMarks(f" to=self{MESSAGE}", END)
_OVER = (END, END_OF_TURN, START)
_HEADER = re.compile(r"\s*(?:assistant\b)?\s*(?:to=(?P<to>[^\s<]+))?\s*")


def muse_answer(
    source: AnswerText, out: Events, calls: CallFormat | None, tools: Tools
) -> Reading[None]:
    if (yield from begins_with_a_header(source)):
        yield from _message(source, out, "")
    while (mark := (yield from _text(source, out, calls, tools))) is not None:
        source.advance(len(mark))
        if mark == START:
            yield from _message(source, out, mark)
        else:
            yield from skip_whitespace(source)


def _message(source: AnswerText, out: Events, opening: str) -> Reading[None]:
    header: list[str] = []
    source.keep(opening)
    mark = yield from until(source, (MESSAGE, *_OVER), header.append, take=False)
    match = _HEADER.fullmatch("".join(header))
    text = source.kept()
    if mark != MESSAGE or match is None:
        out.text(text)
        return
    source.advance(len(MESSAGE))
    if match["to"] == "self":
        yield from until(source, _OVER, out.reasoning, take=False)


def _text(
    source: AnswerText, out: Events, calls: CallFormat | None, tools: Tools
) -> Reading[str | None]:
    """Parse text and calls up to a message's end; return the end mark without consuming it."""
    openings = () if calls is None else calls.openings
    while True:
        mark = yield from until(source, (*openings, *_OVER), out.text, take=False)
        if calls is None or mark not in openings:
            return mark
        source.advance(len(mark))
        yield from call_or_text(source, out, mark, calls.read(source, out, mark, tools))
