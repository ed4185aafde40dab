"""Anthropic's Messages API, streaming or not, and token counting.

MessagesRequest ──prompt_of──> Prompt ──> Request ──engine──> Delta ──Blocks──> events

An unsupported field is rejected with an explanation. It is ignored where that does not change
the answer's meaning (`thinking` for a model without reasoning, `metadata`). Tools that run on
Anthropic's servers are left out of the prompt and named in a header.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sse_starlette import ServerSentEvent
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from penstock.config import SAMPLED
from penstock.engine.handle import Choice, PromptProgress
from penstock.engine.request import Event, ReasoningBudget, Request, Sampling
from penstock.server.access import salt_for
from penstock.server.answers import Delta, Reader, join
from penstock.server.anthropic.anthropic_forms import CountRequest, MessagesRequest, schema_of
from penstock.server.anthropic.anthropic_prompt import AnthropicPrompt, prompt_of, tools_of
from penstock.server.dialect import Dialect
from penstock.server.disconnect import until_gone
from penstock.server.forms import grammar_for
from penstock.server.images import spans_of
from penstock.server.problems import UNTHREADED, BadRequest
from penstock.server.prompt_progress import ping_event
from penstock.server.prompts import check_text
from penstock.server.request_body import reading_aside
from penstock.server.service import Service
from penstock.server.sse import EVENT, data
from penstock.server.tools.call_growth import CallPart, CallParts
from penstock.server.tools.calls import (
    DESCRIBED,
    LEFT_OUT,
    CallGrammar,
    call_grammar,
    free_call_grammar,
    named_header,
)

LABEL = "/v1/messages"

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


# ---- answers, for the OpenAPI document


class TextOut(BaseModel):
    type: Literal["text"]
    text: str
    citations: list[Any]


class ThinkingOut(BaseModel):
    """Reasoning, for clients that enabled `thinking`."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOut(BaseModel):
    """A tool call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any]


class ThinkingTokens(BaseModel):
    """Number of the answer's reasoning tokens."""

    thinking_tokens: int


class UsageOut(BaseModel):
    """Usage in tokens; the three input counts add up to the prompt's length."""

    input_tokens: int
    """Prompt tokens computed but not cached, in the incomplete last block."""
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class MessageOut(BaseModel):
    """Response with the model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextOut | ThinkingOut | ToolUseOut, Field(discriminator="type")]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: UsageOut


class CountOut(BaseModel):
    """Response of a token count request."""

    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str
    details: dict[str, Any] | None = None
    """Error code after which Anthropic's clients change the request and resend it."""


class ErrorOut(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorOut, "description": description}
    for status, description in {
        400: "A field is missing or wrong, or the prompt does not fit",
        401: "The key is missing or wrong",
        403: "The Host header is not this machine's, and the server has no keys",
        408: "The body did not arrive in time",
        413: "The body is too large",
        415: "The content type is not JSON",
        422: "A field is wrong",
        429: "Too many requests are waiting",
        500: "The model has failed",
        503: "Out of memory, or the server is stopping",
        504: "The answer did not end in time",
    }.items()
}
STREAMED = {"text/event-stream": {"schema": EVENT}}


# ---- the routes


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["anthropic"], responses=FAILURES, route_class=reading_aside(service))

    @routes.post(
        LABEL,
        response_model=MessageOut,
        responses={200: {"description": "The message, or its events", "content": STREAMED}},
    )
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        """Answer a conversation."""
        return await Messages(service, body).respond(http)

    @routes.post(f"{LABEL}/count_tokens", response_model=CountOut)
    async def count_tokens(body: CountRequest, http: HttpRequest) -> JSONResponse:
        """Count the tokens of a prompt, without running the model."""
        prompt = await until_gone(http, service.work(prompt_of, body, service.prompts))
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    return routes


