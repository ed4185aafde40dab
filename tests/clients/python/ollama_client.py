"""`ollama`: chat, generate and the questions about the model."""

from __future__ import annotations

from typing import Any

from asked import (
    CODE,
    MODEL,
    QUESTION,
    SAID,
    SCRIPTED_URL,
    TASK,
    URL,
    Animal,
    look_up,
    report,
    user,
)
from ollama import Client

api, scripted = Client(host=URL), Client(host=SCRIPTED_URL)


def chat() -> None:
    assert [model.model for model in api.list().models] == [MODEL]
    assert "completion" in api.show(MODEL).capabilities
    answer = api.chat(MODEL, [user(QUESTION)], think=False, keep_alive="5m")
    assert CODE in answer.message.content and answer.done_reason == "stop", answer
    assert answer.prompt_eval_count > 0 and answer.eval_count > 0, answer
    limited = api.generate(MODEL, QUESTION, options={"num_predict": 2, "temperature": 0})
    assert limited.eval_count == 2 and limited.done_reason == "length", limited


def stream() -> None:
    parts = list(api.chat(MODEL, [user(QUESTION)], stream=True))
    assert CODE in "".join(part.message.content for part in parts), parts
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    written = list(api.generate(MODEL, QUESTION, stream=True))
    assert CODE in "".join(part.response for part in written), written


def tools() -> None:
    messages: list[Any] = [user(TASK)]
    for _ in range(3):
        message = scripted.chat(MODEL, messages, tools=[look_up]).message
        messages.append(message)
        for call in message.tool_calls or ():
            result = look_up(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    assert messages[-1].content == SAID, messages


def streamed_tools() -> None:
    parts = list(scripted.chat(MODEL, [user(TASK)], tools=[look_up], stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.name for call in calls] == ["look_up"], parts
    assert dict(calls[0].function.arguments) == {"thing": "falcon"}, parts


def structured() -> None:
    schema = Animal.model_json_schema()
    answer = api.chat(MODEL, [user("Which animal?")], format=schema)
    Animal.model_validate_json(answer.message.content)


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    structured=structured,
)
