"""Structured output starts after the reasoning that the template opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from parrot import ASK, TEMPLATE, parrot
from servers import Running, serving

OPENED = TEMPLATE.replace(
    ASK, f"{ASK}{{% if enable_thinking is not defined or enable_thinking %}}<think>{{% endif %}}"
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
JSON_FORM: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ASKED: Any = {"model": "any", "messages": [{"role": "user", "content": "So?"}]}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that reasons, and then ignores the required format."""
    model = parrot(
        tmp_path_factory.mktemp("thinker"),
        *("<think>", "Let me see.", "</think>", "Nothing"),
        template=OPENED,
    )
    with serving(*model) as running:
        yield running


@pytest.fixture
def api(thinker: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_schema_starts_after_reasoning(api: openai.OpenAI) -> None:
    message = api.chat.completions.create(**ASKED, response_format=JSON_FORM, max_tokens=99)
    (choice,) = message.choices
    assert json.loads(choice.message.content or "").keys() == {"ok"}
    assert choice.message.reasoning_content == "Let me see."  # type: ignore[attr-defined]
    details = message.usage.completion_tokens_details  # type: ignore[union-attr]
    assert details and details.reasoning_tokens == 1


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "[0-9]{3}x"}, None),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, ("ab",)),
    ],
)
def test_choices_and_grammars_start_after_reasoning(
    api: openai.OpenAI, form: Any, answer: Any
) -> None:
    (choice,) = api.chat.completions.create(**ASKED, extra_body=form, max_tokens=99).choices
    said = choice.message.content or ""
    assert said in answer if answer else (said[:3].isdigit() and said[3:] == "x")
    assert choice.message.reasoning_content == "Let me see."  # type: ignore[attr-defined]


def test_required_call_starts_after_reasoning(api: openai.OpenAI) -> None:
    (choice,) = api.chat.completions.create(
        **ASKED, tools=[TOOL], tool_choice="required", max_tokens=99
    ).choices
    (call,) = choice.message.tool_calls or ()
    assert json.loads(call.function.arguments).keys() == {"ok"}  # type: ignore[union-attr]
    assert choice.message.reasoning_content == "Let me see."  # type: ignore[attr-defined]


def test_schema_starts_at_once_without_reasoning(api: openai.OpenAI) -> None:
    """Negative control."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = api.chat.completions.create(
        **ASKED, response_format=JSON_FORM, max_tokens=99, extra_body=off
    ).choices
    assert json.loads(choice.message.content or "").keys() == {"ok"}
    assert getattr(choice.message, "reasoning_content", None) is None


def test_responses_and_streams_follow_schema_after_reasoning(api: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    answer = api.responses.create(model="any", input="So?", text=text, max_output_tokens=99)
    assert json.loads(answer.output_text).keys() == {"ok"}
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    chunks = api.chat.completions.create(
        **ASKED, response_format=JSON_FORM, max_tokens=99, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert json.loads("".join(delta.content or "" for delta in deltas)).keys() == {"ok"}
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Let me see."


def test_anthropic_schema_starts_after_thinking(thinker: Running) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with anthropic.Anthropic(base_url=thinker.url, api_key="x", max_retries=0) as api:
        message = api.messages.create(
            **ASKED,
            max_tokens=2_000,
            output_config=form,
            thinking={"type": "enabled", "budget_tokens": 1_024},
        )
        silent = api.messages.create(**ASKED, max_tokens=99, output_config=form)
    kinds = {block.type: block for block in message.content}
    assert kinds["thinking"].thinking == "Let me see."  # type: ignore[union-attr]
    assert json.loads(kinds["text"].text).keys() == {"ok"}  # type: ignore[union-attr]
    assert [block.type for block in silent.content] == ["text"]
