"""Response models of OpenAI's API, used only in the OpenAPI document, and response helpers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from penstock.engine.request import Usage
from penstock.server.active_request import ActiveRequest
from penstock.server.openai.openai_forms import StreamOptions
from penstock.server.problems import dumps
from penstock.server.prompt_progress import progress_object
from penstock.server.service import Service
from penstock.server.sse import EVENT, data


class OpenAIErrorDetail(BaseModel):
    """Message, type, parameter and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """OpenAI's error object."""

    error: OpenAIErrorDetail
    request_id: str | None = None


class PromptDetails(BaseModel):
    """Breakdown of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int | None = None
    """Prompt tokens computed and written to the cache. Chat completions only."""


class CompletionDetails(BaseModel):
    """Breakdown of the answers' tokens."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class OpenAIUsage(BaseModel):
    """Usage of a request, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class ChatCompletion(BaseModel):
    """All answers to a conversation."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TextChoice(BaseModel):
    """One continuation of a prompt, as `/v1/completions` returns it."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """All continuations of a prompt."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAIUsage


class Model(BaseModel):
    """The served model, in OpenAI's and Anthropic's fields."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    """Maximum number of tokens of a prompt and its answer together."""
    context_length: int
    type: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str
    kinds: list[str]


class Models(BaseModel):
    """List of the served model's names: its own, and one for each adapter."""

    object: str
    data: list[Model]
    has_more: bool
    first_id: str
    last_id: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIError, "description": text}
    for status, text in {
        400: "A field is wrong, or prompt and answer do not fit",
        401: "The key is missing or wrong",
        403: "The request names a foreign host",
        404: "Not found",
        408: "The body did not arrive in time",
        413: "The body is too large",
        415: "The content type is not JSON",
        422: "A field is wrong",
        429: "Too many requests are waiting",
        500: "Internal error",
        503: "Out of memory, or the server is stopping",
        504: "The answer did not end in time",
    }.items()
}
DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": EVENT}}}
}


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumps(content)


def head_of(service: Service, kind: str, model: str | None) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": service.shown_name(model),
    }


def includes_usage(options: StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)


def last_chunks(head: Mapping[str, Any], usage: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the last chunks of a stream: the usage, unless empty, and `[DONE]`."""
    if usage:
        yield data({**head, "choices": [], "usage": usage})
    yield DONE


def prompt_progress(answering: ActiveRequest) -> dict[str, Any]:
    progress = answering.progress
    return {} if progress is None else {"prompt_progress": progress_object(progress)}


def usage_object(
    usage: Usage, *, cache_write_tokens: int | None = None, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    details = {"cached_tokens": usage.cached_tokens}
    if cache_write_tokens is not None:
        details["cache_write_tokens"] = cache_write_tokens
    usage_fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
    }
    proposed = usage.accepted_tokens + usage.rejected_tokens
    if reasoning_tokens is not None or proposed:
        answers = {"reasoning_tokens": reasoning_tokens} if reasoning_tokens is not None else {}
        answers["accepted_prediction_tokens"] = usage.accepted_tokens
        answers["rejected_prediction_tokens"] = usage.rejected_tokens
        usage_fields["completion_tokens_details"] = answers
    return usage_fields
