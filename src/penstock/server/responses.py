"""OpenAI's `/v1/responses`, for text and calls of tools.

response.created, in_progress
  output_item.added ─ content_part.added ─ output_text.delta ... done ─ ... done
  output_item.added ─ function_call_arguments.delta, done ─ output_item.done
response.completed | response.incomplete

`response_tools` has the tools, `response_items` the input, `response_store` the kept responses.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.request import Finish, Token
from penstock.server.answers import Delta, Reader, ToolCall
from penstock.server.calls import demanded, left_out_headers, offered, unenforced_headers
from penstock.server.forms import Each, Metadata, Name, RequestForm, Sampled, grammar_for
from penstock.server.logprobs import Logprobs
from penstock.server.openai import ERRORS, STREAMED, Json
from penstock.server.problems import BadRequest, problem_of
from penstock.server.prompts import Prompts
from penstock.server.response_items import Conversation, items_of, resolved, sealed
from penstock.server.response_store import ResponseStore
from penstock.server.response_tools import Tools, flat_name
from penstock.server.service import ActiveRequest, Service, until_gone
from penstock.server.sse import Stream, data

logger = logging.getLogger(__name__)

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""Name in `include` that asks for log-probabilities."""
SEALED_REASONING = "reasoning.encrypted_content"
"""Name in `include` that asks for sealed reasoning, which clients send back unread."""
LEAST_EFFORTS = ("none", "minimal")
"""Efforts that turn reasoning off where the template can."""
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts as templates know them: low, medium, high."""


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

    input: str | Each[dict[str, Any]]
    """A text, or messages, calls and their outputs."""
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
    """An answer."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage | None


class DeletedResponse(BaseModel):
    """A response that is not kept any more."""

    id: str
    object: str
    deleted: bool


def router(service: Service) -> APIRouter:
    """Return the routes of responses."""
    routes = APIRouter(tags=["openai"], responses=ERRORS)
    logprobs = Logprobs(service.tokenizer)

    @routes.post(PATH, response_model=ResponseObject, responses=STREAMED)
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        """Answer an input of texts, calls and their outputs."""
        return await _Responses(service, logprobs, body).respond(http)

    @routes.get(f"{PATH}/{{response_id}}", response_model=ResponseObject)
    async def response(response_id: str, cache_salt: str = "") -> Response:
        """Return a response that was kept, of the salt that it was asked for with."""
        return Json(service.stored.response(cache_salt, response_id))

    @routes.delete(f"{PATH}/{{response_id}}", response_model=DeletedResponse)
    async def delete(response_id: str, cache_salt: str = "") -> Response:
        """Forget a response that was kept."""
        service.stored.delete(cache_salt, response_id)
        return Json({"id": response_id, "object": "response", "deleted": True})

    return routes


@dataclass(frozen=True, slots=True)
class Asked:
    """Content of a request, read and resolved."""

    items: list[dict[str, Any]]
    """The conversation, with what was stored of it and without references."""
    messages: list[dict[str, Any]]
    """Messages in the form of chat."""
    tools: Tools
    left_out: list[str]
    """Types of items that no model can read."""

    @classmethod
    def of(cls, body: ResponsesRequest, store: ResponseStore | None = None) -> Asked:
        """Read a request.

        Raises:
            BadRequest: an item or a tool that cannot be read, an unknown response, or no input.
        """
        items, stored, salt = items_of(body.input), 0, body.cache_salt or ""
        if store is not None:
            if body.previous_response_id:
                before = store.get(salt, body.previous_response_id)
                items, stored = [*before, *items], len(before)
            if any(item.get("type") == "item_reference" for item in items):
                items = resolved(items, store.items(salt), stored)
        conversation = Conversation(items, stored)
        messages = conversation.messages
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        if not messages:
            raise BadRequest("input is empty", param="input")
        return cls(items, messages, Tools.of(body.tools), conversation.left_out)

    def render(self, body: ResponsesRequest, prompts: Prompts) -> tuple[int, ...]:
        """Turn it into the tokens of the prompt. Slow: not for a loop."""
        tools = offered(self.tools.chat, body.tool_choice)
        return prompts.render(self.messages, tools, **_effort(body, prompts))


