"""Newer and legacy fields of OpenAI's requests, through its client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from parrot import parrot
from servers import Running, serving

PARAMETERS = {
    "type": "object",
    "properties": {"thing": {"enum": ["falcon", "otter"]}},
    "required": ["thing"],
    "additionalProperties": False,
}
NAMES = ("look_up", "forget")
FUNCTIONS: list[Any] = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT: list[Any] = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
CALL = '<tool_call>{"name": "look_up", "arguments": {"thing": "falcon"}}</tool_call>'
MESSAGES: list[Any] = [{"role": "user", "content": "look"}]


def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none needed", max_retries=0)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that reasons, writes text, and calls a tool."""
    pieces = ("<think>", "I wonder. ", "</think>", "I look it up. ", CALL)
    model, tokenizer = parrot(
        tmp_path_factory.mktemp("thinking"), *pieces, marks=("<think>", "</think>")
    )
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as running:
        yield running


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The same model with smaller tokens, so that a grammar can change one argument."""
    head, *rest = CALL.partition("falcon")
    pieces = ("<think>", "I wonder. ", "</think>", "I look it up. ", "<tool_call>")
    model, tokenizer = parrot(
        tmp_path_factory.mktemp("calling"),
        *(*pieces, head.removeprefix("<tool_call>"), *rest),
        marks=("<think>", "</think>"),
    )
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as running:
        yield running


# ---- usage


def test_chat_usage_has_details(thinking: Running) -> None:
    with client(thinking) as api:
        made = api.chat.completions.create(model="any", messages=MESSAGES)
        *_, last = api.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        both = api.chat.completions.create(model="any", messages=MESSAGES, n=2)
    for usage in (made.usage, last.usage):
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 1
    assert both.usage is not None and both.usage.completion_tokens_details is not None
    assert both.usage.completion_tokens_details.reasoning_tokens == 2


def test_cache_write_tokens_are_counted(recall_server: Running) -> None:
    text = "The code of the amber falcon is 4821. " * 20
    ask: Any = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    url = f"{recall_server.url}/v1/chat/completions"
    details = [
        httpx.post(url, json={**ask, "cache_salt": "written"}).json()["usage"][
            "prompt_tokens_details"
        ]
        for _ in range(2)
    ]
    assert details[0]["cached_tokens"] == 0 and details[0]["cache_write_tokens"] >= 64
    assert details[1]["cached_tokens"] >= 64 and details[1]["cache_write_tokens"] == 0


# ---- the input of responses


def test_input_tokens_are_counted(recall_server: Running) -> None:
    with client(recall_server) as api:
        for ask in ({"input": "How many?"}, {"input": "How many?", "instructions": "Count."}):
            more: Any = ask
            counted = api.responses.input_tokens.count(model="any", **more)
            made = api.responses.create(model="any", max_output_tokens=1, **more)
            assert made.usage is not None
            assert counted.input_tokens == made.usage.input_tokens
            assert counted.object == "response.input_tokens"
        on: Any = {"previous_response_id": made.id, "input": "And now?"}
        longer = api.responses.input_tokens.count(model="any", **on)
        assert longer.input_tokens > counted.input_tokens
        with pytest.raises(openai.BadRequestError, match="input is empty"):
            api.responses.input_tokens.count(model="any")


def test_input_items_of_stored_response_are_paged(recall_server: Running) -> None:
    said: list[Any] = [{"role": "user", "content": f"Number {n}."} for n in range(5)]
    with client(recall_server) as api:
        made = api.responses.create(model="any", max_output_tokens=2, input=said)
        listed = list(api.responses.input_items.list(made.id, limit=2, order="asc"))
        assert [item.content[0].text for item in listed] == [one["content"] for one in said]  # type: ignore[union-attr]
        newest = list(api.responses.input_items.list(made.id, limit=3))
        assert [item.id for item in newest] == [item.id for item in listed[::-1]]
        page = api.responses.input_items.list(made.id, limit=2)
        assert page.has_more and page.first_id == newest[0].id and page.last_id == newest[1].id
        on = api.responses.create(
            model="any", max_output_tokens=1, input="More.", previous_response_id=made.id
        )
        assert len(list(api.responses.input_items.list(on.id))) == 5 + 1 + len(made.output)
        with pytest.raises(openai.NotFoundError):
            api.responses.input_items.list("resp_none")


# ---- allowed_tools


def test_allowed_tools_leave_prompt_unchanged(tmp_path: Path) -> None:
    """A required call is of an allowed tool; the prompt offers all, so its prefix is shared."""
    with serving(*parrot(tmp_path, "Hello")) as running, client(running) as api:
        ask: Any = {"model": "any", "messages": MESSAGES, "tools": TOOLS}
        plain = api.chat.completions.create(**ask)
        for name in NAMES:
            allowed = {"mode": "required", "tools": [{"type": "function", "function": {}}]}
            allowed["tools"][0]["function"]["name"] = name  # type: ignore[index]
            choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
            made = api.chat.completions.create(**ask, tool_choice=choice)
            (call,) = made.choices[0].message.tool_calls or ()
            assert call.type == "function" and call.function.name == name
            assert made.usage is not None and plain.usage is not None
            assert made.usage.prompt_tokens == plain.usage.prompt_tokens
            flat: Any = {"type": "allowed_tools", "mode": "required"}
            flat["tools"] = [{"type": "function", "name": name}]
            (item,) = api.responses.create(
                model="any", input="look", tools=FLAT, tool_choice=flat
            ).output
            assert item.type == "function_call" and item.name == name


def test_allowed_tools_auto_prevents_other_calls(thinking: Running) -> None:
    """With `auto`, calls of tools that are not allowed are prevented."""
    with client(thinking) as api:
        answers = {}
        for name in NAMES:
            tools = [{"type": "function", "function": {"name": name}}]
            choice: Any = {"type": "allowed_tools"}
            choice["allowed_tools"] = {"mode": "auto", "tools": tools}
            answers[name] = api.chat.completions.create(
                model="any", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=80
            ).choices[0]
    (call,) = answers["look_up"].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "look_up"
    assert answers["look_up"].message.content == "I look it up. "
    assert answers["look_up"].message.model_extra == {"reasoning_content": "I wonder. "}
    others = answers["forget"].message.tool_calls or []
    assert all(call.type == "function" and call.function.name == "forget" for call in others)
    assert (answers["forget"].message.content or "").startswith("I look it up. ")


@pytest.mark.parametrize("strict", [True, False])
def test_strict_function_calls_follow_schema(calling: Running, strict: bool) -> None:
    """Also where none is required."""
    limit = 64
    schema: Any = {**PARAMETERS, "properties": {"thing": {"enum": ["otter", "owl"]}}}
    function: Any = {"name": "look_up", "parameters": schema, "strict": strict}
    wanted = {"otter", "owl"} if strict else {"falcon"}
    with client(calling) as api:
        tool: Any = {"type": "function", "function": function}
        chat = api.chat.completions.create(
            model="any", messages=MESSAGES, tools=[tool], max_tokens=limit
        )
        (call,) = chat.choices[0].message.tool_calls or ()
        assert call.type == "function" and json.loads(call.function.arguments)["thing"] in wanted
        assert (chat.choices[0].message.content or "").startswith("I look it up. ")
        assert chat.choices[0].message.model_extra == {"reasoning_content": "I wonder. "}
        flat: Any = {"type": "function", **function}
        output = api.responses.create(
            model="any", input="look", tools=[flat], max_output_tokens=limit
        ).output
        (item,) = [one for one in output if one.type == "function_call"]
        assert json.loads(item.arguments)["thing"] in wanted
    with anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0) as messages:
        named: Any = {"name": "look_up", "input_schema": schema, "strict": strict}
        ask: Any = {"model": "any", "messages": MESSAGES, "tools": [named], "max_tokens": limit}
        content = messages.messages.create(**ask).content
        (block,) = [one for one in content if one.type == "tool_use"]
        assert block.input["thing"] in wanted
        budget: Any = {"type": "enabled", "budget_tokens": 1024}
        ask |= {"max_tokens": 2048, "thinking": budget}
        answer = messages.messages.with_raw_response.create(**ask)
        assert answer.headers.get("x-penstock-unenforced") == ("look_up:strict" if strict else None)


STOCKS: dict[str, Any] = {"type": "function", "function": {"name": "stocks"}}


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "none"},
        {"mode": "auto", "tools": []},
        {"mode": "auto", "tools": [STOCKS]},
        {},
        None,
    ],
)
def test_invalid_allowed_tools_are_refused(recall_server: Running, allowed: Any) -> None:
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    with client(recall_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    assert refused.value.param == "tool_choice"


# ---- functions


def test_legacy_functions_match_tools(thinking: Running) -> None:
    ask: Any = {"model": "any", "messages": MESSAGES, "functions": FUNCTIONS}
    with client(thinking) as api:
        (choice,) = api.chat.completions.create(**ask).choices
        tools = api.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS)
        chunks = list(api.chat.completions.create(**ask, stream=True))
        none = api.chat.completions.create(**ask, function_call="none").choices[0]
        forced = api.chat.completions.create(**ask, function_call={"name": "forget"}).choices[0]
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(**ask, function_call="required")
    assert refused.value.param == "function_call"
    call = choice.message.function_call
    assert call is not None and choice.finish_reason == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"thing": "falcon"})
    assert choice.message.tool_calls is None
    assert tools.choices[0].message.function_call is None
    deltas = [chunk.choices[0].delta for chunk in chunks]
    told = [delta.function_call for delta in deltas if delta.function_call is not None]
    assert "".join(one.name or "" for one in told) == call.name
    assert "".join(one.arguments or "" for one in told) == call.arguments
    assert chunks[-1].choices[0].finish_reason == "function_call"
    assert none.message.function_call is None and CALL in (none.message.content or "")
    assert forced.message.function_call is not None
    assert forced.message.function_call.name == "forget"


def test_legacy_function_results_render_like_tool_results(recall_server: Running) -> None:
    call = {"name": "look_up", "arguments": '{"thing": "falcon"}'}
    old = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look_up", "content": "4821"},
    ]
    new = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "look_up", "content": "4821"},
    ]
    url = f"{recall_server.url}/v1/chat/completions"
    used = [
        httpx.post(url, json={"messages": messages, "max_tokens": 1}).json()["usage"]
        for messages in (old, new)
    ]
    assert used[0]["prompt_tokens"] == used[1]["prompt_tokens"]


# ---- ids of requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/nowhere"])
def test_error_body_has_request_id(recall_server: Running, path: str) -> None:
    answer = httpx.post(f"{recall_server.url}{path}", json={})
    assert answer.status_code in (400, 404)
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    own = httpx.post(f"{recall_server.url}{path}", json={}, headers={"x-request-id": "mine-1"})
    assert own.json()["request_id"] == "mine-1"


def test_clients_read_request_id(recall_server: Running) -> None:
    with client(recall_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="any", messages=[])
    assert refused.value.request_id and refused.value.request_id.startswith("req_")
    with (
        anthropic.Anthropic(base_url=recall_server.url, api_key="any", max_retries=0) as api,
        pytest.raises(anthropic.BadRequestError) as also,
    ):
        api.messages.create(model="any", max_tokens=1, messages=[])
    body: Any = also.value.body
    assert body["request_id"] == also.value.request_id
