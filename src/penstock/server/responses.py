"""OpenAI's `/v1/responses`, for text and calls of tools.

response.created, in_progress
  output_item.added ─ content_part.added ─ output_text.delta ... done ─ ... done
  output_item.added ─ function_call_arguments.delta, done ─ output_item.done
response.completed | response.incomplete | error ─ response.failed

`response_tools` has the tools, `response_items` the input, `response_store` the kept responses.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.request import Finish, Token
from penstock.server.active_request import ActiveRequest
from penstock.server.allowed_tools import ToolPlan
from penstock.server.answers import Delta, Reader
from penstock.server.calls import left_out_headers, unenforced_headers
from penstock.server.disconnect import until_gone
from penstock.server.forms import grammar_for
from penstock.server.logprobs import Logprobs
from penstock.server.openai_objects import ERRORS, STREAMED, Json, OpenAIError
from penstock.server.problems import BadRequest, NotFound, Problem, problem_of
from penstock.server.prompts import Prompts
from penstock.server.reasoning_effort import effort_switches
from penstock.server.request_body import reading_aside
from penstock.server.response_forms import (
    DeletedResponse,
    InputItems,
    InputTokens,
    InputTokensRequest,
    ResponseObject,
    ResponsesRequest,
)
from penstock.server.response_items import Conversation, items_of, page_of, resolved
from penstock.server.response_output import ResponseOutput
from penstock.server.response_settings import response_error, settings_object
from penstock.server.response_store import ResponseStore
from penstock.server.response_tools import Tools, flat_name
from penstock.server.service import Service
from penstock.server.sse import Stream, data

logger = logging.getLogger(__name__)

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""Name in `include` that asks for log-probabilities."""
SEALED_REASONING = "reasoning.encrypted_content"
"""Name in `include` that asks for sealed reasoning, which clients send back unread."""
UNSERVED = {
    "conversation": "send the whole input, or previous_response_id",
    "background": "leave it out, and stream the answer if it takes long",
}
"""Fields that are refused, and the remedy."""


def router(service: Service) -> APIRouter:
    """Return the routes of responses."""
    routes = APIRouter(tags=["openai"], responses=ERRORS, route_class=reading_aside(service))
    logprobs = Logprobs(service.prompts)

    @routes.post(PATH, response_model=ResponseObject, responses=STREAMED)
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        """Answer an input of texts, calls and their outputs."""
        return await _Responses(service, logprobs, body).respond(http)

    @routes.post(f"{PATH}/input_tokens", response_model=InputTokens)
    async def input_tokens(body: InputTokensRequest, http: HttpRequest) -> Response:
        """Count the tokens of an input; nothing is computed."""
        tokens = await until_gone(http, service.work(_tokens, service, body))
        return Json({"object": "response.input_tokens", "input_tokens": len(tokens)})

    @routes.post(f"{PATH}/compact", response_model=None, responses={404: {"model": OpenAIError}})
    async def compact() -> Response:
        """Refuse: this server writes no summaries of conversations."""
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
        """List the input of a response that was kept, a page at a time."""
        items = service.stored.input_items(cache_salt, response_id)
        return Json(page_of(items, limit=limit, newest_first=order == "desc", after=after))

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


