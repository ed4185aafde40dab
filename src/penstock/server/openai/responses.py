"""OpenAI's `/v1/responses`, for text and tool calls.

response.created, in_progress
  output_item.added ─ content_part.added ─ output_text.delta ... done ─ ... done
  output_item.added ─ function_call_arguments.delta, done ─ output_item.done
response.completed | response.incomplete | error ─ response.failed

`response_tools` converts tools, `response_items` the input; `response_store` keeps responses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.handle import Choice
from penstock.engine.request import Event, Request, Sampling, Token
from penstock.server.answers import Delta, Reader
from penstock.server.dialect import Dialect
from penstock.server.disconnect import until_gone
from penstock.server.forms import grammar_for
from penstock.server.openai.logprobs import Logprobs
from penstock.server.openai.openai_objects import ERRORS, STREAMED, Json, OpenAIError
from penstock.server.openai.response_forms import (
    DeletedResponse,
    InputItems,
    InputTokens,
    InputTokensRequest,
    ResponseObject,
    ResponsesRequest,
)
from penstock.server.openai.response_input import ResponseInput
from penstock.server.openai.response_items import page_of
from penstock.server.openai.response_output import ResponseOutput
from penstock.server.openai.response_tools import Tools
from penstock.server.problems import BadRequest, NotFound, Problem
from penstock.server.request_body import reading_aside
from penstock.server.service import Service
from penstock.server.sse import data
from penstock.server.tools.allowed_tools import ToolPlan, flat_name
from penstock.server.tools.calls import DESCRIBED, LEFT_OUT, CallGrammar, named_header

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
FUNCTION = {"description": None, "parameters": None, "strict": None}
SEALED_REASONING = "reasoning.encrypted_content"
"""Value of `include` that asks for `encrypted_content`, which clients send back."""
UNSERVED = {
    "conversation": "send the whole input, or previous_response_id",
    "background": "leave it out, and stream the answer if it takes long",
}


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["openai"], responses=ERRORS, route_class=reading_aside(service))
    logprobs = Logprobs(service.prompts)

    @routes.post(PATH, response_model=ResponseObject, responses=STREAMED)
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        """Answer an input of messages, tool calls and their outputs."""
        return await Responses(service, logprobs, body).respond(http)

    @routes.post(f"{PATH}/input_tokens", response_model=InputTokens)
    async def input_tokens(body: InputTokensRequest, http: HttpRequest) -> Response:
        """Count the tokens of an input, without running the model."""
        tokens = await until_gone(http, service.work(_tokens, service, body))
        return Json({"object": "response.input_tokens", "input_tokens": len(tokens)})

    @routes.post(f"{PATH}/compact", response_model=None, responses={404: {"model": OpenAIError}})
    async def compact() -> Response:
        """Return 404, since this server does not compact conversations."""
        raise NotFound(
            "conversations are not compacted here; send the whole input, or a summary of it",
            code="unsupported_endpoint",
        )

    @routes.get(f"{PATH}/{{response_id}}/input_items", response_model=InputItems)
    async def input_items(
        response_id: str,
        cache_salt: str = "",
        limit: int = Query(20, ge=1, le=100),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Return a page of the input items of a stored response."""
        items = service.stored.input_items(cache_salt, response_id)
        return Json(page_of(items, limit=limit, newest_first=order == "desc", after=after))

    @routes.get(f"{PATH}/{{response_id}}", response_model=ResponseObject)
    async def response(response_id: str, cache_salt: str = "") -> Response:
        """Return a stored response; requires the `cache_salt` of its request."""
        return Json(service.stored.response(cache_salt, response_id))

    @routes.delete(f"{PATH}/{{response_id}}", response_model=DeletedResponse)
    async def delete(response_id: str, cache_salt: str = "") -> Response:
        """Delete a stored response."""
        service.stored.delete(cache_salt, response_id)
        return Json({"id": response_id, "object": "response", "deleted": True})

    return routes


def _tokens(service: Service, body: ResponsesRequest) -> tuple[int, ...]:
    prompts = service.prompts
    images = prompts.images is not None
    return ResponseInput.of(body, service.stored, images=images).render(body, prompts)


