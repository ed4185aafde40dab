"""OpenAI's chat: one request from its body to the object, or the chunks, of its answers.

body ──Form──> Request ──Service──> events ──Reader──> deltas ──> one object, or chunks
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.handle import Choice
from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.request import Event, Finish, Token
from penstock.server.active_request import ActiveRequest
from penstock.server.allowed_tools import ToolPlan
from penstock.server.answers import Delta, Reader, ToolCall, join
from penstock.server.call_growth import CallPart, CallParts
from penstock.server.calls import unenforced_headers
from penstock.server.chat_body import ChatBody
from penstock.server.disconnect import until_gone
from penstock.server.forms import grammar_of
from penstock.server.legacy_calls import as_function
from penstock.server.logprobs import Logprobs
from penstock.server.openai_objects import DONE, Json, head_of, prompt_progress, usage_object
from penstock.server.problems import BadRequest
from penstock.server.prompt_scores import check_scores, hold_scores, top_of
from penstock.server.service import Service
from penstock.server.sse import Stream, data
from penstock.server.structured import one_grammar
from penstock.server.workers import LONG_BYTES

CHAT = "/v1/chat/completions"
FIRST_DELTA = {"role": "assistant", "content": ""}
"""First part of an answer in a stream."""


class ChatCompletions:
    """One request for chat."""

    def __init__(self, service: Service, logprobs: Logprobs, body: ChatBody) -> None:
        self.service = service
        self.logprobs = logprobs
        self.body = body
        self.head = head_of(service, "chatcmpl")
        self.headers: dict[str, str] = {}
        """Headers of the response."""
        self.readers: list[Reader] = []
        self.in_reasoning = False
        """Whether the prompt ends inside the model's reasoning."""
        self.prediction: tuple[int, ...] = ()
        """Tokens of the text that is expected as the answer."""
        self.top = top_of(body.prompt_logprobs, service.vocabulary_size)
        """Likeliest tokens that are reported beside each of the prompt's tokens, or None."""
        self.free = False
        """Whether the grammar leaves room for any text."""

    async def respond(self, http: HttpRequest) -> Response:
        """Hand the request in, and answer whole or in chunks."""
        answering = await self._open(http)
        if self.body.stream:
            return Stream(self.service, CHAT, answering, self._chunks(answering), self.headers)
        async with answering:
            choices = await answering.result(http)
            usage = await self._usage(answering)
            scores = answering.handles[0].prompt_logprobs
            if scores is None and sum(len(choice.text) for choice in choices) <= LONG_BYTES:
                return self._written(choices, usage, None)
            return await self.service.workers.write(self._written, choices, usage, scores)

    def _written(
        self, choices: Sequence[Choice], usage: dict[str, Any], scores: PromptLogprobs | None
    ) -> Response:
        """Return the whole response; slow for long ones."""
        whole = self._whole(choices, usage)
        if scores is not None:
            whole["prompt_logprobs"] = self.logprobs.prompt(scores)
        return Json(whole, headers=self.headers)

    async def _open(self, http: HttpRequest) -> ActiveRequest:
        body, service = self.body, self.service
        if body.modalities is not None and body.modalities != ["text"]:
            raise BadRequest("modalities: this server answers with text only", param="modalities")
        if body.top_logprobs is not None and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
        check_scores(body.prompt_logprobs, stream=bool(body.stream))
        plan = body.plan(service.prompts.format)
        prompt, grammar = await until_gone(http, service.work(self._read, plan))
        unread = service.prompts.format.unread(plan.callable)
        most = body.max_completion_tokens
        request = body.request(
            service,
            prompt,
            sampling=body.sampling(
                service.sampling,
                logprobs=bool(body.logprobs),
                top_logprobs=body.top_logprobs or 0,
            ),
            max_tokens=body.max_tokens if most is None else most,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids or (),
            n=body.n or 1,
            grammar=grammar,
            prediction=self.prediction,
            ignore_eos=bool(body.ignore_eos),
            prompt_logprobs=self.top,
            silent_tokens=unread if body.skip_special_tokens else (),
        )
        # A grammar leaves no room for reasoning, whatever the template has opened.
        open_text = grammar is None or self.free
        self.in_reasoning = open_text and service.prompts.starts_in_reasoning(prompt)
        parallel = body.parallel_tool_calls is not False and not body.legacy
        self.readers = [
            Reader(
                service.prompts.format,
                plan.callable,
                reasoning=self.in_reasoning,
                parallel=parallel,
            )
            for _ in range(request.n)
        ]
        return await service.open(request, CHAT)

    def _read(self, plan: ToolPlan) -> tuple[tuple[int, ...], str | None]:
        """Return the prompt's tokens and the answer's grammar; in a worker thread."""
        prompt = self.body.render(self.service.prompts, plan)
        if self.body.prediction is not None:
            text = self.body.prediction.text
            self.prediction = self.service.prompts.encode_answer(text, "prediction")
        if self.top is not None:
            hold_scores([prompt], self.top)
        prompts, structure = self.service.prompts, self.body.structure()
        call = plan.grammar(prompts.format, inside=prompts.starts_in_reasoning(prompt))
        if call is not None:
            self.headers = unenforced_headers(call.unenforced)
        if call is not None and call.grammar and not call.free:
            return prompt, one_grammar(call.grammar, structure)
        wanted = one_grammar(grammar_of(self.body.response_format), structure)
        if call is None or wanted is not None:
            return prompt, wanted
        self.free = call.free
        return prompt, call.grammar

    async def _usage(self, answering: ActiveRequest) -> dict[str, Any]:
        """Return the usage of all answers, which have ended."""
        choices = [choice for handle in answering.handles for choice in handle.choices]
        count = self.service.prompts.reasoning_tokens
        return usage_object(
            answering.usage(),
            cache_write_tokens=await self.service.created_tokens(answering),
            reasoning_tokens=sum(count(c.tokens, inside=self.in_reasoning) for c in choices),
        )

    def _whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        whole_choices = [
            {
                "index": index,
                "message": _message(reader.read(choice)),
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": reader.reason,
            }
            for index, (reader, choice) in enumerate(zip(self.readers, choices, strict=True))
        ]
        if self.body.legacy:
            whole_choices = [as_function(choice, "message") for choice in whole_choices]
        return {**self.head, "object": "chat.completion", "choices": whole_choices, "usage": usage}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": self.logprobs.chat(tokens), "refusal": None}

    async def _chunks(self, answering: ActiveRequest) -> AsyncIterator[bytes]:
        """Write the answers as they come; tokens that arrive together are one chunk."""
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        head = {**self.head, "object": "chat.completion.chunk"}
        if with_usage:
            head["usage"] = None
        started: set[int] = set()
        calls = [CallParts() for _ in self.readers]
        async for events in answering.batches(with_progress=bool(self.body.return_progress)):
            if not events:
                choice = self._choice(0, {} if 0 in started else dict(FIRST_DELTA), [], None)
                started.add(0)
                yield data({**head, "choices": [choice], **prompt_progress(answering)})
            for index, (delta, tokens, finish) in _read_all(events, self.readers).items():
                content = _delta(delta, calls[index])
                if index not in started:
                    started.add(index)
                    content = {**FIRST_DELTA, **content}
                if content or tokens:
                    yield data({**head, "choices": [self._choice(index, content, tokens, None)]})
                if finish is not None:
                    reason = self.readers[index].reason
                    yield data({**head, "choices": [self._choice(index, {}, [], reason)]})
        if with_usage:
            yield data({**head, "choices": [], "usage": await self._usage(answering)})
        yield DONE

    def _choice(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Token], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        if self.body.logprobs:
            choice["logprobs"] = self._logprobs(tokens) if tokens else None
        return as_function(choice, "delta") if self.body.legacy else choice


