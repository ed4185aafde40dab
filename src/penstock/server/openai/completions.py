"""OpenAI's completions, including log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from penstock.engine.handle import Choice, Handle
from penstock.engine.request import Event, Finish, Request, Token
from penstock.server.dialect import Dialect
from penstock.server.forms import MOST_PROMPTS
from penstock.server.openai.logprobs import Logprobs
from penstock.server.openai.openai_forms import CompletionRequest
from penstock.server.openai.openai_objects import (
    head_of,
    includes_usage,
    last_chunks,
    prompt_progress,
    usage_object,
)
from penstock.server.openai.prompt_scores import check_scores, hold_scores, top_of
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import hold_text
from penstock.server.service import Service
from penstock.server.sse import data
from penstock.server.tools.calls import CallGrammar
from penstock.server.workers import LONG_BYTES

COMPLETIONS = "/v1/completions"
Part: TypeAlias = tuple[str, list[Token], str | None]
"""New text of an answer, its tokens with a log-probability, and the finish reason."""


class Completions(Dialect):
    path = COMPLETIONS

    def __init__(self, service: Service, logprobs: Logprobs, body: CompletionRequest) -> None:
        super().__init__(service, streams=bool(body.stream))
        self.n = body.n or 1
        if body.suffix:
            raise BadRequest("suffix is not supported: leave it out", param="suffix")
        if body.best_of is not None and body.best_of != self.n:
            raise BadRequest(
                f"best_of {body.best_of} must equal n, which is {self.n}: every generated answer "
                f"is returned",
                param="best_of",
            )
        check_scores(body.prompt_logprobs, stream=self.streams)
        self.logprobs = logprobs
        self.body = body
        self.head = {**head_of(service, "cmpl", body.model), "object": "text_completion"}
        self.prompts: list[tuple[int, ...]] = []
        self.echoes: list[str] = []
        self.offsets: dict[int, int] = {}
        self.top = self.prompt_top = top_of(body.prompt_logprobs, service.vocabulary_size)
        """Number of top log-probabilities per prompt token from the engine; None for no scores."""
        if body.echo and body.logprobs is not None:
            self.top = max(body.logprobs, self.top or 0)

    def read(self) -> None:
        prompt = self.body.prompt
        texts_or_tokens: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
        if texts_or_tokens and isinstance(texts_or_tokens[0], int):
            texts_or_tokens = [texts_or_tokens]
        if not 0 < len(texts_or_tokens) <= MOST_PROMPTS:
            raise BadRequest(f"prompt: 1 to {MOST_PROMPTS} prompts", param="prompt")
        prompts = self.service.prompts
        read = [
            prompts.encode(part) if isinstance(part, str) else tuple(part)
            for part in texts_or_tokens
        ]
        for tokens in read:
            if not tokens:
                raise BadRequest("prompt has no tokens", param="prompt")
            self.service.check_tokens(tokens)
        if self.top is not None:
            hold_scores(read, self.top, self.n)
        if self.body.echo:
            self.echoes = [
                part if isinstance(part, str) else prompts.text(part) for part in texts_or_tokens
            ]
            hold_text(self.n * sum(map(len, self.echoes)))
        else:
            self.echoes = [""] * len(read)
        self.prompts = read

    def binds(self) -> bool:
        return self.body.structured

    def rules(self) -> CallGrammar:
        return CallGrammar(self.body.structure())

    def requests(self) -> Sequence[Request]:
        body = self.body
        sampling = body.sampling(
            self.service.sampling,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        )
        special = self.service.prompts.format.marks.special.values()
        return [
            body.request(
                self.service,
                prompt,
                sampling=sampling,
                max_tokens=body.max_tokens,
                stop=body.stop,
                stop_token_ids=body.stop_token_ids or (),
                n=self.n,
                goes_on=True,
                grammar=self.rule.grammar,
                ignore_eos=bool(body.ignore_eos),
                prompt_logprobs=self.top,
                silent_tokens=frozenset(special if body.skip_special_tokens else ()),
            )
            for prompt in self.prompts
        ]

    async def usage(self) -> dict[str, Any]:
        return usage_object(self.answering.usage())

    @property
    def streams_usage(self) -> bool:
        return includes_usage(self.body.stream_options)

    def is_long(self, choices: Sequence[Choice]) -> bool:
        return self._is_long

    def is_long_chunk(self, events: Sequence[Event]) -> bool:
        return self._is_long and any(event.choice not in self.offsets for event in events)

    @property
    def _is_long(self) -> bool:
        return self.top is not None or self.n * sum(map(len, self.echoes)) > LONG_BYTES

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        text_choices: list[dict[str, Any]] = []
        for index, choice in enumerate(choices):
            assert choice.finish is not None
            tokens = [*self._echoed(index), *choice.logprobs]
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
            scores = self.answering.handles[index // self.n].prompt_logprobs
            if scores is not None and self.prompt_top is not None:
                written = self.logprobs.prompt(scores, self.prompt_top)
                text_choices[-1]["prompt_logprobs"] = written
        return {**self.head, "choices": text_choices, "usage": usage}

    def _echoed(self, index: int) -> list[Token]:
        """Return the prompt's tokens, if `echo` adds them to the answer's log-probabilities."""
        scores = self.answering.handles[index // self.n].prompt_logprobs
        if scores is None or not self.body.echo or self.body.logprobs is None:
            return []
        return self.logprobs.echoed(scores, self.body.logprobs)

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        return self.logprobs.completion(tokens, offset)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield batches of events; a prompt's events wait for its log-probabilities."""
        early: list[Event] = []
        with_progress = bool(self.body.return_progress)
        async for events in self.answering.batches(with_progress=with_progress):
            if not events:
                yield events
                continue
            scored = [_has_scores(handle) for handle in self.answering.handles]
            begun = [(event, scored[event.choice // self.n]) for event in (*early, *events)]
            early = [event for event, ready in begun if not ready]
            if len(early) < len(begun):
                yield [event for event, ready in begun if ready]
        if early:
            yield early

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self.head, "usage": None} if self.streams_usage else self.head

    def progress(self) -> Iterator[bytes]:
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        yield data({**self._chunk_head, "choices": [choice], **prompt_progress(self.answering)})

    def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield a chunk for each answer with new text; its first chunk starts with the echo."""
        for index, (text, tokens, reason) in _sum_up(events).items():
            offset = self.offsets.get(index)
            if offset is None:
                text = self.echoes[index // self.n] + text
                tokens = [*self._echoed(index), *tokens]
            self.offsets[index] = (offset or 0) + len(text)
            if not (text or tokens or reason):
                continue
            choice = {
                "index": index,
                "text": text,
                "logprobs": self._logprobs(tokens, offset or 0),
                "finish_reason": reason,
            }
            yield data({**self._chunk_head, "choices": [choice]})

    def end(self, usage: dict[str, Any]) -> Iterator[bytes]:
        return last_chunks(self.head, usage)


def _has_scores(handle: Handle) -> bool:
    return handle.prompt_logprobs is None or handle.prompt_logprobs.done


def _sum_up(events: Iterable[Event]) -> dict[int, Part]:
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
