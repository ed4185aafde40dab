"""Request and response formats of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, Tag

from penstock.server.forms import Each, Metadata, Name, RequestForm, TextOrList
from penstock.server.openai.openai_forms import Sampled

Input: TypeAlias = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Each[dict[str, Any]], Tag("[list]")], TextOrList
]


class TextFormat(RequestForm):
    """The format of the answer."""

    type: str
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class TextSettings(RequestForm):
    """The `text` field of a request."""

    format: TextFormat | None = None


class ReasoningSettings(RequestForm):
    """Settings of the model's reasoning."""

    effort: Name | None = None
    """Effort, `none` to `high`; requires a template that supports it."""


class ResponsesRequest(Sampled):
    """The body of `POST /v1/responses`."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextSettings | None = None
    tools: Each[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """If false, only the first call of an answer is kept."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Each[Name] | None = Field(None, max_length=64)
    metadata: Metadata | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    """Store the response, so that a later request can continue from its id."""
    background: bool | None = None
    previous_response_id: Name | None = None
    conversation: Any = None


class InputTokensRequest(ResponsesRequest):
    """The body of `POST /v1/responses/input_tokens`, with an optional `input`."""

    input: Input = Field(default_factory=list)


class InputTokens(BaseModel):
    """Length of an input in tokens."""

    object: str
    input_tokens: int


class InputItems(BaseModel):
    """A page of the input items of a response."""

    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Usage of a request, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """A response and its settings, some of which are not listed in this schema."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    """`completed`, `incomplete` (token limit reached) or `failed`."""
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage | None
    temperature: float
    """Temperature used, whether or not the request set it."""
    top_p: float
    truncation: Literal["disabled"]
    """Truncation is disabled: overlong inputs are rejected."""
    tools: list[dict[str, Any]]


class DeletedResponse(BaseModel):
    """A deleted response."""

    id: str
    object: str
    deleted: bool