def _read_all(
    events: Iterable[Event], readers: Sequence[Reader]
) -> dict[int, tuple[Delta, list[Token], Finish | None]]:
    """Sum up events by answer: text that became certain, tokens with a log-probability, the end."""
    deltas: dict[int, list[Delta]] = {}
    tokens: dict[int, list[Token]] = {}
    ends: dict[int, Finish] = {}
    for event in events:
        reader = readers[event.choice]
        if isinstance(event, Finish):
            ends[event.choice] = event
            delta = reader.end(event)
        else:
            if event.logprob is not None:
                tokens.setdefault(event.choice, []).append(event)
            delta = reader.push(event.text)
        deltas.setdefault(event.choice, []).append(delta)
    return {
        index: (join(parts), tokens.get(index, []), ends.get(index))
        for index, parts in deltas.items()
    }


def _message(reader: Reader) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reader.text}
    message |= {"refusal": None, "annotations": []}
    if reader.calls:
        message["content"] = reader.text or None
        message["tool_calls"] = [_call(call) for call in reader.calls]
    if reader.reasoning:
        message["reasoning_content"] = reader.reasoning
    return message


def _delta(delta: Delta, calls: CallParts) -> dict[str, Any]:
    """Write a delta; `calls` are those of its answer so far."""
    chunk: dict[str, Any] = {}
    if delta.text:
        chunk["content"] = delta.text
    if delta.reasoning:
        chunk["reasoning_content"] = delta.reasoning
    parts = [part for part in calls.in_order(delta) if isinstance(part, CallPart)]
    if written := [_call_part(part) for part in parts if part.begins or part.grown]:
        chunk["tool_calls"] = written
    return chunk


def _call_part(part: CallPart) -> dict[str, Any]:
    """Write a part of a call; the first has its id and name."""
    if not part.begins:
        return {"index": part.index, "function": {"arguments": part.grown}}
    return {"index": part.index, **_call(replace(part.call, arguments=part.grown))}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
