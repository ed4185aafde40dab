"""Answers to questions with fixed options, read from the model's token probabilities.

state ──> computed once, in the tree ──> a leaf for each question ──> passes over its options
options ──> stems: their tokens without the last ──> a pass per stem that is no other's prefix
rows of log-probabilities, one after each token of a stem ──> a sum for each option
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from starlette.requests import Request as HttpRequest

from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.server.access import salt_for
from penstock.server.decisions.decision_questions import Option, OptionReading
from penstock.server.disconnect import until_gone
from penstock.server.parsing.formats import HARMONY
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import HOLD
from penstock.server.prompts import Prompts
from penstock.server.reasoning_effort import effort_switches
from penstock.server.service import Service

Messages: TypeAlias = Sequence[Mapping[str, Any]]

PASSES_AT_ONCE = 64
"""Maximum number of forward passes queued in the engine at a time."""
TOKENS_AT_ONCE = 2**17
"""Maximum number of their prompt tokens together; a single pass may have more."""


class ReadQuestion(Protocol):
    """A question's text in the prompt, and its options."""

    @property
    def text(self) -> str: ...
    @property
    def options(self) -> tuple[Option, ...]: ...


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """Conversation and questions of one request; the keys name the fields of the body."""

    messages: Messages
    """Conversation that ends with a user message, to which each question is appended."""
    questions: Mapping[str, ReadQuestion]
    salt: str | None = None
    between: str = "\n\n"
    """Text between the last message and a question."""


@dataclass(frozen=True, slots=True)
class Decided:
    readings: list[OptionReading]
    input_tokens: int
    """Number of tokens of the state, counted once, and of the questions."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Leaf:
    prompt: Tokens
    """Tokens of the state, the question and the template, up to the answer."""
    options: OptionTokens


class Decider:
    """Runs the passes of one request. Methods run on the event loop unless noted."""

    def __init__(
        self, service: Service, path: str, asked: DecisionInput, model: str | None
    ) -> None:
        self._service = service
        self._path = path
        self._asked = asked
        self._adapter = service.adapter_of(model)
        self._cached_tokens: list[int] = []

    async def decide(self, http: HttpRequest) -> Decided:
        """Compute the state, then each question after it, then the questions' options."""
        leaves = await until_gone(http, self._service.work(self._leaves))
        state = _common([leaf.prompt for leaf in leaves])
        count = sum(len(leaf.prompt) for leaf in leaves) - (len(leaves) - 1) * len(state)
        several = [leaf.prompt for leaf in leaves if len(leaf.options.stems) > 1]
        if len(leaves) > 1:
            await self._run(http, [self._request(leaves[0].prompt[: len(state) + 1])])
        await self._run(http, [self._request(prompt) for prompt in several])
        passes = [self._pass(leaf, stem) for leaf in leaves for stem in leaf.options.stems]
        handles = iter(await self._run(http, passes))
        readings = [
            OptionReading.of(leaf.options.logprobs(_rows(leaf, handles))) for leaf in leaves
        ]
        return Decided(readings, count, min(self._cached_tokens[0], count))

    # ---- the prompts

    def _leaves(self) -> list[_Leaf]:
        """Tokenize the state once, and each question after it. Worker thread."""
        prompts, mark = self._service.prompts, f"penstock {uuid.uuid4().hex}"
        switches = effort_switches("none", prompts)
        *before, last = self._asked.messages
        messages = [*before, {**last, "content": f"{last['content']}{self._asked.between}{mark}"}]
        text = prompts.template_text(messages, **switches)
        start, sign, rest = text.partition(mark)
        if not sign or mark in rest:
            raise BadRequest(
                "the model's chat template does not write a message exactly once and unchanged"
            )
        # The break belongs to the questions: at the end of a text it can be other tokens.
        between = self._asked.between if start.endswith(self._asked.between) else ""
        state = prompts.tokens(start.removesuffix(between), "input", special=False)
        rest += _closing(prompts, (*state, *prompts.tokens(rest, "input", special=False)))
        known: dict[str, Tokens] = {}
        return [
            self._leaf(place, between + question.text + rest, question.options, state, known)
            for place, question in self._asked.questions.items()
        ]

    def _leaf(
        self,
        place: str,
        text: str,
        options: Sequence[Option],
        state: Tokens,
        known: dict[str, Tokens],
    ) -> _Leaf:
        prompts = self._service.prompts
        asked = prompts.tokens(text, place, special=False)
        for option in options:
            if option.text not in known:
                known[option.text] = prompts.tokens(option.text, place, special=False)
        try:
            read = OptionTokens([known[option.text] for option in options], self._ends)
        except ValueError as error:
            raise BadRequest(f"{place}: {error}", param=place, code="invalid_value") from None
        return _Leaf((*state, *asked), read)

    @property
    def _ends(self) -> list[int]:
        ends, size = self._service.tokenizer.eos_token_ids, self._service.vocabulary_size
        return [token for token in ends if token is not None and token < size]

    # ---- the passes

    def _request(self, prompt: Tokens, **fields: Any) -> Request:
        return Request(
            prompt=prompt,
            max_tokens=0,
            timeout_seconds=self._service.settings.request_timeout_seconds,
            adapter=self._adapter,
            salt=salt_for(self._asked.salt),
            **fields,
        )

    def _pass(self, leaf: _Leaf, stem: Tokens) -> Request:
        # The last token is a placeholder that is not computed.
        return self._request(
            (*leaf.prompt, *stem, leaf.options.candidates[0]),
            prompt_logprobs=0,
            logprobs_from=len(leaf.prompt),
            candidates=leaf.options.candidates,
        )

    async def _run(self, http: HttpRequest, requests: Sequence[Request]) -> list[Handle]:
        done: list[Handle] = []
        for part in self._parts(requests):
            answering = await until_gone(http, self._service.open_all(part, self._path))
            async with answering:
                await answering.result(http)
                self._cached_tokens.append(answering.usage().cached_tokens)
            done += answering.handles
        return done

    def _parts(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Yield batches of requests to queue together; hold the memory of each batch's tokens."""
        part: list[Request] = []
        tokens, most = 0, max(1, min(PASSES_AT_ONCE, self._service.max_queue // 2))
        hold, held = HOLD.get(), 0
        for request in (*requests, None):
            more = 0 if request is None else len(request.prompt)
            if part and (request is None or len(part) == most or tokens + more > TOKENS_AT_ONCE):
                if hold is not None and tokens > held:
                    hold.add_tokens(tokens - held)
                    held = tokens
                yield part
                part, tokens = [], 0
            if request is not None:
                part.append(request)
                tokens += more


def _common(prompts: Sequence[Tokens]) -> Tokens:
    """Return the longest common prefix of the prompts.

    >>> _common([(1, 2, 3), (1, 2), (1, 2, 4)])
    (1, 2)
    """
    first, last = min(prompts), max(prompts)
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (one, other) in pairs if one != other), len(first))]


