"""OpenAI's deprecated `functions` and `function_call`, which older clients send.

functions ──> tools      function_call of an answer <── its first call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.server.problems import BadRequest

Message = dict[str, Any]


def tools_of(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": dict(function)} for function in functions]


def choice_of(function_call: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Convert a `function_call` to a `tool_choice`.

    >>> choice_of("auto"), choice_of({"name": "f"})
    ('auto', {'type': 'function', 'function': {'name': 'f'}})
    """
    if function_call is None or function_call in ("auto", "none"):
        return function_call
    name = function_call.get("name") if isinstance(function_call, Mapping) else None
    if not isinstance(name, str):
        raise BadRequest(
            'function_call can be "auto", "none" or an object with a name', param="function_call"
        )
    return {"type": "function", "function": {"name": name}}


def with_tool_calls(messages: Sequence[Message]) -> list[Message]:
    converted: list[Message] = []
    for index, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": _last_id(converted)}
        elif isinstance(call, Mapping) and not message.get("tool_calls"):
            named = {"id": f"call_{index}", "type": "function", "function": dict(call)}
            message = {**message, "tool_calls": [named]}
        converted.append({key: value for key, value in message.items() if key != "function_call"})
    return converted


def as_function(choice: dict[str, Any], key: str) -> dict[str, Any]:
    """Convert the first tool call of a choice's message or delta (`key`) to `function_call`."""
    message = dict(choice[key])
    for call in message.pop("tool_calls", ())[:1]:
        message["function_call"] = call["function"]
    reason = choice["finish_reason"]
    return {
        **choice,
        key: message,
        "finish_reason": "function_call" if reason == "tool_calls" else reason,
    }


def _last_id(messages: Sequence[Message]) -> str:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return str(calls[-1].get("id")) if calls else "call_0"
