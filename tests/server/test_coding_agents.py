"""Claude Code's requests: answered, and cached from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from coding_agents import (
    BILLING,
    CLAUDE_FIRST,
    CLAUDE_HEADERS,
    CLAUDE_SECOND,
    CLAUDE_TITLE,
    IMAGE,
    SERVER_TOOL,
    claude_code,
    text,
)
from parrot import ASK, TEMPLATE, parrot
from servers import Running, serving

from penstock.server.anthropic.anthropic_forms import CountRequest
from penstock.server.anthropic.anthropic_prompt import prompt_of
from penstock.server.prompts import Prompts

THINKS = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
)
THINKING = TEMPLATE.replace("{{ message.content }}", THINKS + "{{ message.content }}")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """Renders prompts with a token per character, for readable comparisons."""
    return Prompts(parrot(tmp_path_factory.mktemp("p"), "Hello", template=THINKING)[1])


def read(prompts: Prompts, **fields: Any) -> str:
    request = CountRequest.model_validate({"model": "any", **fields})
    return prompts.decode(prompt_of(request, prompts).tokens)


def post(running: Running, body: dict[str, Any]) -> httpx.Response:
    url = f"{running.url}/v1/messages?beta=true"
    return httpx.post(url, json=body, headers=CLAUDE_HEADERS, timeout=60)


def usage_of(answer: httpx.Response) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    if "data: " not in answer.text:
        usage: dict[str, int] = answer.json()["usage"]
        return usage
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    assert events[-1]["type"] == "message_stop"
    (last,) = [event for event in events if event["type"] == "message_delta"]
    found: dict[str, int] = last["usage"]
    return found


def total(usage: dict[str, int]) -> int:
    return sum(value for name, value in usage.items() if name.endswith("input_tokens"))


# ---- whole requests


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(engine={"memory_limit": "600MB", "block_size": 32}) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
def test_second_turn_is_cached(running: Running, stream: bool) -> None:
    """Although the billing header changes with every request."""
    salt = {"cache_salt": str(stream), "stream": stream, "max_tokens": 64}
    usage_of(post(running, claude_code(CLAUDE_FIRST, cch="11111", **salt)))
    second = usage_of(post(running, claude_code(CLAUDE_SECOND, cch="22222", **salt)))
    assert second["cache_read_input_tokens"] >= 0.8 * total(second)


def test_title_request_follows_schema(running: Running) -> None:
    answer = post(running, {**CLAUDE_TITLE, "stream": False})
    assert answer.status_code == 200, answer.text
    (block,) = answer.json()["content"]
    assert json.loads(block["text"])["title"] in ("One", "Two")


def test_count_tokens_matches_prompt(running: Running) -> None:
    for turns in (CLAUDE_FIRST, CLAUDE_SECOND):
        body = claude_code(turns, stream=False, max_tokens=8, tools=[SERVER_TOOL])
        counted = httpx.post(f"{running.url}/v1/messages/count_tokens", json=body)
        assert counted.json()["input_tokens"] == total(usage_of(post(running, body)))


def test_anthropic_client_sends_agent_request(running: Running) -> None:
    body = claude_code(CLAUDE_SECOND, max_tokens=8)
    for name in ("stream", "context_management", "container", "mcp_servers", "never_seen_before"):
        del body[name]
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(**body)
        count = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
        counted = client.messages.count_tokens(**count)
    assert message.type == "message"
    assert counted.input_tokens == total(
        {k: v for k, v in message.usage.to_dict().items() if str(k).endswith("input_tokens")}
    )


def test_server_side_tools_are_dropped_and_listed_in_header(running: Running) -> None:
    for stream in (True, False):
        answer = post(running, claude_code(CLAUDE_FIRST, stream=stream, max_tokens=4))
        assert "x-penstock-left-out" not in answer.headers
        tools = [{**SERVER_TOOL, "name": "search\r\nx: y"}, {"type": "web_fetch_20250910"}]
        body = claude_code(CLAUDE_FIRST, stream=stream, max_tokens=4, tools=tools)
        answer = post(running, body)
        assert answer.status_code == 200
        assert answer.headers["x-penstock-left-out"] == "search__x:_y, web_fetch_20250910"


def test_server_side_tool_cannot_be_required(running: Running) -> None:
    choice = {"type": "tool", "name": "web_search"}
    answer = post(running, claude_code(CLAUDE_FIRST, tools=[SERVER_TOOL], tool_choice=choice))
    assert answer.status_code == 400
    assert "web_search" in answer.json()["error"]["message"]


# ---- what the template is given


def test_system_message_keeps_its_position(prompts: Prompts) -> None:
    turns = [{"role": role, "content": role[0]} for role in ("user", "system", "assistant", "user")]
    assert read(prompts, messages=turns) == (
        "<|user|>u<|end|><|system|>s<|end|><|assistant|>a<|end|><|user|>u<|end|><|assistant|>"
    )
    assert read(prompts, messages=turns[:2]).endswith("<|system|>s<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([text(BILLING.format("a")), text("Be brief.")], "<|system|>Be brief.<|end|>"),
        ([text(BILLING.format("a"))], ""),
        (BILLING.format("a") + "\nBe brief.", "<|system|>Be brief.<|end|>"),
        ([text("Be brief."), text("x-anthropic-billing-header: a")], None),
    ],
)
def test_billing_header_is_dropped(system: Any, expected: str | None, prompts: Prompts) -> None:
    found = read(prompts, system=system, messages=[{"role": "user", "content": "Hi"}])
    if expected is None:
        assert "x-anthropic-billing-header: a" in found
    else:
        assert found == f"{expected}<|user|>Hi<|end|><|assistant|>"


def test_billing_header_can_be_kept(prompts: Prompts) -> None:
    keeping = Prompts(prompts.tokenizer, keep_billing_header=True)
    fields = {"system": [text(BILLING.format("a"))], "messages": [{"role": "user", "content": "A"}]}
    assert BILLING.format("a") in read(keeping, **fields)


def test_history_reasoning_reaches_template(prompts: Prompts) -> None:
    found = read(prompts, messages=CLAUDE_SECOND[2:])
    said = (
        "<|assistant|><think>A file.\n\n[redacted thinking left out]</think>I read it.<tool_call>"
    )
    assert said in found


def test_non_text_content_in_history_is_replaced_by_placeholder(prompts: Prompts) -> None:
    found = read(prompts, messages=CLAUDE_SECOND)
    assert (
        "<|tool|>A picture:\n\n[image left out]\n\n[tool reference Read left out]<|end|>" in found
    )
    document = {"type": "document", "source": {"type": "base64", "data": "aGk="}}
    readable = {"type": "document", "source": {"type": "text", "data": "A text."}}
    turns = [
        {"role": "user", "content": [text("Look:"), IMAGE, document, {"type": "new_thing"}]},
        {"role": "assistant", "content": [text("No."), {"type": "server_tool_use", "id": "s"}]},
        {"role": "user", "content": [readable]},
        {"role": "system", "content": "It is late."},
    ]
    found = read(prompts, messages=turns)
    assert "Look:\n\n[image left out]\n\n[document left out]\n\n[new thing left out]" in found
    assert "No.\n\n[server tool use left out]" in found
    assert "<|user|>A text.<|end|>" in found


def test_non_text_content_in_last_message_is_refused(running: Running) -> None:
    turns = [*CLAUDE_SECOND[:3], {"role": "user", "content": [text("?"), IMAGE]}, CLAUDE_FIRST[1]]
    answer = post(running, claude_code(turns))
    assert answer.status_code == 400
    assert "messages.3.content.1: content of type 'image'" in answer.json()["error"]["message"]


def test_image_in_tool_message_is_replaced_by_placeholder(
    running: Running, prompts: Prompts
) -> None:
    """Agents put an image that a tool read beside its result."""
    loop = [CLAUDE_SECOND[2], {**CLAUDE_SECOND[3]}]
    loop[1]["content"] = [*loop[1]["content"], text("a.png:"), IMAGE]
    answer = post(running, claude_code([CLAUDE_FIRST[0], *loop], stream=False, max_tokens=4))
    assert answer.status_code == 200, answer.text
    assert "<|user|>a.png:\n\n[image left out]<|end|>" in read(prompts, messages=loop)


# ---- budgets


PIECES = ("<think>", "One. ", "Two. ", "Three. ", "Four. ", "</think>", "Done.")


@pytest.mark.parametrize(("budget", "thought"), [(2, "One. Two. "), (9, "One. Two. Three. Four. ")])
def test_thinking_budget_ends_reasoning(tmp_path: Path, budget: int, thought: str) -> None:
    model, tokenizer = parrot(tmp_path, *PIECES, marks=("<think>", "</think>"))
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = {"model": "any", "max_tokens": 32, "messages": [{"role": "user", "content": "So?"}]}
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as made:
        for stream in (False, True):
            with anthropic.Anthropic(base_url=made.url, api_key="x", max_retries=0) as client:
                if stream:
                    with client.messages.stream(**body, thinking=thinking) as events:
                        message = events.get_final_message()
                else:
                    message = client.messages.create(**body, thinking=thinking)
            kinds = {block.type: block for block in message.content}
            assert kinds["thinking"].thinking == thought
            assert kinds["text"].text == "Done."


def test_count_tokens_includes_output_format(tmp_path: Path) -> None:
    """The template opens the reasoning on request; a schema starts after it."""
    opened = TEMPLATE.replace(ASK, f"{ASK}{{% if enable_thinking %}}<think>{{% endif %}}")
    model, tokenizer = parrot(tmp_path, *PIECES, marks=("<think>", "</think>"), template=opened)
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    thinking = {"type": "enabled", "budget_tokens": 9}
    body = {"model": "any", "messages": [{"role": "user", "content": "So?"}], "thinking": thinking}
    with serving(model, tokenizer, engine={"memory_limit": "400MB"}) as made:
        sizes = []
        for asked in (body, {**body, **form}):
            url = f"{made.url}/v1/messages/count_tokens"
            sizes.append(httpx.post(url, json=asked, timeout=60).json()["input_tokens"])
            assert sizes[-1] == total(usage_of(post(made, {**asked, "max_tokens": 32})))
    assert sizes[0] == sizes[1], "with the mark in both"
