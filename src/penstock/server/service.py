"""The engine seen from an event loop: the service that all routers share.

The event loop never touches an array and never waits for the engine: it asks with
`Engine.ask`, and `Handle.listen` brings the events. A step that brings tokens to many wakes
the event loop once.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, TypeVar

from penstock.config import MAX_TOKENS, ServerSettings
from penstock.engine.engine import Engine
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped, PenstockError
from penstock.prefix.explanation import Explanation
from penstock.server.active_request import ActiveRequest
from penstock.server.default_sampling import default_sampling
from penstock.server.problems import BadRequest, PromptTooLong, Unavailable
from penstock.server.prompt_memory import HOLD, TOKEN_BYTES, PromptMemory, pool_bytes
from penstock.server.prompts import Prompts
from penstock.server.recent import Listener, Recent
from penstock.server.remembered_answers import RememberedAnswers
from penstock.server.response_store import ResponseStore
from penstock.server.workers import Workers

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
"""Seconds between two looks whether the engine's thread lives."""
LEAST_SECONDS = 0.001
"""Timeout in seconds of a request whose time is over: the engine ends it at once."""
ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""Time at which the request served here had arrived in full, in seconds of `time.monotonic`."""

T = TypeVar("T")


class Service:
    """One engine, and the state that all routers share.

    All methods belong to the event loop of the server; `engine` may be used from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: ServerSettings,
        model_name: str,
        *,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.model_name = model_name
        self.created = int(time.time())
        self.sampling = default_sampling(settings, sampling or {})
        """Sampling of a request that does not say its own."""
        self.memory = PromptMemory(engine.set_aside_prompts(pool_bytes(engine)))
        """Memory of bodies, texts and tokens of open requests."""
        model_tokens = engine.ask(lambda view: view.context_tokens).result()
        fitting_tokens = engine.ask(lambda view: view.fitting_tokens).result()
        self.model_context = None if settings.ignore_model_context else model_tokens
        """Tokens of a prompt and its answer that the model is made for; None is any number."""
        context = (self.model_context, fitting_tokens, self.memory.pool_bytes // TOKEN_BYTES)
        self.context_tokens = min(tokens for tokens in context if tokens is not None)
        """Tokens that a prompt and its answer can have together."""
        self.window_tokens = engine.ask(lambda view: view.limits.max_kv_size).result()
        """Tokens that a sequence sees at most."""
        self.answers = RememberedAnswers(self.memory, tokenizer)
        """Tokens of answers, for the prompts of later turns."""
        self.prompts = self._make_prompts()
        self.stored = ResponseStore(self.memory, settings.stored_response_bytes)
        self.recent: deque[Recent] = deque(maxlen=settings.recent)
        """Figures of the last requests, the newest last."""
        self.listeners: list[Listener] = []
        self.draining = False
        """Whether no more requests are taken in; endless streams end when they see it."""
        self.died: list[Callable[[], None]] = []
        """Callbacks for an engine's thread that ends by itself, called once, in the event loop."""
        self.max_queue = engine.ask(lambda view: view.limits.max_queue).result()
        """Answers that may wait in the engine, and prompts that may wait to be read."""
        self.vocabulary_size = engine.ask(lambda view: view.vocabulary_size).result()
        """Number of tokens in the model's vocabulary."""
        self._open: set[ActiveRequest] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakes = False
        self.workers = Workers(self.max_queue)
        self.work = self.workers.read
        """Worker threads of functions that read prompts."""
        self.aside = self.workers.use_disk
        """Worker threads of functions that wait for a disk."""

    def _make_prompts(self) -> Prompts:
        """Make the renderer of prompts; its template is probed now, so that no request waits."""
        prompts = Prompts(
            self.tokenizer,
            keep_billing_header=self.settings.keep_billing_header,
            most_tokens=self.context_tokens,
            answers=self.answers,
            tool_parser=self.settings.tool_parser,
            reasoning_parser=self.settings.reasoning_parser,
        )
        _ = prompts.traits
        return prompts

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self.engine.alive

    async def open(self, request: Request, label: str) -> ActiveRequest:
        """Hand a request to the engine and return the reader of its events.

        Use it as `async with await service.open(...) as answering`, or call `close`.

        Raises:
            BadRequest: more answers than may ever wait.
            NeverFits: the prompt and its answers would not fit with all else evicted.
            QueueFull: too many are waiting.
            SettingError: a token that the model does not have.
            EngineStopped: the engine is gone, or takes nothing more in.
        """
        return await self.open_all((request,), label)

    async def open_all(self, requests: Sequence[Request], label: str) -> ActiveRequest:
        """Hand several requests to the engine, all or none; as `open`.

        The answers are numbered through: those of the second request follow on the first's.
        """
        if self.draining:
            raise Unavailable("the server is shutting down", code="shutting_down")
        answers = sum(request.n for request in requests)
        if answers > self.max_queue:
            raise BadRequest(
                f"{len(requests)} prompts with n answers each are {answers} answers; at most "
                f"{self.max_queue} may wait (--max-queue): ask for fewer at a time",
                code="too_many_answers",
                param="n",
            )
        if (hold := HOLD.get()) is not None:
            hold.settle()
        requests = [_in_time(self._in_context(request)) for request in requests]
        recent = Recent(f"req_{uuid.uuid4().hex[:16]}", label, time.time())
        recent.prompt_tokens = sum(len(request.prompt) for request in requests)
        answering = ActiveRequest(
            [await self._handle(request) for request in requests],
            recent,
            listeners=self.listeners,
            max_unread=self.settings.max_unread,
            wake_soon=self.wake_soon,
            closed=self._closed,
        )
        try:
            explanation = await asyncio.wrap_future(self.engine.enqueue(answering.handles))
        except BaseException as error:  # also when the client has gone meanwhile
            answering.fail(error)
            answering.close()
            raise
        recent.explanation = _without_text(explanation)
        self._open.add(answering)
        self.recent.append(recent)
        self._loop = asyncio.get_running_loop()
        for handle in answering.handles:
            handle.listen(answering.notify)
        return answering

    def rest_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of an answer whose request does not say how many.

        They are those of `--max-tokens`, or all to the end of the context and of the window. An
        answer that begins near the window's end, where the window only moves on, gets a few more.
        """
        if self.settings.max_tokens is not None:
            return self.settings.max_tokens
        end = self.window_tokens
        if self.model_context is not None:
            end = min(end, self.model_context)
        return max(end - prompt_tokens, MAX_TOKENS)

    def _in_context(self, request: Request) -> Request:
        """Leave an answer the tokens that the prompt leaves of the model's context.

        Clients ask for 32,000 tokens of any model: that is a limit, and no error.

        Raises:
            BadRequest: the prompt leaves none.
        """
        prompt, most = len(request.prompt), self.model_context
        if most is None or prompt + request.max_tokens <= most:
            return request
        if prompt >= most:
            raise PromptTooLong(prompt, most)
        return request.model_copy(update={"max_tokens": most - prompt})

    async def _handle(self, request: Request) -> Handle:
        """Return the engine's handle; a grammar is compiled for it, which takes long."""
        if request.grammar is None:
            return self.engine.open(request)
        return await self.workers.compile(self.engine.open, request)

    async def created_tokens(self, answering: ActiveRequest) -> int:
        """Return the tokens of a request's prompt that were computed for it and are cached now."""
        request, used = answering.handles[0].request, answering.usage()
        try:
            held_tokens = await self.ask(
                lambda view: view.held_tokens(request.prompt, request.salt)
            )
        except PenstockError:  # the engine has stopped meanwhile: its cache is gone
            return 0
        if used.cached_tokens == used.prompt_tokens - 1:
            return 0  # the last token was computed for its logits alone; its KV was there
        return max(0, held_tokens - used.cached_tokens)

    def check_tokens(self, prompt: Sequence[int], param: str = "prompt") -> None:
        """Raise BadRequest if a prompt has a token that the model does not know."""
        for token in prompt:
            if not 0 <= token < self.vocabulary_size:
                raise BadRequest(
                    f"{param}: there is no token {token}; the model knows "
                    f"{self.vocabulary_size:,} tokens, 0 to {self.vocabulary_size - 1}",
                    param=param,
                )

    async def ask(self, question: Callable[[EngineView], T]) -> T:
        """Have the engine's thread answer a question between two steps."""
        return await asyncio.wrap_future(self.engine.ask(question))

    async def watch(self) -> None:
        """Be the task that looks whether the engine lives; ends when it does not."""
        while self.alive:
            await asyncio.sleep(WATCH_SECONDS)
        for answering in list(self._open):
            answering.fail(EngineStopped("the engine has stopped before this request ended"))
        logger.error("the engine's thread has ended; nothing can be answered any more")
        for call in self.died:
            call()

    def cancel_all(self) -> None:
        """Cancel all open requests, and tell their readers. Any thread."""
        for answering in list(self._open):
            for handle in answering.handles:
                handle.cancel()

    def fail_all(self, error: BaseException) -> None:
        """End every open request with an error, after the events that are there. Any thread."""
        for answering in list(self._open):
            answering.fail_soon(error)

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def close(self) -> None:
        """Shut the worker threads down."""
        self.workers.close()

    def wake_soon(self) -> None:
        """Have the readers look for events, each at most once; from any thread."""
        if self._wakes or self._loop is None:
            return
        self._wakes = True
        with suppress(RuntimeError):  # the loop is closed, and its readers are gone
            self._loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        self._wakes = False  # before events are looked for: none is missed
        for answering in self._open:
            answering.look()

    def _closed(self, answering: ActiveRequest) -> None:
        self._open.discard(answering)
        if answering.recent.state == "done":
            kept = [handle for handle in answering.handles if handle.request.cache_prompt]
            for handle in kept:
                for choice in handle.choices:
                    request = handle.request
                    self.answers.remember(request.salt, request.prompt, choice.tokens)
        for listener in self.listeners:
            listener.ended(answering.recent)


def _in_time(request: Request) -> Request:
    """Subtract the time since its arrival from a request's timeout."""
    arrived = ARRIVED.get()
    if arrived is None or request.timeout_seconds is None:
        return request
    left = request.timeout_seconds - (time.monotonic() - arrived)
    return request.model_copy(update={"timeout_seconds": max(left, LEAST_SECONDS)})


def _without_text(explanation: Explanation | None) -> dict[str, Any] | None:
    """Return an explanation without the parts that reveal the prompt's content."""
    if explanation is None:
        return None
    bare = replace(
        explanation,
        held_token=None,
        given_token=None,
        held_text=None,
        given_text=None,
        volatile_held=None,
        volatile_given=None,
    )
    return asdict(bare)
