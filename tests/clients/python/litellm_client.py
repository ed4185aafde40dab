"""`litellm`, by way of OpenAI's chat and of Anthropic's messages."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from asked import (
    CODE,
    DESCRIPTION,
    KEY,
    MODEL,
    PARAMETERS,
    QUESTION,
    SAID,
    SCRIPTED_URL,
    TASK,
    URL,
    Animal,
    look_up,
    report,
    user,
    was_called,
)

PROVIDER, ENDING = ("anthropic", "") if "anthropic" in sys.argv else ("openai", "/v1")
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS},
}


def ask(messages: list[Any], url: str = URL, **more: Any) -> Any:
    return litellm.completion(
        model=f"{PROVIDER}/{MODEL}",
        api_base=f"{url}{ENDING}",
        api_key=KEY,
        messages=messages,
        max_tokens=200,
        num_retries=0,
        **more,
    )


def chat() -> None:
    answer = ask([user(QUESTION)])
    assert CODE in answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.total_tokens > answer.usage.prompt_tokens > 0, answer


def stream() -> None:
    chunks = list(ask([user(QUESTION)], stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert CODE in whole.choices[0].message.content, whole
    assert whole.usage.completion_tokens > 0, whole


def tools() -> None:
    messages: list[Any] = [user(TASK)]
    for _ in range(3):
        message = ask(messages, SCRIPTED_URL, tools=[TOOL]).choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            result = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    was_called()
    assert messages[-1]["content"] == SAID, messages


def streamed_tools() -> None:
    chunks = list(ask([user(TASK)], SCRIPTED_URL, tools=[TOOL], stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    look_up(**json.loads(call.function.arguments))


def demanded() -> None:
    answer = ask([user(QUESTION)], tools=[TOOL], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"thing"}, call


def structured() -> None:
    answer = ask([user("What have you seen?")], response_format=Animal)
    Animal.model_validate_json(answer.choices[0].message.content)


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    demanded=demanded,
    structured=structured,
)
