"""Tool call arguments are streamed as they grow, in all three APIs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot import parrot
from servers import Running, serving

from penstock.engine.core import Core
from penstock.engine.request import Finish, Usage
from penstock.server.answers import Delta, Reader, ToolCall
from penstock.server.parsing.events import ArgumentsPart, CallBroken, CallEnd, CallStart
from penstock.server.tools.call_growth import CallPart, CallParts

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
]
FLAT: list[Any] = [{"type": "function", "name": "write", "parameters": {}, "strict": False}]
NATIVE: list[Any] = [{"name": "write", "input_schema": {"type": "object"}}]
GROWN = (
    '{"name": "write", "arguments": {"path": "a.py"',
    ', "text": "one',
    " two",
    ' three"',
    "}}",
)
PIECES = ("I write. ", "<tool_call>", *GROWN, "}}", "</tool_call>", " Done.")
ARGUMENTS = {"path": "a.py", "text": "one two three"}
MESSAGES: list[Any] = [{"role": "user", "content": "write"}]


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model, tokenizer = parrot(tmp_path_factory.mktemp("writing"), *PIECES)
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as running:
        running.service.engine._later(slow_down).result()
        yield running


def slow_down(core: Core) -> None:
    """Delay each step, so that the server joins the text of several steps."""
    step = core.step

    def later(**how: bool) -> bool:
        if not core.view.idle:
            time.sleep(0.05)
        return step(**how)

    core.step = later  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that writes a call whose JSON becomes invalid halfway."""
    pieces = ("<tool_call>", GROWN[0], GROWN[1], GROWN[3], " nonsense", "</tool_call>")
    model, tokenizer = parrot(tmp_path_factory.mktemp("breaking"), *pieces)
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as running:
        yield running


def of_openai(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)


def of_anthropic(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0)


def test_chat_streams_partial_arguments(writing: Running) -> None:
    ask: Any = {"model": "any", "messages": MESSAGES, "tools": TOOLS}
    with of_openai(writing) as api:
        chunks = list(api.chat.completions.create(**ask, stream=True))
        whole = api.chat.completions.create(**ask).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks]
    parts = [call for delta in deltas for call in delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert [part.function.name for part in parts if part.function and part.function.name] == [
        "write"
    ]
    assert parts[0].id and not any(part.id for part in parts[1:])
    grown = [part.function.arguments or "" for part in parts if part.function]
    assert len([part for part in grown if part]) >= 3, "it comes in parts"
    assert json.loads("".join(grown)) == ARGUMENTS
    assert whole.tool_calls and whole.tool_calls[0].type == "function"
    assert whole.tool_calls[0].function.arguments == "".join(grown)
    assert "".join(delta.content or "" for delta in deltas) == whole.content == "I write.  Done."


def test_responses_stream_partial_arguments(writing: Running) -> None:
    ask: Any = {"model": "any", "input": "write", "tools": FLAT}
    with of_openai(writing) as api:
        events = list(api.responses.create(**ask, stream=True))
        whole = api.responses.create(**ask)
    grown = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert len(grown) >= 3 and "".join(grown) == done.arguments
    assert done.name == "write" and json.loads(done.arguments) == ARGUMENTS
    last = events[-1]
    assert last.type == "response.completed"
    kinds = [item.type for item in last.response.output]
    assert kinds == ["message", "function_call", "message"]
    (call,) = [item for item in last.response.output if item.type == "function_call"]
    assert (call.arguments, call.status) == (done.arguments, "completed")
    assert [item.arguments for item in whole.output if item.type == "function_call"] == [
        done.arguments
    ]
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    assert added == [item.id for item in last.response.output]
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_anthropic_streams_partial_arguments(writing: Running) -> None:
    ask: Any = {"model": "any", "max_tokens": 50, "messages": MESSAGES, "tools": NATIVE}
    with of_anthropic(writing) as api:
        events = list(api.messages.create(**ask, stream=True))
        with api.messages.stream(**ask) as stream:
            message = stream.get_final_message()
        whole = api.messages.create(**ask)
    grown = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert len(grown) >= 3 and json.loads("".join(grown)) == ARGUMENTS
    assert [block.type for block in message.content] == ["text", "tool_use", "text"]
    for one in (message, whole):
        assert [block.input for block in one.content if block.type == "tool_use"] == [ARGUMENTS]
        assert one.stop_reason == "tool_use"
    order = [event.type.removeprefix("content_block_") for event in events if "block" in event.type]
    assert order.count("start") == order.count("stop") == 3


def test_invalid_call_is_ended_and_repeated_as_text(breaking: Running) -> None:
    written = "".join(("<tool_call>", GROWN[0], GROWN[1], GROWN[3], " nonsense", "</tool_call>"))
    ask: Any = {"model": "any", "messages": MESSAGES, "tools": TOOLS}
    with of_openai(breaking) as api, of_anthropic(breaking) as other:
        whole = api.chat.completions.create(**ask).choices[0]
        chunks = list(api.chat.completions.create(**ask, stream=True))
        events = list(api.responses.create(model="any", input="write", tools=FLAT, stream=True))
        blocks: Any = {"model": "any", "max_tokens": 50, "messages": MESSAGES, "tools": NATIVE}
        names = [event.type for event in other.messages.create(**blocks, stream=True)]
    assert whole.message.content == written and whole.message.tool_calls is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == written
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    last = events[-1]
    assert last.type == "response.completed"
    assert [
        (item.type, item.status) for item in last.response.output if item.type != "reasoning"
    ] == [  # type: ignore[union-attr]
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert names.count("content_block_start") == names.count("content_block_stop") == 2


# ---- however an answer is cut


START, END, BROKEN = CallStart("f", "call_1"), CallEnd(), CallBroken()


def parts_of(deltas: list[Delta]) -> list[Delta | CallPart]:
    calls = CallParts()
    return [part for delta in deltas for part in calls.in_order(delta)]


def test_end_of_call_is_sent_before_following_text() -> None:
    first, then, text, second = parts_of(
        [
            Delta(growth=(START, ArgumentsPart('{"a"'))),
            Delta("text", growth=(ArgumentsPart(": 1}"), END, CallStart("g", "call_2"))),
        ]
    )
    assert isinstance(first, CallPart) and first.begins and first.grown == '{"a"'
    assert isinstance(then, CallPart) and then.call == ToolCall("call_1", "f", '{"a": 1}')
    assert then.ends and not then.begins and text == Delta("text")
    assert isinstance(second, CallPart) and (second.index, second.call.name) == (1, "g")


def test_call_invalid_from_start_is_only_text() -> None:
    assert parts_of([Delta("x", growth=(START, ArgumentsPart("{"), BROKEN))]) == [Delta("x")]


@given(cuts=st.sets(st.integers(1, 200), max_size=12))
def test_result_is_independent_of_piece_boundaries(writing: Running, cuts: set[int]) -> None:
    text = "".join(PIECES) * 2
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    reader, calls = Reader(writing.service.prompts.format, TOOLS), CallParts()
    pieces = [text[a:b] for a, b in pairwise(places)]
    deltas = [reader.push(piece) for piece in pieces]
    deltas.append(reader.end(Finish(0, "stop", "", None, Usage(1, 0, 1))))
    told: dict[int, str] = {}
    for delta in deltas:
        for part in calls.in_order(delta):
            if isinstance(part, CallPart):
                told[part.index] = told.get(part.index, "") + part.grown
    assert [json.loads(arguments) for arguments in told.values()] == [ARGUMENTS] * 2
    assert [call.arguments for call in reader.calls] == list(told.values())
