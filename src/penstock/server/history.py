"""Adaptation of conversations to a chat template, so that no message makes rendering fail.

messages ──> systems ──> calls and results ──> turns ──> reasoning, arguments, parts ──> template

Content that the template drops or raises on is rewritten; each change is listed in `mended`.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.server.templates import Message, TemplateTraits, in_parts

REMINDER = "system-reminder"
"""Tag around a system message sent as a user message, as coding agents do."""
REASONING = "reasoning_content"
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_INDEXED = re.compile(r"functions\.[^:\s]+:\d+")
_SIGNS = string.ascii_letters + string.digits
EMPTY_TURN = "."
"""Text of placeholder messages, where the template requires a user message or some text."""
TOOLS_TEXT = (
    "# Tools\n\nYou can call these tools, each described by a JSON object in a line:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "To call one, write its name and arguments as JSON between tags, one pair of tags a call:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}\n</tool_call>'
)
"""Tool descriptions appended to the system message, in Hermes' format."""


class Fitted(NamedTuple):
    messages: list[Message]
    tools: list[Mapping[str, Any]] | None
    mended: tuple[str, ...] = ()
    """Descriptions of the changes made for the template, in order."""


def fit(
    traits: TemplateTraits,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Fitted:
    mended: dict[str, None] = {}
    fitted = [dict(message) for message in messages]
    offered: list[Mapping[str, Any]] | None = list(tools) if tools else None
    if offered and not traits.tools:
        _note(mended, "tools were described in the system message")
        fitted, offered = _with_tools_described(fitted, offered), None
    fitted = _systems(traits, fitted, mended)
    if traits.calls:
        fitted = _call_ids(traits.call_ids, fitted, mended)
        fitted = [_with_arguments(traits, message, mended) for message in fitted]
        if not traits.bare_results:
            fitted = _with_calls_in_front(fitted, mended)
    else:
        fitted = [_as_text(message, mended) for message in fitted]
    fitted = _turns(traits, fitted, mended)
    fitted = [_with_reasoning(traits, message) for message in fitted]
    if traits.text_parts:
        fitted = [dict(in_parts(message)) for message in fitted]
    return Fitted([*fitted], offered, tuple(mended))


def reminder(text: str) -> str:
    r"""Wrap a system message's text for a user message.

    >>> reminder("Be brief.")
    '<system-reminder>\nBe brief.\n</system-reminder>'
    """
    if text.lstrip().startswith(f"<{REMINDER}>"):
        return text
    return f"<{REMINDER}>\n{text}\n</{REMINDER}>"


def call_text(function: Mapping[str, Any]) -> str:
    named = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(named, ensure_ascii=False)}\n</tool_call>"


def argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _note(mended: dict[str, None], what: str) -> None:
    mended[what] = None


def _with_tools_described(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    description = TOOLS_TEXT.format(tools=lines)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def _systems(
    traits: TemplateTraits, messages: list[dict[str, Any]], mended: dict[str, None]
) -> list[dict[str, Any]]:
    """Turn system messages that the template does not render into tagged user messages."""
    alone = all(message.get("role") == "system" for message in messages)
    fitted = []
    for index, message in enumerate(messages):
        taken = traits.later_system if index else traits.first_system
        if alone and index == len(messages) - 1 and not traits.system_alone:
            taken = False
        if message.get("role") == "system" and not taken:
            _note(mended, "system messages became user messages")
            message = {"role": "user", "content": reminder(message["content"])}
        fitted.append(message)
    return fitted


def _call_ids(
    form: str, messages: list[dict[str, Any]], mended: dict[str, None]
) -> list[dict[str, Any]]:
    if form == "any":
        return messages
    known: dict[str, str] = {}
    count = 0

    def renamed(id: Any, name: str) -> str:
        nonlocal count
        original = str(id or f"{name}:{count}")
        if original not in known:
            fits = _NINE if form == "nine" else _INDEXED
            known[original] = original
            if not fits.fullmatch(original):
                _note(mended, "call ids were rewritten in the template's format")
                known[original] = (
                    _nine(original) if form == "nine" else f"functions.{name or 'tool'}:{count}"
                )
            count += 1
        return known[original]

    fitted = []
    for message in messages:
        if calls := message.get("tool_calls"):
            named = [
                {**call, "id": renamed(call.get("id"), call["function"]["name"])} for call in calls
            ]
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            id = renamed(message.get("tool_call_id"), str(message.get("name") or ""))
            message = {**message, "tool_call_id": id}
        fitted.append(message)
    return fitted


def _nine(id: str) -> str:
    number = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8])
    signs = []
    for _ in range(9):
        number, sign = divmod(number, len(_SIGNS))
        signs.append(_SIGNS[sign])
    return "".join(signs)


