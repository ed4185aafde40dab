"""Anthropic's request format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from penstock.server.forms import (
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    Each,
    Name,
    RequestForm,
    TextOrList,
)
from penstock.server.prompts import left_out

Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
LIFETIMES_SECONDS = {"5m": 300.0, "1h": 3600.0}


class CacheControl(RequestForm):
    """Cache breakpoint: keep the prompt up to this block cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return LIFETIMES_SECONDS[self.ttl]


class Marked(RequestForm):
    """Base of blocks that may carry a `cache_control`."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    type: Literal["text"]
    text: str


Texts: TypeAlias = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Each[TextBlock], Tag("[list]")], TextOrList
]


class Other(Marked):
    """Block that is not text: an image, a document, a tool reference, or an unknown type."""

    type: str
    tool_name: str | None = None
    source: dict[str, Any] | None = None

    @property
    def text(self) -> str | None:
        source = self.source or {}
        data = source.get("data")
        readable = self.type == "document" and source.get("type") == "text"
        return data if readable and isinstance(data, str) else None

    @property
    def is_image(self) -> bool:
        return self.type == "image"

    @property
    def words(self) -> str:
        if self.text is not None:
            return self.text
        return left_out(f"{self.type} {self.tool_name[:256]}" if self.tool_name else self.type)


def _kind_in(*known: str) -> Discriminator:
    """Discriminate blocks by type; unknown types become `Other`."""

    def kind(block: Any) -> str | None:
        block_type = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        if not isinstance(block_type, str):
            return None
        return block_type if block_type in known else "[other]"

    return Discriminator(
        kind,
        custom_error_type="block_type",
        custom_error_message="a block is an object with a type",
    )


Result: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[Other, Tag("[other]")], _kind_in("text")
]


class ToolUse(Marked):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Marked):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[Each[Result], Tag("[list]")], TextOrList
    ] = ""
    is_error: bool | None = None


class Thinking(RequestForm):
    """Reasoning block of an earlier answer."""

    type: Literal["thinking"]
    thinking: str = ""

    @property
    def words(self) -> str:
        return self.thinking


class RedactedThinking(RequestForm):
    """Encrypted reasoning, which only Anthropic can read."""

    type: Literal["redacted_thinking"]

    @property
    def words(self) -> str:
        return left_out("redacted_thinking")


Content: TypeAlias = TextBlock | ToolUse | ToolResult | Thinking | RedactedThinking | Other
Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")]
    | Annotated[Other, Tag("[other]")],
    _kind_in("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]
Blocks: TypeAlias = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Each[Block], Tag("[list]")], TextOrList
]


class Turn(RequestForm):
    """A message: text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @property
    def blocks(self) -> list[Content]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


class AnthropicTool(Marked):
    """A function that the client offers, or a tool that runs on Anthropic's servers."""

    name: str = Field("", max_length=256)
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None

    @property
    def is_function(self) -> bool:
        return self.input_schema is not None or self.type in (None, "custom")


class ToolChoice(RequestForm):
    """Whether the model must, may or must not call a tool; `name` belongs to type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(RequestForm):
    """The JSON schema that the answer's text must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestForm):
    """Format of the answer's text, and reasoning effort."""

    format: OutputFormat | None = None
    effort: Name | None = None


class ThinkingConfig(RequestForm):
    """Whether to return the model's reasoning, and its token limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Reasoning limit in tokens; at the limit the model's end-of-reasoning tokens are forced."""


class CountRequest(RequestForm):
    """The fields that make up the prompt; also the body of a token count request."""

    model: Name
    messages: Each[Turn] = Field(min_length=1, max_length=16_384)
    system: Texts = ""
    tools: Each[AnthropicTool] | None = Field(None, max_length=512)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    cache_salt: str = Field("", max_length=1_024)
    """Cache salt: only requests with equal salts share prefixes. A penstock extension."""

    @property
    def offered(self) -> list[AnthropicTool]:
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else [tool for tool in self.tools or () if tool.is_function]

    @property
    def left_out(self) -> list[str]:
        """Names of tools that run on Anthropic's servers, which are left out of the prompt."""
        return [tool.name or str(tool.type) for tool in self.tools or () if not tool.is_function]

    @property
    def demands_call(self) -> bool:
        """Whether the answer must be a tool call; such an answer has no reasoning."""
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    @property
    def thinks(self) -> bool:
        """Whether the model should reason: it was requested, and no tool call is required."""
        enabled = self.thinking is not None and self.thinking.type != "disabled"
        return enabled and not self.demands_call

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def system_blocks(self) -> list[TextBlock]:
        if isinstance(self.system, str):
            return [TextBlock(type="text", text=self.system)] if self.system else []
        return list(self.system)


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    thread: dict[str, Any] | Literal[False] | None = None
    """Server-side conversation; rejected, so that clients resend all messages."""
    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = None
    stop_sequences: Each[Stop] | None = Field(None, max_length=MOST_STOPS)
    temperature: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    """Temperature; defaults to 0, greedy."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, lt=2**31)


def schema_of(request: CountRequest) -> dict[str, Any] | None:
    config = request.output_config
    return None if config is None or config.format is None else config.format.schema_
