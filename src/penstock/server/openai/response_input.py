"""Input of a response: items, chat messages and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.server.images import PromptTokens
from penstock.server.openai.response_forms import ResponsesRequest
from penstock.server.openai.response_items import Conversation, items_of, resolved
from penstock.server.openai.response_tools import Tools
from penstock.server.problems import BadRequest
from penstock.server.prompts import Prompts
from penstock.server.reasoning_effort import effort_switches
from penstock.server.response_store import ResponseStore
from penstock.server.tools.allowed_tools import ToolPlan


@dataclass(frozen=True, slots=True)
class ResponseInput:
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    tools: Tools
    left_out: list[str]

    @classmethod
    def of(
        cls, body: ResponsesRequest, store: ResponseStore | None = None, *, images: bool = False
    ) -> ResponseInput:
        items, stored, salt = items_of(body.input), 0, body.cache_salt or ""
        if store is not None:
            if body.previous_response_id:
                before = store.get(salt, body.previous_response_id)
                items, stored = [*before, *items], len(before)
            if any(item.get("type") == "item_reference" for item in items):
                items = resolved(items, store.items(salt), stored)
        conversation = Conversation(items, stored, images=images)
        messages = conversation.messages
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        if not messages:
            raise BadRequest("input is empty", param="input")
        return cls(items, messages, Tools.of(body.tools), conversation.left_out)

    def render(self, body: ResponsesRequest, prompts: Prompts) -> PromptTokens:
        plan = ToolPlan.of(prompts.format, self.tools.chat, body.tool_choice)
        salt = body.cache_salt or ""
        effort = body.reasoning.effort if body.reasoning is not None else None
        switches = effort_switches(effort, prompts)
        return prompts.render(self.messages, plan.prompt, salt=salt, **switches)