def _effort(body: ResponsesRequest, prompts: Prompts) -> dict[str, Any]:
    """Return the template's own switches for how much the model reasons."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    switches: dict[str, Any] = {}
    if effort is not None and prompts.reasoning_marks is not None:
        switches["enable_thinking"] = effort not in LEAST_EFFORTS
    if effort is not None and prompts.traits.reasoning_effort:
        switches["reasoning_effort"] = EFFORTS.get(effort, effort)
    return switches


class _Responses:
    """One request."""

    def __init__(self, service: Service, logprobs: Logprobs, body: ResponsesRequest) -> None:
        self.service = service
        self.logprobs = logprobs
        self.body = body
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.numbers = iter(range(2**31))
        """Sequence numbers of the stream's events."""
        self.in_reasoning = False
        self.parallel = body.parallel_tool_calls is not False
        self.wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        self.asked = Asked([], [], Tools(), [])
        self.headers: dict[str, str] = {}
        """Headers of the response, beside the one for left-out items and tools."""
        self.custom: str | None = None
        """Custom tool whose call is demanded: the whole answer is its input."""

    async def respond(self, http: HttpRequest) -> Response:
        """Hand the request in, and answer whole or by events."""
        answering, reader = await self._open(http)
        headers = left_out_headers([*self.asked.tools.left_out, *self.asked.left_out])
        headers |= self.headers
        if self.body.stream:
            return Stream(self.service, PATH, answering, self._told(answering, reader), headers)
        async with answering:
            (choice,) = await answering.result(http)
            reader.read(choice)
            output = self._output()
            output.add(Delta(reasoning=reader.reasoning))
            output.new_logprobs = self._logprobs(choice.logprobs)
            output.add(Delta(reader.text, calls=tuple(reader.calls)))
            output.end(incomplete=reader.reason == "length")
            whole = self._object(output.items, reader, await self._usage(answering))
            self._keep(output, whole)
            return Json(whole, headers=headers)

    def _output(self) -> _Output:
        commits = SEALED_REASONING in (self.body.include or ())
        return _Output(self.asked.tools, custom=self.custom, commits=commits)

    def _keep(self, output: _Output, whole: dict[str, Any]) -> None:
        """Keep the conversation for a request that goes on from it."""
        if self.body.store is not False:
            items = [*self.asked.items, *output.items]
            self.service.stored.put(self.body.cache_salt or "", self.id, items, whole)

    async def _open(self, http: HttpRequest) -> tuple[ActiveRequest, Reader]:
        body, service = self.body, self.service
        for name in ("conversation", "background"):
            if getattr(body, name):
                raise BadRequest(
                    f"{name} is not served; send the whole input, or previous_response_id",
                    param=name,
                    code="unsupported_parameter",
                )
        prompt, grammar = await until_gone(http, service.work(self._read))
        request = body.request(
            service,
            prompt,
            sampling=body.sampling(
                logprobs=self.wants_logprobs, top_logprobs=body.top_logprobs or 0
            ),
            max_tokens=body.max_output_tokens,
            grammar=grammar,
        )
        # A grammar leaves no room for reasoning, whatever the template has opened.
        self.in_reasoning = grammar is None and service.prompts.starts_in_reasoning(prompt)
        tools = None if self.custom else offered(self.asked.tools.chat, body.tool_choice)
        reader = Reader(
            service.tokenizer, tools, reasoning=self.in_reasoning, parallel=self.parallel
        )
        return await service.open(request, PATH), reader

    def _read(self) -> tuple[tuple[int, ...], str | None]:
        """Return the prompt's tokens and the answer's grammar; in a worker thread."""
        self.asked = Asked.of(self.body, self.service.stored)
        prompt = self.asked.render(self.body, self.service.prompts)
        return prompt, self._demanded() or self._grammar()

    def _demanded(self) -> str | None:
        """Return the grammar of a demanded call; a custom tool's is its input's grammar."""
        choice = self.body.tool_choice
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            name = flat_name(str(choice.get("name")), choice.get("namespace"))
            tool = self.asked.tools.offered.get(name)
            if tool is not None and tool.grammar is not None:
                self.custom = name
                return tool.grammar
            choice = {"type": "function", "name": name}
        tools = offered(self.asked.tools.chat, choice)
        call = demanded(self.service.tokenizer, tools, choice)
        if call is None:
            return None
        self.headers = unenforced_headers(call.unenforced)
        return call.grammar

    def _grammar(self) -> str | None:
        wanted = self.body.text.format if self.body.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return grammar_for(None, "text.format")
        if wanted.type != "json_schema":
            raise BadRequest(
                "text.format.type: text, json_object or json_schema", param="text.format.type"
            )
        if wanted.schema_ is None:
            raise BadRequest("text.format.schema is missing", param="text.format.schema")
        return grammar_for(wanted.schema_, "text.format.schema")

    def _logprobs(self, tokens: list[Token]) -> list[dict[str, Any]]:
        return self.logprobs.chat(tokens) if self.wants_logprobs else []

    async def _usage(self, answering: ActiveRequest) -> dict[str, Any]:
        usage = answering.usage()
        (choice,) = answering.handles[0].choices
        thought = self.service.prompts.reasoning_tokens(choice.tokens, inside=self.in_reasoning)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": await self.service.created_tokens(answering),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _object(
        self,
        items: list[dict[str, Any]],
        reader: Reader | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = self.body
        form = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True, exclude_unset=True)
        status = "in_progress"
        if reader is not None:
            status = "incomplete" if reader.reason == "length" else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.service.model_name,
            "output": items,
            "parallel_tool_calls": self.parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": form},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "usage": usage,
        }

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        return data({"type": kind, "sequence_number": next(self.numbers), **content}, kind)

    async def _told(self, answering: ActiveRequest, reader: Reader) -> AsyncIterator[bytes]:
        """Write the answer's events; an error is one of them, in this API's form."""
        try:
            async for written in self._events(answering, reader):
                yield written
        # A boundary: the status has been sent, so nothing above could tell the client any more.
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                logger.error("a stream has failed: %s", type(error).__name__)
                logger.debug("its error", exc_info=error)
            yield self._event(
                "error",
                {"code": problem.code, "message": problem.message, "param": problem.param},
            )

    async def _events(self, answering: ActiveRequest, reader: Reader) -> AsyncIterator[bytes]:
        event = self._event
        for kind in ("response.created", "response.in_progress"):
            yield event(kind, {"response": self._object([])})
        output = self._output()
        async for events in answering.batches():
            for one in events:
                if isinstance(one, Finish):
                    delta = reader.end(one)
                else:
                    if one.logprob is not None:
                        output.new_logprobs += self._logprobs([one])
                    delta = reader.push(one.text)
                for kind, content in output.add(delta):
                    yield event(kind, content)
        incomplete = reader.reason == "length"
        for kind, content in output.end(incomplete=incomplete):
            yield event(kind, content)
        whole = self._object(output.items, reader, await self._usage(answering))
        self._keep(output, whole)
        kind = "response.incomplete" if incomplete else "response.completed"
        yield event(kind, {"response": whole})


