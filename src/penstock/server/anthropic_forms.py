"""Anthropic's wire format: the fields of a request, and their bounds."""

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
    """Wish that the prompt up to a block stays in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        """Seconds that the prefix is held after its last use."""
        return LIFETIMES_SECONDS[self.ttl]


class Marked(RequestForm):
    """Base of all that may carry a `cache_control`."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    """Block of text."""

    type: Literal["text"]
    text: str


Texts: TypeAlias = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Each[TextBlock], Tag("[list]")], TextOrList
]


class Other(Marked):
    """Block that is no text: an image, a document, a tool reference, a type of a newer version."""

    type: str
    tool_name: str | None = None
    """Name of the tool, in a `tool_reference`."""
    source: dict[str, Any] | None = None
    """Source of a document: a text, or a form that this server cannot read."""

    @property
    def text(self) -> str | None:
        """Its text, if it has any."""
        source = self.source or {}
        data = source.get("data")
        readable = self.type == "document" and source.get("type") == "text"
        return data if readable and isinstance(data, str) else None

    @property
    def words(self) -> str:
        """Words for it in a prompt: its text, or that it was left out."""
        if self.text is not None:
            return self.text
        return left_out(f"{self.type} {self.tool_name[:256]}" if self.tool_name else self.type)


def _kind_in(*known: str) -> Discriminator:
    """Tell blocks apart by their type; those that are not known are `Other`."""

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
    """Call that the model has asked for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Marked):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[Each[Result], Tag("[list]")], TextOrList
    ] = ""
    is_error: bool | None = None


class Thinking(RequestForm):
    """Reasoning of an earlier answer, as templates are given it."""

    type: Literal["thinking"]
    thinking: str = ""

    @property
    def words(self) -> str:
        """The reasoning."""
        return self.thinking


class RedactedThinking(RequestForm):
    """Encrypted reasoning, which only Anthropic can read."""

    type: Literal["redacted_thinking"]

    @property
    def words(self) -> str:
        """Words for it in a prompt."""
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
    """A message: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @property
    def blocks(self) -> list[Content]:
        """Its content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


class AnthropicTool(Marked):
    """A function that the client offers, or a tool that runs on Anthropic's side."""

    name: str = Field("", max_length=256)
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    """Whether its calls follow its schema."""

    @property
    def is_function(self) -> bool:
        """Whether the model here can be told how to call it."""
        return self.input_schema is not None or self.type in (None, "custom")


class ToolChoice(RequestForm):
    """Whether the model must, may or must not call; `name` goes with `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class OutputFormat(RequestForm):
    """The JSON schema that the answer's text must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestForm):
    """Form of the answer's text, and the effort of its reasoning."""

    format: OutputFormat | None = None
    effort: Name | None = None
    """Effort of the reasoning, where the model's template has levels of it."""


class ThinkingConfig(RequestForm):
    """Switch that shows the model's reasoning, and its limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Limit of reasoning, in tokens; behind it the model's own mark ends the reasoning."""


class CountRequest(RequestForm):
    """Part of a request that makes its prompt, which is also the request of a count."""

    model: Name
    """Any name is served by the one model there is."""
    messages: Each[Turn] = Field(min_length=1, max_length=16_384)
    system: Texts = ""
    tools: Each[AnthropicTool] | None = Field(None, max_length=512)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    cache_salt: str = Field("", max_length=1_024)
    """Salt: only requests of one salt share prefixes. A field of penstock, not Anthropic's."""

    @property
    def offered(self) -> list[AnthropicTool]:
        """Tools that the model may call."""
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else [tool for tool in self.tools or () if tool.is_function]

    @property
    def left_out(self) -> list[str]:
        """Names of tools that run on Anthropic's side, which stay out of the prompt."""
        return [tool.name or str(tool.type) for tool in self.tools or () if not tool.is_function]

    @property
    def constrained(self) -> bool:
        """Whether the answer has a form that leaves no room for reasoning."""
        calls = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        return calls or schema_of(self) is not None

    @property
    def thinks(self) -> bool:
        """Whether the client wants to see the model's reasoning."""
        wanted = self.thinking is not None and self.thinking.type != "disabled"
        return wanted and not self.constrained

    @property
    def effort(self) -> str | None:
        """Effort of the reasoning, if the client names one."""
        return None if self.output_config is None else self.output_config.effort

    @property
    def system_blocks(self) -> list[TextBlock]:
        """The system prompt as blocks."""
        if isinstance(self.system, str):
            return [TextBlock(type="text", text=self.system)] if self.system else []
        return list(self.system)


class MessagesRequest(CountRequest):
    """A request for a message."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = None
    stop_sequences: Each[Stop] | None = Field(None, max_length=MOST_STOPS)
    temperature: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    """Temperature; 0, the default here, takes the likeliest token."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, lt=2**31)


def schema_of(request: CountRequest) -> dict[str, Any] | None:
    """Return the JSON schema that the answer must follow, if there is one."""
    config = request.output_config
    return None if config is None or config.format is None else config.format.schema_