class Responses(Dialect):
    path = PATH

    def __init__(self, service: Service, logprobs: Logprobs, body: ResponsesRequest) -> None:
        super().__init__(service, streams=bool(body.stream))
        for name, instead in UNSERVED.items():
            if getattr(body, name):
                raise BadRequest(
                    f"{name} is not supported; {instead}", param=name, code="unsupported_parameter"
                )
        self.logprobs = logprobs
        self.body = body
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.numbers = iter(range(2**31))
        self.prompt: tuple[int, ...] = ()
        self.parallel = body.parallel_tool_calls is not False
        self.wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        self.input = ResponseInput([], [], Tools(), [])
        self.output = ResponseOutput(self.input.tools)
        self.sampling = service.sampling
        self.custom: str | None = None
        """Custom tool required by `tool_choice`, whose input is the whole answer."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,), (reader,), output = choices, self.readers, self.output
        reader.read(choice)
        output.add(Delta(reasoning=reader.reasoning))
        output.new_logprobs = self._logprobs(choice.logprobs)
        output.add(Delta(reader.text, calls=tuple(reader.calls)))
        status = _status(reader)
        output.end(incomplete=status == "incomplete")
        return self._kept(self._object(output.items, status, usage))

    def _kept(self, whole: dict[str, Any]) -> dict[str, Any]:
        if self.body.store is not False:
            items = [*self.input.items, *self.output.items]
            self.service.stored.put(self.body.cache_salt or "", self.id, items, whole)
        return whole

    def read(self) -> None:
        prompts, images = self.service.prompts, self.service.prompts.images is not None
        self.input = ResponseInput.of(self.body, self.service.stored, images=images)
        tools = self.input.tools
        self.prompt = self.input.render(self.body, prompts)
        self.headers = named_header(LEFT_OUT, [*tools.left_out, *self.input.left_out])
        self.headers |= named_header(DESCRIBED, prompts.described_tools(tools.chat))

    def binds(self) -> bool:
        choice, text = self.body.tool_choice, self.body.text
        if text is not None and text.format is not None and text.format.type != "text":
            return True
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            return True
        return self._plan(choice).binds(self.input.tools.inputs)

    def rules(self) -> CallGrammar:
        call = self._calls()
        form = self._grammar() if call.grammar is None or call.free else None
        return call if form is None else call._replace(grammar=form, free=False)

    def requests(self) -> Sequence[Request]:
        body, service = self.body, self.service
        self.sampling = body.sampling(
            service.sampling, logprobs=self.wants_logprobs, top_logprobs=body.top_logprobs or 0
        )
        request = body.request(
            service,
            self.prompt,
            sampling=self.sampling,
            max_tokens=body.max_output_tokens,
            grammar=self.rule.grammar,
            reasoning=self.budget(self.prompt),
        )
        tools = None if self.custom else self._plan(body.tool_choice).callable
        form, inside = service.prompts.format, self.in_reasoning
        self.readers = [Reader(form, tools, reasoning=inside, parallel=self.parallel)]
        commits = SEALED_REASONING in (body.include or ())
        self.output = ResponseOutput(self.input.tools, custom=self.custom, commits=commits)
        return [request]

    def _calls(self) -> CallGrammar:
        choice, prompts = self.body.tool_choice, self.service.prompts
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            name = flat_name(str(choice.get("name")), choice.get("namespace"))
            tool = self.input.tools.offered.get(name)
            if tool is not None and tool.grammar is not None:
                self.custom = name
                return CallGrammar(tool.grammar)
            choice = {"type": "function", "name": name}
        inside = prompts.starts_in_reasoning(self.prompt)
        call = self._plan(choice).grammar(prompts.format, self.input.tools.inputs, inside=inside)
        return call or CallGrammar(None)

    def _plan(self, choice: str | dict[str, Any] | None) -> ToolPlan:
        plan = ToolPlan.of(self.service.prompts.format, self.input.tools.chat, choice)
        return plan.keeping(self.input.tools.strict)

    def _grammar(self) -> str | None:
        text_format = self.body.text.format if self.body.text is not None else None
        if text_format is None or text_format.type == "text":
            return None
        if text_format.type == "json_object":
            return grammar_for(None, "text.format")
        if text_format.type != "json_schema":
            raise BadRequest(
                "text.format.type can be text, json_object or json_schema", param="text.format.type"
            )
        if text_format.schema_ is None:
            raise BadRequest("text.format.schema is missing", param="text.format.schema")
        return grammar_for(text_format.schema_, "text.format.schema")

    def _logprobs(self, tokens: list[Token]) -> list[dict[str, Any]]:
        return self.logprobs.chat(tokens) if self.wants_logprobs else []

    async def usage(self) -> dict[str, Any]:
        usage = self.answering.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": await self.service.created_tokens(self.answering),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens()},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _object(
        self,
        items: list[dict[str, Any]],
        status: str = "in_progress",
        usage: dict[str, Any] | None = None,
        error: Problem | None = None,
    ) -> dict[str, Any]:
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else _error(error),
            "incomplete_details": cut_off,
            "model": self.service.shown_name(self.body.model),
            "output": items,
            "usage": usage,
            "parallel_tool_calls": self.parallel,
            **_settings(self.body, self.sampling),
        }

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        return data({"type": kind, "sequence_number": next(self.numbers), **content}, kind)

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._object([])})

    def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in events:
            if isinstance(event, Token) and event.logprob is not None:
                self.output.new_logprobs += self._logprobs([event])
            for kind, content in self.output.add(self.delta(event)):
                yield self._event(kind, content)

    def end(self, usage: dict[str, Any]) -> Iterator[bytes]:
        """Yield the end of the last item and the whole response; store the response."""
        status = _status(self.readers[0])
        for kind, content in self.output.end(incomplete=status == "incomplete"):
            yield self._event(kind, content)
        whole = self._kept(self._object(self.output.items, status, usage))
        yield self._event(f"response.{status}", {"response": whole})

    def failure(self, problem: Problem) -> Iterator[bytes]:
        error = {"code": problem.code, "message": problem.message, "param": problem.param}
        yield self._event("error", error)
        yield self._event(
            "response.failed", {"response": self._object([], "failed", error=problem)}
        )


def _status(reader: Reader) -> str:
    return "incomplete" if reader.reason == "length" else "completed"


def _settings(body: ResponsesRequest, sampling: Sampling) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": body.store is not False,
        "background": False,
        "service_tier": "default",
        "truncation": "disabled",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": sampling.top_logprobs,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {**FUNCTION, **tool} if tool.get("type") == "function" else tool
            for tool in body.tools or ()
        ],
    }


def _error(problem: Problem) -> dict[str, Any]:
    return {"code": problem.code or "server_error", "message": problem.message}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_unset=True)