def _with_arguments(
    traits: TemplateTraits, message: dict[str, Any], mended: dict[str, None]
) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message

    def taken(arguments: Any) -> Any:
        if traits.text_arguments:
            return argument_text(arguments)
        if isinstance(arguments, Mapping) or not traits.object_arguments:
            return arguments
        if arguments in (None, "", []):
            return {}
        _note(mended, "arguments that were no object were wrapped in one")
        return {"arguments": arguments}

    calls = []
    for call in message["tool_calls"]:
        arguments = taken(call["function"].get("arguments", {}))
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_calls_in_front(
    messages: list[dict[str, Any]], mended: dict[str, None]
) -> list[dict[str, Any]]:
    fitted: list[dict[str, Any]] = []
    called = False
    for message in messages:
        if message.get("role") == "tool" and not called:
            _note(mended, "tool results without a call became user messages")
            message = {"role": "user", "content": _result_text(message)}
        called = bool(message.get("tool_calls")) or (called and message.get("role") == "tool")
        fitted.append(message)
    return fitted


def _as_text(message: dict[str, Any], mended: dict[str, None]) -> dict[str, Any]:
    """Write tool calls and results as text, for a template that supports neither."""
    if calls := message.get("tool_calls"):
        _note(mended, "calls and their results were written as text")
        parts = [message["content"], *(call_text(call["function"]) for call in calls)]
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**kept, "content": "\n".join(part for part in parts if part)}
    if message.get("role") == "tool":
        _note(mended, "calls and their results were written as text")
        return {"role": "user", "content": _result_text(message)}
    return message


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _turns(
    traits: TemplateTraits, messages: list[dict[str, Any]], mended: dict[str, None]
) -> list[dict[str, Any]]:
    """Merge consecutive messages of a role, and start with a user message, where required."""
    fitted: list[dict[str, Any]] = []
    apart = {"user": traits.consecutive_users, "assistant": traits.consecutive_assistants}
    for message in messages:
        role = message.get("role")
        before = fitted[-1] if fitted else None
        if before is not None and before.get("role") == role and not apart.get(str(role), True):
            _note(mended, "consecutive messages of one role were merged")
            fitted[-1] = _joined(before, message)
            continue
        first = before is None or (before.get("role") == "system" and len(fitted) == 1)
        if role == "assistant" and first and not traits.assistant_first:
            _note(mended, "a placeholder user message was inserted before the first answer")
            fitted.append({"role": "user", "content": EMPTY_TURN})
        if not message["content"] and not message.get("tool_calls") and not traits.empty_content:
            _note(mended, "empty messages became a placeholder")
            message = {**message, "content": EMPTY_TURN}
        fitted.append(message)
    return fitted


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    joined = {**first, **second}
    for key in ("content", REASONING):
        texts = [message[key] for message in (first, second) if message.get(key)]
        if texts or key in joined:
            joined[key] = "\n\n".join(texts)
    if calls := [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]:
        joined["tool_calls"] = calls
    return joined


def _with_reasoning(traits: TemplateTraits, message: dict[str, Any]) -> dict[str, Any]:
    """Move the reasoning to the key that the template uses."""
    key = traits.reasoning_key
    if key is None or REASONING not in message:
        return message
    rest = {name: value for name, value in message.items() if name != REASONING}
    if message.get("content") and message.get("tool_calls") and not traits.reasoning_beside_text:
        return rest
    return {**rest, key: message[REASONING]}
