"""Output items of `/v1/responses`, and their stream events.

Delta ──add──> items, and [output_item.added ─ ...delta ─ ...done ─ output_item.done]
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.server.answers import Delta, ToolCall
from penstock.server.openai.response_items import sealed
from penstock.server.openai.response_tools import Tools
from penstock.server.tools.call_growth import CallPart, CallParts

Event = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class ResponseOutput:
    tools: Tools
    custom: str | None = None
    """Name of the custom tool whose input is the whole answer, if any."""
    commits: bool = False
    """Whether to add `encrypted_content` to reasoning items."""
    items: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    new_logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities not yet streamed; dropped by reasoning and calls."""
    _text: list[str] = field(default_factory=list)
    _open: str | None = None
    _calls: CallParts = field(default_factory=CallParts)

    def add(self, delta: Delta) -> list[Event]:
        if self.custom is not None:
            self._text.append(delta.text)
            return []
        if not delta.growth:
            calls = (event for call in delta.calls for event in self._call(call))
            return [*self._texts(delta), *calls]
        return [
            event
            for part in self._calls.in_order(delta)
            for event in (self._texts(part) if isinstance(part, Delta) else self._part_of(part))
        ]

    def _texts(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._emit("reasoning", delta.reasoning)
        if delta.text:
            yield from self._emit("message", delta.text)

    def _part_of(self, part: CallPart) -> Iterator[Event]:
        if not self.tools.is_function(part.call.name):
            if part.ends and not part.broken:
                yield from self._call(part.call)
            return
        if part.begins:
            self.new_logprobs = []
            yield from self._finish("completed")
            item = self.tools.item(replace(part.call, arguments=""))
            self.items.append({**item, "status": "in_progress"})
            yield "response.output_item.added", self._item()
        if part.grown:
            grown = {**self._place(), "delta": part.grown}
            yield "response.function_call_arguments.delta", grown
        if part.ends:
            status = "incomplete" if part.broken else "completed"
            self.items[-1] |= {"arguments": part.call.arguments, "status": status}
            name = self.items[-1]["name"]
            done = {**self._place(), "arguments": part.call.arguments, "name": name}
            yield "response.function_call_arguments.done", done
            yield "response.output_item.done", self._item()

    def end(self, *, incomplete: bool) -> list[Event]:
        events: list[Event] = []
        if self.custom is not None:
            arguments = json.dumps({"input": "".join(self._text)})
            call = ToolCall(f"call_{uuid.uuid4().hex[:24]}", self.custom, arguments)
            events += self._call(call)
        elif not self.items:
            events += self._begin("message")
        return [*events, *self._finish("incomplete" if incomplete else "completed")]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _emit(self, kind: str, text: str) -> Iterator[Event]:
        if kind != "message":
            self.new_logprobs = []
        if self._open != kind:
            yield from self._finish("completed")
            yield from self._begin(kind)
        self._text.append(text)
        content = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            content["logprobs"] = self.new_logprobs
            self.logprobs += self.new_logprobs
            self.new_logprobs = []
        yield f"response.{_PARTS[kind]}.delta", content

    def _begin(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any] = {
            "id": f"{_IDS[kind]}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
        }
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        item["content"] = []
        self.items.append(item)
        self._open = kind
        self._text = []
        self.logprobs = []
        yield "response.output_item.added", self._item()
        yield (
            "response.content_part.added",
            {**self._place(), "content_index": 0, "part": self._part(kind, "")},
        )

    def _finish(self, status: str) -> Iterator[Event]:
        kind, self._open = self._open, None
        if kind is None:
            return
        text = "".join(self._text)
        done = {**self._place(), "content_index": 0, "text": text}
        if kind == "message":
            self.logprobs += self.new_logprobs
            self.new_logprobs = []
            done["logprobs"] = self.logprobs
        yield f"response.{_PARTS[kind]}.done", done
        part = self._part(kind, text)
        yield "response.content_part.done", {**self._place(), "content_index": 0, "part": part}
        self.items[-1] |= {"content": [part], "status": status}
        if kind == "reasoning" and self.commits:
            self.items[-1]["encrypted_content"] = sealed(text)
        yield "response.output_item.done", self._item()

    def _call(self, call: ToolCall) -> Iterator[Event]:
        self.new_logprobs = []
        yield from self._finish("completed")
        item = self.tools.item(call)
        name, kind = _WRITTEN.get(item["type"], (None, None))
        self.items.append({**item, "status": "in_progress", **({name: ""} if name else {})})
        yield "response.output_item.added", self._item()
        if name is not None:
            yield f"response.{kind}.delta", {**self._place(), "delta": item[name]}
            done = {**self._place(), name: item[name], "name": item["name"]}
            yield f"response.{kind}.done", done
        self.items[-1] = item
        yield "response.output_item.done", self._item()

    def _item(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_IDS = {"message": "msg", "reasoning": "rs"}
_WRITTEN = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
