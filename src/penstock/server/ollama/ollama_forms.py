"""Request bodies of Ollama's API, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from penstock.server.forms import Each, Name, RequestForm
from penstock.server.openai.openai_forms import ChatRequest
from penstock.server.problems import BadRequest

RENAMED = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
SAMPLED_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", *RENAMED),
)
"""Supported options; others are ignored, as the server's settings decide how models are loaded."""
DATA_URL = "data:image/*;base64,"
LATEST = ":latest"
"""Tag that Ollama's clients add to names without one."""


class OllamaBody(RequestForm):
    """Fields of chat and generate. `keep_alive` is accepted, but has no effect."""

    model: Name = ""
    stream: bool = True
    options: dict[str, Any] = Field(default={})
    format: Literal["", "json"] | dict[str, Any] = ""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | int | str | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> ChatRequest:
        """Convert to a chat request; RequestValidationError if it is invalid."""
        options = {
            RENAMED.get(name, name): value
            for name, value in self.options.items()
            if name in SAMPLED_OPTIONS and value is not None
        }
        if options.get("max_tokens") in (-1, -2):  # no limit, or up to the end of the context
            del options["max_tokens"]
        fields: dict[str, Any] = {**options, "messages": list(messages), "stream": self.stream}
        fields["model"] = self.model.removesuffix(LATEST) or None
        if tools:
            fields["tools"] = tools
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.think is not None:
            effort = self.think if isinstance(self.think, str) else _effort(self.think)
            fields["reasoning_effort"] = effort
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None


class OllamaMessage(RequestForm):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Each[str] = Field(default=[])
    tool_calls: Each[dict[str, Any]] = Field(default=[])
    tool_name: str | None = None


class OllamaChatBody(OllamaBody):
    """The body of `POST /api/chat`."""

    messages: Each[OllamaMessage] = Field(default=[], max_length=16_384)
    tools: Each[dict[str, Any]] = Field(default=[], max_length=512)

    def request(self) -> ChatRequest:
        return self.chat(chat_messages(self.messages), self.tools)


class OllamaGenerateBody(OllamaBody):
    """The body of `POST /api/generate`."""

    prompt: str = ""
    system: str = ""
    suffix: str = ""
    images: Each[str] = Field(default=[])
    raw: bool = False
    context: Each[int] = Field(default=[])

    def request(self) -> ChatRequest:
        if self.suffix:
            raise BadRequest("suffix is not supported: leave it out", param="suffix")
        if self.context:
            raise BadRequest("context is not supported: send the conversation to /api/chat")
        user = OllamaMessage(role="user", content=self.prompt, images=self.images)
        system = [OllamaMessage(role="system", content=self.system)] if self.system else []
        return self.chat(chat_messages([*system, user]))


class OllamaShowBody(RequestForm):
    """The body of `POST /api/show`."""

    model: Name = ""
    name: Name = ""
    verbose: bool = False


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert to OpenAI's messages; tool results get the ids of the preceding calls, in order.

    >>> call = {"function": {"name": "f", "arguments": {}}}
    >>> called = OllamaMessage(role="assistant", tool_calls=[call])
    >>> [m.get("tool_call_id") for m in chat_messages([called, OllamaMessage(role="tool")])]
    [None, 'call_0']
    """
    written: list[dict[str, Any]] = []
    count, open_ids = 0, list[str]()
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.images:
            plain["content"] = [
                *([{"type": "text", "text": message.content}] if message.content else []),
                *({"type": "image_url", "image_url": {"url": _url(i)}} for i in message.images),
            ]
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            open_ids = [f"call_{count + number}" for number in range(len(message.tool_calls))]
            count += len(open_ids)
            plain["tool_calls"] = [
                {"type": "function", **call, "id": name}
                for call, name in zip(message.tool_calls, open_ids, strict=True)
            ]
        if message.role == "tool":
            plain["tool_call_id"] = open_ids.pop(0) if open_ids else f"call_{count}"
            if message.tool_name:
                plain["name"] = message.tool_name
        written.append(plain)
    return written


def _url(image: str) -> str:
    return image if image.startswith("data:") else f"{DATA_URL}{image}"


def _effort(thinks: bool) -> str:
    return "medium" if thinks else "none"
