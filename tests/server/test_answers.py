"""Splitting text into answers, reasoning and calls, for any pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.request import Finish, Reason, Usage
from penstock.server.answers import Delta, Reader, join, total_usage
from penstock.server.parsing.formats import AnswerFormat
from penstock.server.parsing.parser import ReasoningMarks
from penstock.server.parsing.tagged import TaggedJson

USAGE = Usage(10, 4, 3)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def form(*ends: str) -> AnswerFormat:
    """Return a format of JSON calls between markers."""
    calls = TaggedJson(("<call>",), ends or ("</call>",))
    return AnswerFormat("json", "think", calls, ReasoningMarks("<think>", "</think>"))


def finish(reason: Reason = "stop", text: str = "") -> Finish:
    return Finish(0, reason, text, None, USAGE)


def read(pieces: list[str], reader: Reader, reason: Reason = "stop") -> Delta:
    *first, last = pieces or [""]
    return join([*(reader.push(piece) for piece in first), reader.end(finish(reason, last))])


CALL = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
TEXTS = [
    "plain text",
    "<think>so</think>then",
    f"first {CALL} and {CALL} last",
    f"<think>a <call> is no call here</think>{CALL}",
    "a < b, <thin, <cal, </call> and the end <",
    "<call>no JSON</call> after",
    "<call>cut off",
    "<think>cut off",
    '<call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]</call>',
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@given(cuts=st.sets(st.integers(0, 120)))
def test_result_is_independent_of_piece_boundaries(text: str, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = read([text], Reader(form(), TOOLS))
    divided = read(pieces, Reader(form(), TOOLS))
    assert (divided.text, divided.reasoning) == (whole.text, whole.reasoning)
    assert [(c.name, c.arguments) for c in divided.calls] == [
        (c.name, c.arguments) for c in whole.calls
    ]


def test_text_reasoning_and_calls_are_separated() -> None:
    reader = Reader(form(), TOOLS)
    read([f"<think>so</think>then {CALL}!"], reader)
    assert (reader.text, reader.reasoning) == ("then !", "so")
    (call,) = reader.calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    assert reader.reason == "tool_calls"


def test_text_is_emitted_once_it_cannot_be_a_marker() -> None:
    reader = Reader(form(), TOOLS)
    assert reader.push("a <").text == "a "
    assert reader.push("b").text == "<b"


def test_invalid_call_is_returned_as_text() -> None:
    reader = Reader(form(), TOOLS)
    assert read(["<call>no JSON</call> after"], reader).text == "<call>no JSON</call> after"
    assert read(["<call>cut"], Reader(form(), TOOLS), "length").text == "<call>cut"
    assert reader.calls == [] and reader.reason == "stop"


def test_calls_without_end_marker_are_separated() -> None:
    reader = Reader(form("<end>"), TOOLS)
    read(['a<call>{"name": "f"}<call>{"name": "g"}'], reader)
    assert [call.name for call in reader.calls] == ["f", "g"]
    assert reader.text == "a"


def test_call_markers_are_text_if_request_has_no_tools() -> None:
    assert read([CALL], Reader(form(), None)).text == CALL


def test_answer_may_start_inside_reasoning() -> None:
    delta = read(["so</think>then"], Reader(form(), None, reasoning=True))
    assert (delta.reasoning, delta.text) == ("so", "then")


def test_finish_reason_after_call_may_be_length() -> None:
    reader = Reader(form(), TOOLS)
    read([CALL, " and"], reader, "length")
    assert reader.reason == "length" and reader.calls


def test_usage_counts_shared_prompt_once() -> None:
    ends = [
        Finish(0, "stop", "", None, Usage(10, 2, 3)),
        Finish(1, "stop", "", None, Usage(10, 9, 4)),
    ]
    assert total_usage(ends) == Usage(10, 2, 7)
    assert total_usage([]) == Usage(0, 0, 0)
