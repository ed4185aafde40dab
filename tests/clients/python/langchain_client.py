"""`langchain-openai` (chat, responses), `-anthropic` and `-ollama`, as the argument says."""

from __future__ import annotations

import sys
from functools import reduce
from operator import add
from typing import Any

from asked import (
    CODE,
    KEY,
    MODEL,
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
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

KIND = sys.argv[1]
TOOL = tool(look_up)


def model(url: str = URL) -> Any:
    if KIND == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_tokens=200, max_retries=0)
    if KIND == "ollama":
        from langchain_ollama import ChatOllama

        return ChatOllama(model=MODEL, base_url=url)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=KEY,
        max_retries=0,
        use_responses_api=KIND == "responses",
        stream_usage=True,
    )


def chat() -> None:
    answer = model().invoke(QUESTION)
    assert CODE in answer.text, answer
    assert answer.usage_metadata["output_tokens"] > 0, answer


def stream() -> None:
    whole = reduce(add, model().stream(QUESTION))
    assert CODE in whole.text, whole
    assert whole.usage_metadata["output_tokens"] > 0, whole


def loop(ask: Any) -> None:
    messages: list[Any] = [HumanMessage(TASK)]
    for _ in range(3):
        answer = ask(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            result = TOOL.invoke(call["args"])
            messages.append(ToolMessage(result, tool_call_id=call["id"]))
        if not answer.tool_calls:
            break
    was_called()
    assert answer.text == SAID, answer


def tools() -> None:
    loop(model(SCRIPTED_URL).bind_tools([TOOL]).invoke)


def streamed_tools() -> None:
    bound = model(SCRIPTED_URL).bind_tools([TOOL])
    loop(lambda messages: reduce(add, bound.stream(messages)))


def demanded() -> None:
    asked = model().with_structured_output(Animal, method="function_calling")
    animal = asked.invoke("What have you seen?")
    assert isinstance(animal, Animal), animal


def structured() -> None:
    asked = model().with_structured_output(Animal, method="json_schema")
    animal = asked.invoke("What have you seen?")
    assert isinstance(animal, Animal), animal


def decisions() -> None:
    from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

    decider = OpenAIDecisions(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    answer = decider.invoke(
        {
            "input": QUESTION,
            "questions": {
                "falcon": Predicate(instructions="Is this about a falcon?"),
                "code": Choice(
                    instructions="What is the code?", choices={CODE: "a number", "none": None}
                ),
                "trust": Score(instructions="How sure is it?", levels=["unsure", "sure"]),
            },
        }
    )
    assert 0 < answer.predicates["falcon"].probability < 1, answer
    chosen = answer.choices["code"]
    assert chosen.probabilities[chosen.choice] == max(chosen.probabilities.values()), answer
    assert abs(sum(chosen.probabilities.values()) - 1) < 1e-6, answer
    assert 0 <= answer.scores["trust"].score <= 1, answer
    assert answer.usage.input_tokens > 0, answer


steps = {
    "chat": chat,
    "stream": stream,
    "tools": tools,
    "streamed_tools": streamed_tools,
    "demanded": demanded,
    "structured": structured,
}
if KIND == "ollama":
    del steps["demanded"]  # its requests demand no call
if KIND == "chat":
    steps["decisions"] = decisions
report(**steps)