def _closing(prompts: Prompts, prompt: Tokens) -> str:
    """Return the text after the prompt that ends open reasoning, or starts the final answer."""
    if prompts.format.reasoning_name == HARMONY:
        return "<|channel|>final<|message|>"
    marks = prompts.format.reasoning
    return "" if marks is None or not prompts.starts_in_reasoning(prompt) else f"{marks.end}\n\n"


def _rows(leaf: _Leaf, handles: Iterator[Handle]) -> list[Any]:
    rows = []
    for _ in leaf.options.stems:
        logprobs = next(handles).prompt_logprobs
        assert logprobs is not None
        rows.append(logprobs.candidate_values)
    return rows


Tokens: TypeAlias = tuple[int, ...]
Rows: TypeAlias = npt.NDArray[np.float32]


class OptionTokens:
    """Token sequences of one question's options.

    If one option is a prefix of another, each must be followed by a token that ends the answer:
    otherwise "1" would include the probability of "10".

    Args:
        options: tokens of each option, at least one.
        ends: tokens that end an answer.

    Raises:
        ValueError: an option is empty, two are equal, or one is a prefix of another and there are
            no `ends`.

    >>> tokens = OptionTokens([(1,), (2, 3), (2, 4)], ends=(0,))
    >>> tokens.stems, tokens.candidates
    ([(2,)], (1, 2, 3, 4))
    """

    def __init__(self, options: Sequence[Tokens], ends: Sequence[int]) -> None:
        if not all(options):
            raise ValueError("an option is empty")
        places: dict[Tokens, int] = {}
        for index, option in enumerate(options):
            if (first := places.setdefault(option, index)) != index:
                raise ValueError(f"options {first} and {index} have the same tokens")
        ordered = sorted(options)
        self.ended = any(_begins(one, other) for one, other in pairwise(ordered))
        self.steps: list[list[Tokens]] = [[(token,) for token in option] for option in options]
        """Steps of each option; a step lists the tokens allowed at its position."""
        if self.ended:
            if not ends:
                raise ValueError("one option is a prefix of another; the model has no end token")
            self.steps = [[*steps, tuple(sorted(ends))] for steps in self.steps]
        self.candidates = tuple(sorted({t for steps in self.steps for step in steps for t in step}))
        longest = sorted({_stem(steps) for steps in self.steps}, key=len, reverse=True)
        self.stems: list[Tokens] = []
        for stem in longest:
            if not any(_begins(stem, other) for other in self.stems):
                self.stems.append(stem)

    def logprobs(self, passes: Sequence[Rows]) -> list[float]:
        """Return the log-probability of each option.

        Args:
            passes: for each stem, the candidates' log-probabilities before it and after each of
                its tokens, (1 + tokens, candidates).
        """
        column = {token: index for index, token in enumerate(self.candidates)}
        totals = []
        for steps in self.steps:
            stem = _stem(steps)
            rows = passes[next(i for i, other in enumerate(self.stems) if _begins(stem, other))]
            values = [
                np.logaddexp.reduce(rows[depth, [column[token] for token in step]].astype(float))
                for depth, step in enumerate(steps)
            ]
            totals.append(float(sum(values)))
        return totals


def _stem(steps: Sequence[Tokens]) -> Tokens:
    return tuple(token for (token,) in steps[:-1])


def _begins(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return tuple(other[: len(one)]) == tuple(one)
