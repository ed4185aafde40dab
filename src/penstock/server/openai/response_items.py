"""Conversion of `/v1/responses` input to chat messages.

Text, reasoning and calls of one answer become one message, as templates expect.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.server.images import has_images, image_part, is_image
from penstock.server.openai.response_tools import LOCAL_SHELL
from penstock.server.problems import BadRequest
from penstock.server.prompts import flatten, last_user
from penstock.server.tools.allowed_tools import flat_name

Item = dict[str, Any]

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
SEALED = "penstock:"
"""Prefix of `encrypted_content`, which is base64; some clients send reasoning back only in it."""


def items_of(content: str | Sequence[Item]) -> list[Item]:
    if isinstance(content, str):
        return [{"type": "message", "role": "user", "content": content}]
    return [_without_nulls(item) for item in content]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def resolved(items: Sequence[Item], known: Mapping[str, Item], first: int = 0) -> list[Item]:
    """Replace item references by the stored items.

    Args:
        items: items of the previous responses, then of the request.
        known: stored items by id.
        first: number of items from previous responses, which are not counted in errors.

    Raises:
        BadRequest: a referenced item is not stored.
    """
    whole_items = []
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            stored_item = known.get(str(item.get("id")))
            if stored_item is None:
                place = f"input.{index - first}"
                raise BadRequest(
                    f"{place}: there is no stored item {str(item.get('id'))[:80]!r}; send it whole",
                    param=place,
                    code="item_not_found",
                )
            item = stored_item
        whole_items.append(item)
    return whole_items


def page_of(
    items: Sequence[Item], *, limit: int, newest_first: bool, after: str | None
) -> dict[str, Any]:
    """Return a page of items that starts after the item with id `after`."""
    named = [{"id": f"item_{index}", **_whole_message(item)} for index, item in enumerate(items)]
    if newest_first:
        named.reverse()
    places = [index for index, item in enumerate(named) if item["id"] == after]
    rest = named[places[0] + 1 :] if places else named
    page = rest[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > limit,
    }


def _whole_message(item: Item) -> Item:
    if item.get("type", "message") != "message":
        return item
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part: Item = {"type": kind, "text": content}
        content = [{**part, "annotations": []} if kind == "output_text" else part]
    return {**item, "type": "message", "status": "completed", "content": content or []}


class Conversation:
    """Chat messages converted from input items.

    Args:
        first: number of stored items before the request's own.
        images: whether the model reads images, so that they are kept as content parts.
    """

    def __init__(self, items: Sequence[Item], first: int = 0, *, images: bool = False) -> None:
        self._images = images
        self.messages: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        last = last_user(items)
        for index, item in enumerate(items):
            self._add(item, f"input.{index - first}", strict=index == last)

    @property
    def _answer(self) -> dict[str, Any] | None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return None

    def _add(self, item: Item, place: str, *, strict: bool) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, place, strict=strict)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            answer = self._answer
            if answer is None:
                answer = {"role": "assistant", "content": ""}
                self.messages.append(answer)
            answer.setdefault("tool_calls", []).append(_called(item, place))
        elif kind in OUTPUTS:
            output = self._content(item.get("output"), f"{place}.output", strict=False)
            call_id = str(item.get("call_id") or item.get("id"))
            self.messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        elif kind == "reasoning":
            self._reason(reasoning_of(item))
        else:
            self.left_out.append(str(kind))

    def _add_message(self, item: Item, place: str, *, strict: bool) -> None:
        role, answer = item.get("role"), self._answer
        if not isinstance(role, str):
            raise BadRequest(f"{place}.role is missing", param=f"{place}.role")
        content = self._content(item.get("content"), f"{place}.content", strict=strict)
        if role == "assistant" and answer is not None and _goes_on(answer):
            answer["content"] += flatten(content, place, strict=False)
        else:
            self.messages.append({"role": role, "content": content})

    def _content(self, content: Any, place: str, *, strict: bool) -> str | list[Any]:
        """Flatten content to text; keep its parts if they include images for the model."""
        if not (self._images and has_images(content)):
            return flatten(content, place, strict=strict)
        return [
            image_part(part, f"{place}.{number}") if is_image(part) else part
            for number, part in enumerate(content)
        ]

    def _reason(self, text: str) -> None:
        if not text:
            return
        answer = self._answer
        if answer is None:
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text


def _goes_on(answer: Mapping[str, Any]) -> bool:
    """Return whether more text belongs to this answer: it has calls, or only reasoning."""
    only_reasoning = "reasoning_content" in answer and not answer["content"]
    return "tool_calls" in answer or only_reasoning


def sealed(reasoning: str) -> str:
    return SEALED + base64.b64encode(reasoning.encode(errors="replace")).decode()


def reasoning_of(item: Item) -> str:
    """Return the text of a reasoning item; empty if another server encrypted it.

    >>> reasoning_of({"encrypted_content": sealed("Hm.")})
    'Hm.'
    >>> reasoning_of({"encrypted_content": "x"})
    ''
    """
    parts = item.get("content")
    if isinstance(parts, list) and parts:
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    content = item.get("encrypted_content")
    if not isinstance(content, str) or not content.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _called(item: Item, place: str) -> dict[str, Any]:
    name: Any
    arguments: Any
    if item["type"] == "local_shell_call":
        action = item.get("action")
        fields = dict(action) if isinstance(action, dict) else {}
        name = LOCAL_SHELL
        arguments = json.dumps({key: fields[key] for key in fields if key not in ("type", "env")})
    elif item["type"] == "custom_tool_call":
        name, arguments = item.get("name"), json.dumps({"input": item.get("input", "")})
    else:
        name, arguments = item.get("name"), item.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise BadRequest(f"{place}: a call must have a name and arguments", param=place)
    return {
        "id": str(item.get("call_id") or item.get("id")),
        "type": "function",
        "function": {"name": flat_name(name, item.get("namespace")), "arguments": arguments},
    }
