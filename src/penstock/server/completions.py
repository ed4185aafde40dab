"""OpenAI's completions: texts that go on, with the log-probabilities of prompts if asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.handle import Choice, Handle
from penstock.engine.request import Event, Finish, Token
from penstock.server.active_request import ActiveRequest
from penstock.server.disconnect import until_gone
from penstock.server.forms import MOST_PROMPTS, CompletionRequest
from penstock.server.logprobs import Logprobs
from penstock.server.openai_objects import DONE, Json, head_of, prompt_progress, usage_object
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import hold_text
from penstock.server.prompt_scores import check_scores, hold_scores, top_of
from penstock.server.service import Service
from penstock.server.sse import Stream, data
from penstock.server.structured import Structured
from penstock.server.workers import LONG_BYTES

COMPLETIONS = "/v1/completions"
Part: TypeAlias = tuple[str, list[Token], str | None]
"""New text of an answer, tokens with a log-probability, and the reason of its end."""


class CompletionBody(CompletionRequest, Structured):
    """The body of `POST /v1/completions`, with vLLM's fields for structured answers."""


class Completions:
    """One request for continuations, of one prompt or several."""

    def __init__(self, service: Service, logprobs: Logprobs, body: CompletionBody) -> None:
        self.service = service
        self.logprobs = logprobs
        self.body = body
        self.head = {**head_of(service, "cmpl"), "object": "text_completion"}
        self.n = body.n or 1
        self.echoes: list[str] = []
        """Text in front of the continuations, one for each prompt."""
        self.grammar: str | None = None
        """Grammar of the continuations."""
        self.top = self.prompt_top = top_of(body.prompt_logprobs, service.vocabulary_size)
        """Likeliest tokens that the engine reports beside each of the prompts' tokens, or None."""
        if body.echo and body.logprobs is not None:
            self.top = max(body.logprobs, self.top or 0)

    async def respond(self, http: HttpRequest) -> Response:
        """Hand the request in, and answer whole or in chunks."""
        answering = await self._open(http)
        if self.body.stream:
            return Stream(self.service, COMPLETIONS, answering, self._chunks(answering))
        async with answering:
            choices = await answering.result(http)
            write = partial(self._written, answering, choices)
            return await self.service.workers.write(write) if self._is_long else write()

    @property
    def _is_long(self) -> bool:
        """Whether the response is too long to be written in the event loop."""
        return self.top is not None or self.n * sum(map(len, self.echoes)) > LONG_BYTES

    def _written(self, answering: ActiveRequest, choices: Sequence[Choice]) -> Response:
        return Json(self._whole(answering, choices))

    async def _open(self, http: HttpRequest) -> ActiveRequest:
        body = self.body
        if body.suffix:
            raise BadRequest("suffix: text is continued at its end only", param="suffix")
        if body.best_of is not None and body.best_of != self.n:
            raise BadRequest(
                f"best_of {body.best_of} must equal n, which is {self.n}: every generated answer "
                f"is returned",
                param="best_of",
            )
        check_scores(body.prompt_logprobs, stream=bool(body.stream))
        prompts = await until_gone(http, self.service.work(self._read))
        sampling = body.sampling(
            self.service.sampling,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        )
        special = self.service.prompts.format.marks.special.values()
        requests = [
            body.request(
                self.service,
                prompt,
                sampling=sampling,
                max_tokens=body.max_tokens,
                stop=body.stop,
                stop_token_ids=body.stop_token_ids or (),
                n=self.n,
                goes_on=True,
                grammar=self.grammar,
                ignore_eos=bool(body.ignore_eos),
                prompt_logprobs=self.top,
                silent_tokens=special if body.skip_special_tokens else (),
            )
            for prompt in prompts
        ]
        return await self.service.open_all(requests, COMPLETIONS)

    def _read(self) -> list[tuple[int, ...]]:
        """Return the tokens of the prompts; in a worker thread."""
        given = self.body.prompt
        texts_or_tokens: list[Any] = [given] if isinstance(given, str) else list(given)
        if texts_or_tokens and isinstance(texts_or_tokens[0], int):
            texts_or_tokens = [texts_or_tokens]
        if not 0 < len(texts_or_tokens) <= MOST_PROMPTS:
            raise BadRequest(f"prompt: 1 to {MOST_PROMPTS} prompts", param="prompt")
        prompts = self.service.prompts
        read = [
            prompts.encode(one) if isinstance(one, str) else tuple(one) for one in texts_or_tokens
        ]
        for tokens in read:
            if not tokens:
                raise BadRequest("prompt has no tokens", param="prompt")
            self.service.check_tokens(tokens)
        if self.top is not None:
            hold_scores(read, self.top, self.n)
        self.grammar = self.body.structure()
        if self.body.echo:
            self.echoes = [
                one if isinstance(one, str) else prompts.text(one) for one in texts_or_tokens
            ]
            hold_text(self.n * sum(map(len, self.echoes)))
        else:
            self.echoes = [""] * len(read)
        return read

    def _whole(self, answering: ActiveRequest, choices: Sequence[Choice]) -> dict[str, Any]:
        text_choices: list[dict[str, Any]] = []
        for index, choice in enumerate(choices):
            assert choice.finish is not None
            tokens = [*self._echoed(answering, index), *choice.logprobs]
            if choice.finish.end_token is not None:  # as vLLM counts it
                tokens.append(choice.finish.end_token)
            text_choices.append(
                {
                    "index": index,
                    "text": self.echoes[index // self.n] + choice.text,
                    "logprobs": self._logprobs(tokens, 0),
                    "finish_reason": choice.finish.reason,
                }
            )
            scores = answering.handles[index // self.n].prompt_logprobs
            if scores is not None and self.prompt_top is not None:
                written = self.logprobs.prompt(scores, self.prompt_top)
                text_choices[-1]["prompt_logprobs"] = written
        usage = usage_object(answering.usage())
        return {**self.head, "choices": text_choices, "usage": usage}

    def _echoed(self, answering: ActiveRequest, index: int) -> list[Token]:
        """Return the tokens of an answer's prompt, if they are part of its log-probabilities."""
        scores = answering.handles[index // self.n].prompt_logprobs
        if scores is None or not self.body.echo or self.body.logprobs is None:
            return []
        return self.logprobs.echoed(scores, self.body.logprobs)

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        return self.logprobs.completion(tokens, offset)

    async def _scored(self, answering: ActiveRequest) -> AsyncIterator[list[Event]]:
        """Yield events; those of a prompt wait until it has its log-probabilities.

        The first answer reads them. Another may find the prompt in the cache, and begin before it.
        """
        early: list[Event] = []
        async for events in answering.batches(with_progress=bool(self.body.return_progress)):
            if not events:
                yield events
                continue
            scored = [_has_scores(handle) for handle in answering.handles]  # while others read
            begun = [(event, scored[event.choice // self.n]) for event in (*early, *events)]
            early = [event for event, ready in begun if not ready]
            if len(early) < len(begun):
                yield [event for event, ready in begun if ready]
        if early:
            yield early

    async def _chunks(self, answering: ActiveRequest) -> AsyncIterator[bytes]:
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        head = {**self.head, "usage": None} if with_usage else self.head
        offsets: dict[int, int] = {}
        async for events in self._scored(answering):
            if not events:
                choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
                yield data({**head, "choices": [choice], **prompt_progress(answering)})
            for index, part in _sum_up(events).items():
                write = partial(self._chunk, head, answering, index, part, offsets.get(index))
                long = index not in offsets and self._is_long
                chunk, grown = await self.service.workers.write(write) if long else write()
                offsets[index] = offsets.get(index, 0) + grown
                if chunk:
                    yield chunk
        if with_usage:
            yield data({**head, "choices": [], "usage": usage_object(answering.usage())})
        yield DONE

    def _chunk(
        self, head: dict[str, Any], answering: ActiveRequest, index: int, part: Part, at: int | None
    ) -> tuple[bytes, int]:
        """Write a chunk of an answer, and return it with the characters of its text.

        Args:
            head: first fields of the chunk.
            answering: the request.
            index: number of the answer.
            part: the new text of it.
            at: characters of its text so far; None in its first chunk, which has the echo.
        """
        text, tokens, reason = part
        if at is None:
            text = self.echoes[index // self.n] + text
            tokens = [*self._echoed(answering, index), *tokens]
        if not (text or tokens or reason):
            return b"", 0
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens, at or 0),
            "finish_reason": reason,
        }
        return data({**head, "choices": [choice]}), len(text)


def _has_scores(handle: Handle) -> bool:
    """Tell whether a prompt has the log-probabilities that are asked for."""
    return handle.prompt_logprobs is None or handle.prompt_logprobs.done


def _sum_up(events: Iterable[Event]) -> dict[int, Part]:
    """Sum up events by answer: text, tokens with a log-probability, the reason of the end."""
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[Token]] = {}
    ends: dict[int, str] = {}
    for event in events:
        texts.setdefault(event.choice, []).append(event.text)
        if isinstance(event, Finish):
            ends[event.choice] = event.reason
            if event.end_token is not None:  # as vLLM counts it
                tokens.setdefault(event.choice, []).append(event.end_token)
        elif event.logprob is not None:
            tokens.setdefault(event.choice, []).append(event)
    return {
        index: ("".join(parts), tokens.get(index, []), ends.get(index))
        for index, parts in texts.items()
    }
