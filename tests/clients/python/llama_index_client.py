"""`llama-index-llms-openai-like` and `llama-index-llms-ollama`, as the argument says."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

KIND = sys.argv[1]
TOOL = FunctionTool.from_defaults(look_up)


def model(url: str = URL) -> Any:
    if KIND == "ollama":
        from llama_index.llms.ollama import Ollama

        return Ollama(model=MODEL, base_url=url, context_window=4_096)
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        context_window=4_096,
    )


def chat() -> None:
    answer = model().chat([ChatMessage(QUESTION)])
    assert CODE in answer.message.content, answer


def stream() -> None:
    *_, last = model().stream_chat([ChatMessage(QUESTION)])
    assert CODE in last.message.content, last


def loop(ask: Callable[..., Any]) -> None:
    llm = model(SCRIPTED_URL)
    messages = [ChatMessage(TASK)]
    for _ in range(3):
        answer = ask(llm, messages)
        messages.append(answer.message)
        calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        for call in calls:
            result = TOOL.call(**call.tool_kwargs).content
            name = {"tool_call_id": call.tool_id, "name": call.tool_name}
            messages.append(ChatMessage(result, role="tool", additional_kwargs=name))
        if not calls:
            break
    was_called()
    assert messages[-1].content == SAID, messages


def tools() -> None:
    loop(lambda llm, messages: llm.chat_with_tools([TOOL], chat_history=messages))


def streamed_tools() -> None:
    loop(lambda llm, messages: last(llm.stream_chat_with_tools([TOOL], chat_history=messages)))


def last(parts: Any) -> Any:
    *_, part = parts
    return part


def structured() -> None:
    animal = model().structured_predict(Animal, PromptTemplate("What have you seen?"))
    assert isinstance(animal, Animal), animal


report(
    chat=chat,
    stream=stream,
    tools=tools,
    streamed_tools=streamed_tools,
    **{"structured" if KIND == "ollama" else "demanded": structured},
)
