"""`Service`: access to the engine from the event loop, shared by all routers.

The event loop never touches arrays and never blocks on the engine: it uses `EngineClient.ask`,
and receives events through `Handle.listen`. A step wakes it once for the tokens of all requests.
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
from functools import partial
from typing import Any, ParamSpec, TypeVar

from penstock.config import MAX_TOKENS, SAMPLED, ServerSettings
from penstock.engine.handle import Handle
from penstock.engine.request import Request, Sampling
from penstock.errors import EngineStopped, PenstockError, SettingError
from penstock.models.image_reader import ImageError
from penstock.plurals import counted
from penstock.prefix.explanation import Explanation
from penstock.server.access import CLIENT, KEY_HOLDER, Access, KeyHolder
from penstock.server.active_request import ActiveRequest
from penstock.server.engine_client import EngineClient, EngineState
from penstock.server.images import FETCHED, ImagesToFetch
from penstock.server.log_lines import RequestLog
from penstock.server.problems import (
    REQUEST_ID,
    TRACEPARENT,
    BadRequest,
    NotFound,
    PromptTooLong,
    ShuttingDown,
)
from penstock.server.prompt_memory import HOLD, TOKEN_BYTES, PromptMemory, pool_bytes
from penstock.server.prompts import Prompts
from penstock.server.recent import Listener, Recent
from penstock.server.remembered_answers import RememberedAnswers
from penstock.server.response_store import ResponseStore
from penstock.server.tracing import request_tracer
from penstock.server.workers import Workers

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
LEAST_SECONDS = 0.001
"""Timeout given to an overdue request, so that the engine ends it at once."""
ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""Time at which the current request had fully arrived, in seconds of `time.monotonic`."""

T = TypeVar("T")
P = ParamSpec("P")


