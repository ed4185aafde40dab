"""`openai`, chat completions."""

from __future__ import annotations

import json
from typing import Any

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
from openai import OpenAI

api = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
scripted = OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key=KEY, max_retries=0)
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS},
}


def chat() -> None:
    answer = api.chat.completions.create(model=MODEL, messages=[user(QUESTION)])
    assert CODE in answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.total_tokens > answer.usage.prompt_tokens > 0, answer


def stream() -> None:
    with api.chat.completions.stream(
        model=MODEL, messages=[user(QUESTION)], stream_options={"include_usage": True}
    ) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        whole = events.get_final_completion()
    assert CODE in text and whole.choices[0].message.content == text, whole
    assert whole.usage.completion_tokens > 0, whole


def tools() -> None:
    messages: list[Any] = [user(TASK)]
    for _ in range(3):
        answer = scripted.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            result = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    was_called()
    assert messages[-1].content == SAID, messages


def streamed_tools() -> None:
    with scripted.chat.completions.stream(
        model=MODEL, messages=[user(TASK)], tools=[TOOL]
    ) as events:
        grown = "".join(
            event.arguments_delta
            for event in events
            if event.type == "tool_calls.function.arguments.delta"
        )
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert json.loads(grown) == json.loads(call.function.arguments), grown
    look_up(**json.loads(grown))


def demanded() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        answer = api.chat.completions.create(
            model=MODEL, messages=[user(QUESTION)], tools=[TOOL], tool_choice=choice
        )
        (call,) = answer.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"thing"}, call
        assert answer.choices[0].finish_reason == "tool_calls", answer


def structured() -> None:
    answer = api.chat.completions.parse(
        model=MODEL, messages=[user("What have you seen?")], response_format=Animal
    )
    assert isinstance(answer.choices[0].message.parsed, Animal), answer


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    demanded=demanded,
    structured=structured,
)
