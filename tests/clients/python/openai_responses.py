"""`openai`, responses."""

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
    was_called,
)
from openai import OpenAI

api = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
scripted = OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key=KEY, max_retries=0)
TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
    "strict": True,
}


def chat() -> None:
    answer = api.responses.create(model=MODEL, input=QUESTION)
    assert CODE in answer.output_text and answer.status == "completed", answer
    again = api.responses.retrieve(answer.id)
    assert again.output_text == answer.output_text, again
    assert api.responses.input_items.list(answer.id).data, "its input is listed"
    assert api.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens > 0


def stream() -> None:
    with api.responses.stream(model=MODEL, input=QUESTION) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        whole = events.get_final_response()
    assert CODE in text and whole.output_text == text, whole
    assert whole.usage.output_tokens > 0, whole


def tools() -> None:
    asked: Any = TASK
    before = None
    for _ in range(3):
        answer = scripted.responses.create(
            model=MODEL, input=asked, tools=[TOOL], previous_response_id=before
        )
        before = answer.id
        asked = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": look_up(**json.loads(item.arguments)),
            }
            for item in answer.output
            if item.type == "function_call"
        ]
        if not asked:
            break
    was_called()
    assert answer.output_text == SAID, answer


def streamed_tools() -> None:
    with scripted.responses.stream(model=MODEL, input=TASK, tools=[TOOL]) as events:
        kind = "response.function_call_arguments.delta"
        grown = "".join(event.delta for event in events if event.type == kind)
        (call,) = events.get_final_response().output
    assert call.type == "function_call" and call.arguments == grown, call
    look_up(**json.loads(grown))


def demanded() -> None:
    for choice in ("required", {"type": "function", "name": "look_up"}):
        answer = api.responses.create(model=MODEL, input=QUESTION, tools=[TOOL], tool_choice=choice)
        (call,) = answer.output
        assert set(json.loads(call.arguments)) == {"thing"}, call


def structured() -> None:
    answer = api.responses.parse(model=MODEL, input="What have you seen?", text_format=Animal)
    assert isinstance(answer.output_parsed, Animal), answer


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    demanded=demanded,
    structured=structured,
)
