"""`anthropic`, messages."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, beta_tool
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

api = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
scripted = Anthropic(base_url=SCRIPTED_URL, api_key=KEY, max_retries=0)
TOOL: Any = {"name": "look_up", "description": DESCRIPTION, "input_schema": PARAMETERS}
ASKED: Any = {"model": MODEL, "max_tokens": 200}


def chat() -> None:
    answer = api.messages.create(**ASKED, messages=[user(QUESTION)])
    assert CODE in answer.content[0].text and answer.stop_reason == "end_turn", answer
    counted = api.messages.count_tokens(model=MODEL, messages=[user(QUESTION)])
    used = answer.usage
    prompt = used.input_tokens + used.cache_creation_input_tokens + used.cache_read_input_tokens
    assert counted.input_tokens == prompt, (counted, used)


def stream() -> None:
    with api.messages.stream(**ASKED, messages=[user(QUESTION)]) as events:
        text = "".join(events.text_stream)
        whole = events.get_final_message()
    assert CODE in text and whole.content[0].text == text, whole
    assert whole.usage.output_tokens > 0, whole


def tools() -> None:
    runner = scripted.beta.messages.tool_runner(
        **ASKED, messages=[user(TASK)], tools=[beta_tool(look_up)]
    )
    last = runner.until_done()
    was_called()
    assert last.content[0].text == SAID, last


def streamed_tools() -> None:
    with scripted.messages.stream(**ASKED, messages=[user(TASK)], tools=[TOOL]) as events:
        grown = "".join(event.partial_json for event in events if event.type == "input_json")
        whole = events.get_final_message()
    call = whole.content[-1]
    assert call.type == "tool_use" and whole.stop_reason == "tool_use", whole
    assert grown, "its input came in parts"
    look_up(**call.input)


def demanded() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "look_up"}):
        answer = api.messages.create(
            **ASKED, messages=[user(QUESTION)], tools=[TOOL], tool_choice=choice
        )
        assert set(answer.content[0].input) == {"thing"}, answer


def structured() -> None:
    answer = api.messages.parse(
        **ASKED, messages=[user("What have you seen?")], output_format=Animal
    )
    assert isinstance(answer.parsed_output, Animal), answer


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    demanded=demanded,
    structured=structured,
)