class Messages(Dialect):
    path = LABEL
    prompt: AnthropicPrompt

    def __init__(self, service: Service, body: MessagesRequest) -> None:
        super().__init__(service, streams=bool(body.stream))
        self.body = body
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self.blocks = Blocks(thinking=body.thinks)
        self.headers = named_header(LEFT_OUT, body.left_out)

    def read(self) -> None:
        body, prompts = self.body, self.service.prompts
        check_text(body.cache_salt, "cache_salt")
        if body.thread:
            raise BadRequest(
                "thread: this server stores no conversations; send all messages, without thread",
                param="thread",
                code=UNTHREADED,
            )
        self.prompt = prompt_of(body, prompts)
        self.headers |= named_header(DESCRIBED, prompts.described_tools(tools_of(body)))

    def binds(self) -> bool:
        choice = self.body.tool_choice
        demanded = choice is not None and choice.type in ("any", "tool")
        strict = any(tool.strict for tool in self.body.tools or ())
        return demanded or strict or schema_of(self.body) is not None

    def rules(self) -> CallGrammar:
        return _grammar(self.service, self.body, self.prompt) or CallGrammar(None)

    def requests(self) -> Sequence[Request]:
        body, service, prompt = self.body, self.service, self.prompt
        chosen: dict[str, Any] = service.sampling.model_dump(include=set(SAMPLED))
        chosen |= body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        request = Request(
            prompt=tuple(prompt.tokens),
            spans=spans_of(prompt.tokens),
            max_tokens=body.max_tokens,
            sampling=Sampling(**chosen),
            stop=tuple(body.stop_sequences or ()),
            adapter=service.adapter_of(body.model),
            salt=salt_for(body.cache_salt),
            goes_on=body.messages[-1].role == "assistant",
            timeout_seconds=service.settings.request_timeout_seconds,
            grammar=self.rule.grammar,
            reasoning=self.budget(prompt.tokens, _budget(service, body, prompt)),
            hold_seconds=prompt.hold.seconds if prompt.hold else 0.0,
            hold_tokens=prompt.hold.tokens if prompt.hold else None,
        )
        parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
        form, inside = service.prompts.format, self.in_reasoning
        self.readers = [Reader(form, tools_of(body), reasoning=inside, parallel=parallel)]
        return [request]

    async def usage(self) -> dict[str, Any]:
        """Return the usage, with cache reads and cache writes counted separately."""
        used = self.answering.usage()
        created = await self.service.created_tokens(self.answering)
        usage = UsageOut(
            input_tokens=used.prompt_tokens - used.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=used.cached_tokens,
            output_tokens=used.completion_tokens,
            output_tokens_details=ThinkingTokens(thinking_tokens=self.reasoning_tokens()),
        )
        return usage.model_dump()

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,), (reader,) = choices, self.readers
        reader.read(choice)
        whole = Delta(reader.text, reader.reasoning, tuple(reader.calls))
        for _ in (*self.blocks.push(whole), *self.blocks.end()):
            pass
        return {**self._head(), **_ended(reader), "usage": usage}

    def ping(self, progress: PromptProgress | None) -> ServerSentEvent:
        return ping_event(progress)

    def begin(self) -> Iterator[bytes]:
        yield _event({"type": "message_start", "message": self._start()})
        yield _event({"type": "ping"})

    def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in self.blocks.push(join(self.delta(part) for part in events)):
            yield _event(event)

    def end(self, usage: dict[str, Any]) -> Iterator[bytes]:
        for event in self.blocks.end():
            yield _event(event)
        ended = _ended(self.readers[0])
        yield _event({"type": "message_delta", "delta": ended, "usage": usage})
        yield _event({"type": "message_stop"})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.shown_name(self.body.model),
            "content": self.blocks.content,
            "container": None,
        }

    def _start(self) -> dict[str, Any]:
        usage = UsageOut(
            input_tokens=len(self.prompt.tokens),
            cache_creation_input_tokens=None,
            cache_read_input_tokens=None,
            output_tokens=0,
        )
        nothing = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        return {**self._head(), "content": [], **nothing, "usage": usage.model_dump()}


def _budget(
    service: Service, body: MessagesRequest, prompt: AnthropicPrompt
) -> ReasoningBudget | None:
    tokens = body.thinking.budget_tokens if body.thinking is not None and body.thinks else None
    marks = service.prompts.reasoning_marks
    if tokens is None or marks is None:
        return None
    start, end = marks
    return ReasoningBudget(max_tokens=tokens, start=start, end=end, inside=prompt.in_reasoning)


def _grammar(
    service: Service, body: MessagesRequest, prompt: AnthropicPrompt
) -> CallGrammar | None:
    choice, schema = body.tool_choice, schema_of(body)
    if choice is not None and choice.type in ("any", "tool"):
        if choice.type == "tool" and choice.name is None:
            raise BadRequest("tool_choice.name is missing", param="tool_choice.name")
        name = choice.name if choice.type == "tool" else None
        return call_grammar(service.prompts.format, tools_of(body), name)
    if schema is not None:
        return CallGrammar(grammar_for(schema, "output_config.format.schema"))
    tools = tools_of(body)
    strict = {tool.name for tool in body.tools or () if tool.strict and tool.name}
    if not strict or not tools:
        return None
    if _budget(service, body, prompt) is not None:  # it cannot be combined with a grammar
        return CallGrammar(None, tuple(f"{name}:strict" for name in sorted(strict)))
    inside = prompt.in_reasoning
    return free_call_grammar(service.prompts.format, tools, strict, inside=inside)


# ---- the answer


class Blocks:
    def __init__(self, *, thinking: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._thinking = thinking
        self._open = False
        self._calls = CallParts()

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not delta.growth:
            yield from self._emit(delta)
            for call in delta.calls:
                yield from self._tool_part(CallPart(0, call, True, call.arguments, True))
            return
        for part in self._calls.in_order(delta):
            if isinstance(part, Delta):
                yield from self._emit(part)
            else:
                yield from self._tool_part(part)

    def _emit(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.reasoning and self._thinking:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self.content[-1]["thinking"] += delta.reasoning
            yield self._more({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._begin({"type": "text", "text": "", "citations": []})
            self.content[-1]["text"] += delta.text
            yield self._more({"type": "text_delta", "text": delta.text})

    def end(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _tool_part(self, part: CallPart) -> Iterator[dict[str, Any]]:
        call = part.call
        if part.begins:
            yield from self.end()
            call_id = f"toolu_{call.id.removeprefix('call_')}"
            block = {"type": "tool_use", "id": call_id, "name": call.name, "input": {}}
            block["caller"] = {"type": "direct"}
            yield from self._begin(block)
        if part.grown:
            yield self._more({"type": "input_json_delta", "partial_json": part.grown})
        if part.ends:
            self.content[-1]["input"] = call.object
            yield from self.end()

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open and self.content[-1]["type"] == block["type"]:
            return
        yield from self.end()
        self._open = True
        self.content.append(block)
        yield {
            "type": "content_block_start",
            "index": len(self.content) - 1,
            "content_block": dict(block),
        }

    def _more(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _ended(reader: Reader) -> dict[str, Any]:
    stop = reader.finish.stop if reader.finish is not None else None
    reason: StopReason = "end_turn"
    if reader.reason == "length":
        reason = "max_tokens"
    elif reader.reason == "tool_calls":
        reason = "tool_use"
    elif isinstance(stop, str):
        reason = "stop_sequence"
    sequence = stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _event(content: dict[str, Any]) -> bytes:
    return data(content, content["type"])
