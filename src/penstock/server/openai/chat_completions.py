"""OpenAI's chat completions.

body ──Form──> Request ──Dialect──> events ──Reader──> deltas ──> one object, or chunks
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.engine.handle import Choice
from penstock.engine.request import Event, Finish, Request, Token
from penstock.server.answers import Delta, Reader, ToolCall, join
from penstock.server.dialect import Dialect
from penstock.server.openai.legacy_calls import as_function
from penstock.server.openai.logprobs import Logprobs
from penstock.server.openai.openai_forms import ChatRequest, grammar_of
from penstock.server.openai.openai_objects import (
    head_of,
    includes_usage,
    last_chunks,
    prompt_progress,
    usage_object,
)
from penstock.server.openai.prompt_scores import check_scores, hold_scores, top_of
from penstock.server.openai.structured import one_grammar
from penstock.server.problems import BadRequest
from penstock.server.service import Service
from penstock.server.sse import data
from penstock.server.tools.call_growth import CallPart, CallParts
from penstock.server.tools.calls import DESCRIBED, CallGrammar, named_header

CHAT = "/v1/chat/completions"
FIRST_DELTA = {"role": "assistant", "content": ""}


class ChatCompletions(Dialect):
    path = CHAT

    def __init__(self, service: Service, logprobs: Logprobs, body: ChatRequest) -> None:
        super().__init__(service, streams=bool(body.stream))
        if body.modalities is not None and body.modalities != ["text"]:
            raise BadRequest("modalities: this server answers with text only", param="modalities")
        if body.top_logprobs is not None and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
        check_scores(body.prompt_logprobs, stream=self.streams)
        self.logprobs = logprobs
        self.body = body
        self.head = head_of(service, "chatcmpl", body.model)
        self.plan = body.plan(service.prompts.format)
        self.prompt: tuple[int, ...] = ()
        self.prediction: tuple[int, ...] = ()
        self.top = top_of(body.prompt_logprobs, service.vocabulary_size)
        """Number of top log-probabilities per prompt token; None for no scores."""
        self.started: set[int] = set()
        self.calls: list[CallParts] = []

    def read(self) -> None:
        prompts = self.service.prompts
        self.prompt = self.body.render(prompts, self.plan)
        if self.body.prediction is not None:
            text = self.body.prediction.text
            self.prediction = prompts.tokens(text, "prediction", special=False)
        if self.top is not None:
            hold_scores([self.prompt], self.top)
        self.headers = named_header(DESCRIBED, prompts.described_tools(self.plan.prompt))

    def binds(self) -> bool:
        form = self.body.response_format
        formed = form is not None and form.type != "text"
        return self.plan.binds() or self.body.structured or formed

    def rules(self) -> CallGrammar:
        prompts, structure = self.service.prompts, self.body.structure()
        inside = prompts.starts_in_reasoning(self.prompt)
        call = self.plan.grammar(prompts.format, inside=inside) or CallGrammar(None)
        if call.grammar and not call.free:
            return call._replace(grammar=one_grammar(call.grammar, structure))
        form = one_grammar(grammar_of(self.body.response_format), structure)
        return call if form is None else call._replace(grammar=form, free=False)

    def requests(self) -> Sequence[Request]:
        body, service = self.body, self.service
        unread = service.prompts.format.unread(self.plan.callable)
        max_tokens = body.max_completion_tokens
        request = body.request(
            service,
            self.prompt,
            sampling=body.sampling(
                service.sampling, logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs or 0
            ),
            max_tokens=body.max_tokens if max_tokens is None else max_tokens,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids or (),
            n=body.n or 1,
            grammar=self.rule.grammar,
            goes_on=body.goes_on,
            reasoning=self.budget(self.prompt),
            prediction=self.prediction,
            ignore_eos=bool(body.ignore_eos),
            prompt_logprobs=self.top,
            silent_tokens=frozenset(unread if body.skip_special_tokens else ()),
        )
        parallel = body.parallel_tool_calls is not False and not body.legacy
        self.readers = [
            Reader(
                service.prompts.format,
                self.plan.callable,
                reasoning=self.in_reasoning,
                parallel=parallel,
            )
            for _ in range(request.n)
        ]
        self.calls = [CallParts() for _ in self.readers]
        return [request]

    async def usage(self) -> dict[str, Any]:
        return usage_object(
            self.answering.usage(),
            cache_write_tokens=await self.service.created_tokens(self.answering),
            reasoning_tokens=self.reasoning_tokens(),
        )

    @property
    def streams_usage(self) -> bool:
        return includes_usage(self.body.stream_options)

    def is_long(self, choices: Sequence[Choice]) -> bool:
        return self.answering.handles[0].prompt_logprobs is not None or super().is_long(choices)

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
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
        whole = {**self.head, "object": "chat.completion", "choices": whole_choices, "usage": usage}
        scores = self.answering.handles[0].prompt_logprobs
        if scores is not None:
            whole["prompt_logprobs"] = self.logprobs.prompt(scores)
        return whole

    def batches(self) -> AsyncIterator[list[Event]]:
        return self.answering.batches(with_progress=bool(self.body.return_progress))

    def progress(self) -> Iterator[bytes]:
        delta = {} if 0 in self.started else dict(FIRST_DELTA)
        self.started.add(0)
        yield self._chunk(self._choice(0, delta, [], None), **prompt_progress(self.answering))

    def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
        for index, (delta, tokens, finish) in self._read_all(events).items():
            content = _delta(delta, self.calls[index])
            if index not in self.started:
                self.started.add(index)
                content = {**FIRST_DELTA, **content}
            if content or tokens:
                yield self._chunk(self._choice(index, content, tokens, None))
            if finish is not None:
                yield self._chunk(self._choice(index, {}, [], self.readers[index].reason))

    def end(self, usage: dict[str, Any]) -> Iterator[bytes]:
        return last_chunks({**self.head, "object": "chat.completion.chunk"}, usage)

    def _chunk(self, choice: dict[str, Any], **progress: Any) -> bytes:
        head = {**self.head, "object": "chat.completion.chunk"}
        if self.streams_usage:
            head["usage"] = None
        return data({**head, "choices": [choice], **progress})

    def _read_all(
        self, events: Iterable[Event]
    ) -> dict[int, tuple[Delta, list[Token], Finish | None]]:
        """Group events by answer: parsed text, tokens with a log-probability, finish event."""
        deltas: dict[int, list[Delta]] = {}
        tokens: dict[int, list[Token]] = {}
        ends: dict[int, Finish] = {}
        for event in events:
            if isinstance(event, Finish):
                ends[event.choice] = event
            elif event.logprob is not None:
                tokens.setdefault(event.choice, []).append(event)
            deltas.setdefault(event.choice, []).append(self.delta(event))
        return {
            index: (join(parts), tokens.get(index, []), ends.get(index))
            for index, parts in deltas.items()
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": self.logprobs.chat(tokens), "refusal": None}

    def _choice(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Token], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        if self.body.logprobs:
            choice["logprobs"] = self._logprobs(tokens) if tokens else None
        return as_function(choice, "delta") if self.body.legacy else choice


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
    if not part.begins:
        return {"index": part.index, "function": {"arguments": part.grown}}
    return {"index": part.index, **_call(replace(part.call, arguments=part.grown))}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
