"""`pydantic-ai`: agents over chat, responses and messages, as the argument says."""

from __future__ import annotations

import sys
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
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

KIND = sys.argv[1]


def model(url: str = URL) -> Any:
    if KIND == "messages":
        profile = ModelProfile(supports_json_schema_output=True)  # not known of other models
        provider = AnthropicProvider(api_key=KEY, base_url=url)
        return AnthropicModel(MODEL, provider=provider, profile=profile)
    provider = OpenAIProvider(api_key=KEY, base_url=f"{url}/v1")
    of_kind = OpenAIChatModel if KIND == "chat" else OpenAIResponsesModel
    return of_kind(MODEL, provider=provider)


def chat() -> None:
    result = Agent(model()).run_sync(QUESTION)
    assert CODE in result.output, result
    assert result.usage.output_tokens > 0, result


def stream() -> None:
    result = Agent(model()).run_stream_sync(QUESTION)
    text = "".join(result.stream_text(delta=True))
    assert CODE in text and result.get_output() == text, text


def tools() -> None:
    result = Agent(model(SCRIPTED_URL), tools=[look_up]).run_sync(TASK)
    was_called()
    assert result.output == SAID, result


def streamed_tools() -> None:
    result = Agent(model(SCRIPTED_URL), tools=[look_up]).run_stream_sync(TASK)
    text = "".join(result.stream_text(delta=True))
    was_called()
    assert text == SAID, text


def demanded() -> None:
    result = Agent(model(), output_type=ToolOutput(Animal)).run_sync("What have you seen?")
    assert isinstance(result.output, Animal), result


def structured() -> None:
    result = Agent(model(), output_type=NativeOutput(Animal)).run_sync("What have you seen?")
    assert isinstance(result.output, Animal), result


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    demanded=demanded,
    structured=structured,
)
