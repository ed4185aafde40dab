"""Forms of `/v1/responses`: its requests and its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, Tag

from penstock.server.forms import Each, Metadata, Name, RequestForm, Sampled, TextOrList

Input: TypeAlias = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Each[dict[str, Any]], Tag("[list]")], TextOrList
]
"""A text, or messages, calls and their outputs."""


class TextFormat(RequestForm):
    """The form of the answer."""

    type: str
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class TextSettings(RequestForm):
    """The form of the answer, as `text` holds it."""

    format: TextFormat | None = None


class ReasoningSettings(RequestForm):
    """Settings of the model's reasoning."""

    effort: Name | None = None
    """Effort, `none` to `high`; it works where the model's template has a switch for it."""


class ResponsesRequest(Sampled):
    """The body of `POST /v1/responses`."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextSettings | None = None
    tools: Each[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may hold several calls; False keeps only the first."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Each[Name] | None = Field(None, max_length=64)
    metadata: Metadata | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    """Whether the response is kept, so that a later request may go on from its id."""
    background: bool | None = None
    previous_response_id: Name | None = None
    conversation: Any = None


class InputTokensRequest(ResponsesRequest):
    """The body of `POST /v1/responses/input_tokens`: a response's, and `input` may be left out."""

    input: Input = Field(default_factory=list)


class InputTokens(BaseModel):
    """Length of an input."""

    object: str
    input_tokens: int


class InputItems(BaseModel):
    """Page of a response's input."""

    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that were read from the cache."""
    cache_write_tokens: int
    """Prompt tokens that were computed and are now in the cache."""


class OutputDetails(BaseModel):
    """Details of the answer's tokens."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Usage of a request, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """An answer, with the settings that it was made with; not all of them stand here."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    """State: `completed`, `incomplete` where its tokens ended, or `failed`."""
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage | None
    temperature: float
    """Temperature that was used, given or not."""
    top_p: float
    truncation: Literal["disabled"]
    """Whether an input that is too long is cut: it is refused."""
    tools: list[dict[str, Any]]


class DeletedResponse(BaseModel):
    """A response that is not kept any more."""

    id: str
    object: str
    deleted: bool