def _tokens(service: Service, body: ResponsesRequest) -> tuple[int, ...]:
    """Return the tokens of a request's prompt; in a worker thread."""
    return ResponseInput.of(body, service.stored).render(body, service.prompts)


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """Content of a request, read and resolved."""

    items: list[dict[str, Any]]
    """Items of the conversation, with the stored ones and without references."""
    messages: list[dict[str, Any]]
    """Messages in the form of chat."""
    tools: Tools
    left_out: list[str]
    """Types of items that no model can read."""

    @classmethod
    def of(cls, body: ResponsesRequest, store: ResponseStore | None = None) -> ResponseInput:
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
        plan = ToolPlan.of(prompts.format, self.tools.chat, body.tool_choice)
        salt = body.cache_salt or ""
        effort = body.reasoning.effort if body.reasoning is not None else None
        switches = effort_switches(effort, prompts)
        return prompts.render(self.messages, plan.prompt, salt=salt, **switches)


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
        self.free = False
        """Whether the grammar leaves room for any text."""
        self.parallel = body.parallel_tool_calls is not False
        self.wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        self.input = ResponseInput([], [], Tools(), [])
        self.sampling = service.sampling
        self.headers: dict[str, str] = {}
        """Headers of the response, beside the one for left-out items and tools."""
        self.custom: str | None = None
        """Custom tool whose call is demanded: the whole answer is its input."""

    async def respond(self, http: HttpRequest) -> Response:
        """Hand the request in, and answer whole or by events."""
        answering, reader = await self._open(http)
        headers = left_out_headers([*self.input.tools.left_out, *self.input.left_out])
        headers |= self.headers
        if self.body.stream:
            return Stream(
                self.service, PATH, answering, self._with_errors(answering, reader), headers
            )
        async with answering:
            (choice,) = await answering.result(http)
            reader.read(choice)
            output = self._output()
            output.add(Delta(reasoning=reader.reasoning))
            output.new_logprobs = self._logprobs(choice.logprobs)
            output.add(Delta(reader.text, calls=tuple(reader.calls)))
            status = _status(reader)
            output.end(incomplete=status == "incomplete")
            whole = self._object(output.items, status, await self._usage(answering))
            self._keep(output, whole)
            return Json(whole, headers=headers)

    def _output(self) -> ResponseOutput:
        commits = SEALED_REASONING in (self.body.include or ())
        return ResponseOutput(self.input.tools, custom=self.custom, commits=commits)

    def _keep(self, output: ResponseOutput, whole: dict[str, Any]) -> None:
        """Keep the conversation for a request that goes on from it."""
        if self.body.store is not False:
            items = [*self.input.items, *output.items]
            self.service.stored.put(self.body.cache_salt or "", self.id, items, whole)

    async def _open(self, http: HttpRequest) -> tuple[ActiveRequest, Reader]:
        body, service = self.body, self.service
        for name, instead in UNSERVED.items():
            if getattr(body, name):
                raise BadRequest(
                    f"{name} is not served; {instead}", param=name, code="unsupported_parameter"
                )
        prompt, grammar = await until_gone(http, service.work(self._read))
        self.sampling = body.sampling(
            service.sampling,
            logprobs=self.wants_logprobs,
            top_logprobs=body.top_logprobs or 0,
        )
        request = body.request(
            service,
            prompt,
            sampling=self.sampling,
            max_tokens=body.max_output_tokens,
            grammar=grammar,
        )
        # A grammar leaves no room for reasoning, whatever the template has opened.
        open_text = grammar is None or self.free
        self.in_reasoning = open_text and service.prompts.starts_in_reasoning(prompt)
        tools = None if self.custom else self._plan(body.tool_choice).callable
        reader = Reader(
            service.prompts.format, tools, reasoning=self.in_reasoning, parallel=self.parallel
        )
        return await service.open(request, PATH), reader

    def _read(self) -> tuple[tuple[int, ...], str | None]:
        """Return the prompt's tokens and the answer's grammar; in a worker thread."""
        self.input = ResponseInput.of(self.body, self.service.stored)
        prompt = self.input.render(self.body, self.service.prompts)
        calls = self._calls(prompt)
        wanted = self._grammar() if calls is None or self.free else None
        self.free = self.free and wanted is None
        return prompt, wanted or calls

    def _calls(self, prompt: tuple[int, ...]) -> str | None:
        """Return the grammar of the calls; a demanded custom tool's is its input's grammar."""
        choice, prompts = self.body.tool_choice, self.service.prompts
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            name = flat_name(str(choice.get("name")), choice.get("namespace"))
            tool = self.input.tools.offered.get(name)
            if tool is not None and tool.grammar is not None:
                self.custom = name
                return tool.grammar
            choice = {"type": "function", "name": name}
        inside = prompts.starts_in_reasoning(prompt)
        call = self._plan(choice).grammar(prompts.format, self.input.tools.inputs, inside=inside)
        if call is None:
            return None
        self.headers = unenforced_headers(call.unenforced)
        self.free = call.free
        return call.grammar

    def _plan(self, choice: str | dict[str, Any] | None) -> ToolPlan:
        """Return the tools of the prompt, and those that may be called."""
        plan = ToolPlan.of(self.service.prompts.format, self.input.tools.chat, choice)
        return plan.keeping(self.input.tools.strict)

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
        status: str = "in_progress",
        usage: dict[str, Any] | None = None,
        error: Problem | None = None,
    ) -> dict[str, Any]:
        """Return the response, with the settings that it was made with."""
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else response_error(error),
            "incomplete_details": cut_off,
            "model": self.service.model_name,
            "output": items,
            "usage": usage,
            "parallel_tool_calls": self.parallel,
            **settings_object(self.body, self.sampling),
        }

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        return data({"type": kind, "sequence_number": next(self.numbers), **content}, kind)

    async def _with_errors(self, answering: ActiveRequest, reader: Reader) -> AsyncIterator[bytes]:
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
            whole = self._object([], "failed", error=problem)
            yield self._event("response.failed", {"response": whole})

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
        status = _status(reader)
        for kind, content in output.end(incomplete=status == "incomplete"):
            yield event(kind, content)
        whole = self._object(output.items, status, await self._usage(answering))
        self._keep(output, whole)
        yield event(f"response.{status}", {"response": whole})


def _status(reader: Reader) -> str:
    """Return the state of an answer that has ended."""
    return "incomplete" if reader.reason == "length" else "completed"