Event = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class _Output:
    """Items of an unfinished response, and the events of their changes."""

    tools: Tools
    custom: str | None = None
    """Custom tool that takes all text of the answer as its input."""
    commits: bool = False
    """Whether reasoning has an `encrypted_content`."""
    items: list[dict[str, Any]] = field(default_factory=list)
    """Reasoning, message and calls, those that have begun."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    new_logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of tokens that no event has carried yet; reasoning and calls drop them."""
    _text: list[str] = field(default_factory=list)
    _open: str | None = None
    """Type of the last item, while it goes on."""

    def add(self, delta: Delta) -> list[Event]:
        """Take in what has become certain."""
        if self.custom is not None:
            self._text.append(delta.text)
            return []
        return [
            *(self._say("reasoning", delta.reasoning) if delta.reasoning else ()),
            *(self._say("message", delta.text) if delta.text else ()),
            *(event for call in delta.calls for event in self._call(call)),
        ]

    def end(self, *, incomplete: bool) -> list[Event]:
        """Finish the last item; an answer without any has an empty message."""
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

    def _say(self, kind: str, text: str) -> Iterator[Event]:
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
            {
                **self._place(),
                "content_index": 0,
                "part": self._part(kind, ""),
            },
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
"""Field of a call that the model writes, and its events' prefix, by the item's type."""