class Service:
    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Any,
        settings: ServerSettings,
        model_name: str,
        *,
        sampling: Mapping[str, float] | None = None,
        access: Access | None = None,
        memory: PromptMemory | None = None,
        stored: ResponseStore | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.model_name = model_name
        self.access = access or Access.of(settings)
        """API keys; defaults to those of the settings."""
        self.created = int(time.time())
        self._model_sampling = dict(sampling or {})
        self.sampling = default_sampling(settings, self._model_sampling)
        self.memory = memory or PromptMemory(engine.set_aside_prompts(pool_bytes(engine)))
        model_tokens = engine.ask(lambda view: view.context_tokens).result()
        fitting_tokens = engine.ask(lambda view: view.fitting_tokens).result()
        self.model_context = None if settings.ignore_model_context else model_tokens
        """Context length of the model; None means unlimited."""
        context = (self.model_context, fitting_tokens, self.memory.pool_bytes // TOKEN_BYTES)
        self.context_tokens = min(tokens for tokens in context if tokens is not None)
        """Maximum number of tokens of a prompt and its answer together."""
        self.adapters = engine.ask(lambda view: view.adapters).result()
        """Adapters that requests can name, as `model+adapter`."""
        self.window_tokens = engine.ask(lambda view: view.limits.max_kv_size).result()
        self.answers = RememberedAnswers(self.memory, tokenizer)
        self.prompts = self._make_prompts()
        self.stored = stored or ResponseStore(self.memory, settings.stored_response_bytes)
        self.recent: deque[Recent] = deque(maxlen=settings.recent)
        self.listeners: list[Listener] = []
        if settings.log_format == "json":
            self.listeners.append(RequestLog())
        if (tracer := request_tracer(settings, model_name)) is not None:
            self.listeners.append(tracer)
        self.draining = False
        """Whether the server is draining: it refuses new requests and ends `/v1/live` streams."""
        self.died: list[Callable[[], None]] = []
        """Callbacks invoked on the event loop once the engine thread has died or hangs."""
        self.max_queue = engine.ask(lambda view: view.limits.max_queue).result()
        """Maximum number of answers waiting in the engine, and of prompts to be tokenized."""
        self.vocabulary_size = engine.ask(lambda view: view.vocabulary_size).result()
        self._open: set[ActiveRequest] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakes = False
        self.workers = Workers(self.max_queue)
        self.workers.short.submit(self.prompts.start_renderer)
        self.aside = self.workers.use_disk

    def _make_prompts(self) -> Prompts:
        prompts = Prompts(
            self.tokenizer,
            keep_billing_header=self.settings.keep_billing_header,
            most_tokens=self.context_tokens,
            answers=self.answers,
            tool_parser=self.settings.tool_parser,
            reasoning_parser=self.settings.reasoning_parser,
            refuses_tools=self.settings.tools_without_template == "refuse",
            system=self.settings.system,
            images=self.engine.image_reader,
        )
        _ = prompts.traits
        return prompts

    @property
    def model_names(self) -> list[str]:
        return [self.model_name]

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def change(self, settings: ServerSettings) -> None:
        """Replace the default request parameters and timeouts, from the next request on."""
        self.settings = settings
        self.sampling = default_sampling(settings, self._model_sampling)

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that tokenizes a prompt in a worker; fetch its images first if needed."""
        fetched: dict[str, bytes | ImageError] = {}
        FETCHED.set(fetched if self.settings.allow_remote_images else None)
        while True:
            try:
                return await self.workers.read(call, *args, **kwargs)
            except ImagesToFetch as missing:
                for url in missing.urls:
                    fetched[url] = await self.workers.fetch(url, self.settings.max_body_bytes)

    async def open(self, request: Request, label: str) -> ActiveRequest:
        """Submit a request; use as `async with await service.open(...)`. Raises like `open_all`."""
        return await self.open_all((request,), label)

    async def open_all(self, requests: Sequence[Request], label: str) -> ActiveRequest:
        """Submit several requests, all or none; their answers are numbered consecutively."""
        if self.draining:
            raise ShuttingDown()
        answers = sum(request.n for request in requests)
        if answers > self.max_queue:
            raise BadRequest(
                f"{counted(len(requests), 'prompt')} with n answers each make "
                f"{counted(answers, 'answer')}; at most {self.max_queue:,} may wait "
                "(--max-queue): ask for fewer at a time",
                code="too_many_answers",
                param="n",
            )
        if (hold := HOLD.get()) is not None:
            hold.settle()
        recent = Recent(f"req_{uuid.uuid4().hex[:16]}", label, time.time())
        recent.request_id, recent.traceparent = REQUEST_ID.get() or "", TRACEPARENT.get()
        owner = {"client": CLIENT.get(), "group": recent.id}
        requests = [
            _in_time(self._in_context(request)).model_copy(update=owner) for request in requests
        ]
        recent.prompt_tokens = sum(len(request.prompt) for request in requests)
        answering = ActiveRequest(
            [await self._handle(request) for request in requests],
            recent,
            listeners=self.listeners,
            max_unread=self.settings.max_unread,
            wake_soon=self.wake_soon,
            closed=partial(self._closed, client=KEY_HOLDER.get()),
        )
        try:
            explanation = await asyncio.wrap_future(self.engine.enqueue(answering.handles))
        except BaseException as error:  # also if the client has disconnected
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

    @property
    def names(self) -> list[str]:
        """Names of the model, alone and with each adapter."""
        return [self.model_name, *(f"{self.model_name}+{name}" for name in self.adapters)]

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter in a request's `model`, if any; NotFound if it is unknown."""
        _, plus, adapter = (name or "").rpartition("+")
        if not plus or not self.adapters or name == self.model_name:
            return None
        if adapter not in self.adapters:
            raise NotFound(
                f"there is no model {str(name)[:80]!r}; served: {', '.join(self.names)}",
                code="model_not_found",
                param="model",
            )
        return adapter

    def shown_name(self, name: str | None) -> str:
        """Return the `model` field of responses to a request for `name`."""
        adapter = self.adapter_of(name)
        return self.model_name if adapter is None else f"{self.model_name}+{adapter}"

    def rest_tokens(self, prompt_tokens: int) -> int:
        """Return the default maximum answer length for a prompt."""
        if self.settings.max_tokens is not None:
            return self.settings.max_tokens
        end = self.window_tokens
        if self.model_context is not None:
            end = min(end, self.model_context)
        return max(end - prompt_tokens, MAX_TOKENS)

    def _in_context(self, request: Request) -> Request:
        """Limit an answer to the rest of the context; PromptTooLong if nothing is left."""
        prompt, context = len(request.prompt), self.model_context
        if context is None or prompt + request.max_tokens <= context:
            return request
        if prompt >= context:
            raise PromptTooLong(prompt, context)
        return request.model_copy(update={"max_tokens": context - prompt})

    async def _handle(self, request: Request) -> Handle:
        if request.grammar is None:
            return self.engine.open(request)
        return await self.workers.compile(self.engine.open, request)

    async def created_tokens(self, answering: ActiveRequest) -> int:
        request, used = answering.handles[0].request, answering.usage()
        try:
            held_tokens = await self.ask(
                lambda view: view.held_tokens(request.keyed_prompt, request.salt)
            )
        except PenstockError:  # the engine has stopped, so nothing is cached
            return 0
        if used.cached_tokens == used.prompt_tokens - 1:
            return 0  # the last token was computed only for its logits; its KV was cached
        return max(0, held_tokens - used.cached_tokens)

    def check_tokens(self, prompt: Sequence[int], param: str = "prompt") -> None:
        for token in prompt:
            if not 0 <= token < self.vocabulary_size:
                raise BadRequest(
                    f"{param}: token {token} does not exist; the model has "
                    f"{counted(self.vocabulary_size, 'token')}, 0 to {self.vocabulary_size - 1}",
                    param=param,
                )

    async def ask(self, question: Callable[[EngineState], T]) -> T:
        return await asyncio.wrap_future(self.engine.ask(question))

    async def watch(self) -> None:
        while self.alive:
            await asyncio.sleep(WATCH_SECONDS)
        hangs = self.engine.hangs
        for answering in list(self._open):
            answering.fail(EngineStopped("the engine has stopped before this request ended"))
        fault = "hangs in a step" if hangs else "has ended"
        logger.error("the engine thread %s; no more requests can be answered", fault)
        for call in self.died:
            call()

    def cancel_all(self) -> None:
        for answering in list(self._open):
            for handle in answering.handles:
                handle.cancel()

    def fail_all(self, error: BaseException) -> None:
        for answering in list(self._open):
            answering.fail_soon(error)

    def give_way(self) -> None:
        """End the open requests so that the model can be evicted. Event loop only."""
        for answering in list(self._open):
            answering.give_way()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for open ones; return whether all ended in time."""
        return self.engine.drain(timeout_seconds)

    def close(self) -> None:
        self.workers.close()
        self.answers.close()
        self.prompts.close()

    def wake_soon(self) -> None:
        """Schedule waking the readers, unless already scheduled. Thread-safe."""
        if self._wakes or self._loop is None:
            return
        self._wakes = True
        with suppress(RuntimeError):  # the loop is closed, so there are no readers
            self._loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        self._wakes = False  # before checking for events: none is missed
        for answering in self._open:
            answering.look()

    def _closed(self, answering: ActiveRequest, client: KeyHolder | None) -> None:
        self._open.discard(answering)
        if client is not None:
            client.tokens += answering.recent.prompt_tokens + answering.recent.completion_tokens
        if answering.recent.state == "done":
            kept = [handle for handle in answering.handles if handle.request.cache_prompt]
            for handle in kept:
                for choice in handle.choices:
                    request = handle.request
                    self.answers.remember(request.salt, request.prompt, choice.tokens)
        for listener in self.listeners:
            listener.ended(answering.recent)


def _in_time(request: Request) -> Request:
    arrived = ARRIVED.get()
    if arrived is None or request.timeout_seconds is None:
        return request
    left = request.timeout_seconds - (time.monotonic() - arrived)
    return request.model_copy(update={"timeout_seconds": max(left, LEAST_SECONDS)})


def _without_text(explanation: Explanation | None) -> dict[str, Any] | None:
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


def default_sampling(settings: ServerSettings, model: Mapping[str, float]) -> Sampling:
    """Merge flags with the model's values; unsupported values are logged and ignored."""
    flags = {name: getattr(settings, name) for name in SAMPLED}
    known: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for name, value in model.items():
        try:
            Sampling(**dict[str, Any]({name: value}))
        except SettingError as error:
            logger.warning("ignoring a value of generation_config.json: %s", error)
        else:
            known.setdefault(name, value)
    return Sampling(**known)
