"""The body of `POST /v1/chat/completions`: its tools, and the prompt that it makes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock.server.allowed_tools import ToolPlan
from penstock.server.forms import ChatRequest, Each, FunctionTool, Name
from penstock.server.legacy_calls import choice_of, tools_of, with_tool_calls
from penstock.server.parsing import AnswerFormat
from penstock.server.prompts import Prompts, client_arguments
from penstock.server.reasoning_effort import effort_switches
from penstock.server.structured import Structured


class ChatBody(ChatRequest, Structured):
    """The body of `POST /v1/chat/completions`."""

    parallel_tool_calls: bool | None = None
    """Whether an answer may hold several calls; False keeps only the first."""
    functions: Each[FunctionTool] | None = Field(None, max_length=512)
    """Functions in OpenAI's first form; `tools` go before them."""
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: Name | None = None
    """Effort of the reasoning, where the model's template has a switch for it."""

    @property
    def legacy(self) -> bool:
        """Whether calls go back as `function_call`."""
        return self.tools is None and self.functions is not None

    def plan(self, form: AnswerFormat) -> ToolPlan:
        """Return the tools of the prompt, and those that may be called.

        Raises:
            BadRequest: `tool_choice` or `function_call` is of no known form.
        """
        if self.legacy:
            functions = [one.model_dump(exclude_none=True) for one in self.functions or ()]
            return ToolPlan.of(form, tools_of(functions), choice_of(self.function_call))
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return ToolPlan.of(form, tools, self.tool_choice)

    def render(self, prompts: Prompts, plan: ToolPlan) -> tuple[int, ...]:
        """Return the prompt's tokens. Slow: not for an event loop."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        arguments = effort_switches(self.reasoning_effort, prompts)
        arguments |= client_arguments(self.chat_template_kwargs)
        salt = self.cache_salt or ""
        return prompts.render(with_tool_calls(messages), plan.prompt, salt=salt, **arguments)
