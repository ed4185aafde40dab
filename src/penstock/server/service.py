"""The engine seen from an event loop: the service that all routers share.

    engine's thread                              event loop
    step ──listen──> call_soon_threadsafe ──> ActiveRequest ──> a response, or a stream
         <──────────── cancel ──────────────── left early, client gone, or reader too slow

A step that brings tokens to many wakes the event loop once.

The event loop never touches an array and never waits for the engine: it asks with
`Engine.ask`, and `Handle.listen` brings the events.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from threading import Event as ThreadEvent
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from starlette.requests import Request as HttpRequest

from penstock.config import ServerSettings
from penstock.engine.engine import Engine
from penstock.engine.handle import Choice, Handle, PromptProgress
from penstock.engine.request import Event, Finish, Request, Token, Usage
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped, PenstockError
from penstock.prefix.explanation import Explanation
from penstock.server.answers import total_usage
from penstock.server.default_sampling import default_sampling
from penstock.server.problems import (
    BadRequest,
    ClientGone,
    PromptTooLong,
    ServerError,
    TimedOut,
    TooSlow,
    Unavailable,
)
from penstock.server.prompt_memory import HOLD, TOKEN_BYTES, PromptMemory, pool_bytes
from penstock.server.prompt_progress import progress_of
from penstock.server.prompts import STOP, Prompts
from penstock.server.remembered_answers import RememberedAnswers
from penstock.server.response_store import ResponseStore

logger = logging.getLogger(__name__)

PATIENCE = 32
"""Events that may wait while the client awaits only the end: each wake takes engine time."""
ASIDE_THREADS = 2
LONG_BYTES = 65_536
"""Bytes from which bodies are read in a thread of their own, so that short ones pass them."""
WATCH_SECONDS = 0.25
"""Seconds between two looks whether the engine's thread lives."""
LEAST_SECONDS = 0.001
"""Timeout in seconds of a request whose time is over: the engine ends it at once."""
ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""Time at which the request served here had arrived in full, in seconds of `time.monotonic`."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(slots=True)
class Recent:
    """Figures remembered of a request, without its text."""

    id: str
    label: str
    """Path of the request, as "/v1/chat/completions"."""
    started: float
    """Start of the request, in seconds since 1970."""
    state: str = "waiting"
    """State: `waiting`, `running`, and at the end `done`, `failed` or `cancelled`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    """Seconds from the request to its first token."""
    seconds: float | None = None
    """Seconds from the request to its end."""
    finish: str | None = None
    """Reason of the end."""
    explanation: dict[str, Any] | None = None
    """Explanation of the prompt's match on arrival, in the form of `Explanation`."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all its answers after the first one, by the time they took."""
        if self.first_token_seconds is None or self.seconds is None:
            return None
        took = self.seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / took if took > 0 else None

    def record(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


class Listener(Protocol):
    """Observer of requests' times; called in the event loop, it must be quick."""

    def first_token(self, seconds: float) -> None:
        """Note a request's first token, `seconds` after its arrival."""

    def next_token(self, seconds: float) -> None:
        """Note another token of an answer, `seconds` after the one before."""

    def ended(self, recent: Recent) -> None:
        """Note the end of a request."""


class Service:
    """One engine, and what all routers need beside it.

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
        self.answers = RememberedAnswers(self.memory, tokenizer)
        """Tokens of answers, for the prompts of later turns."""
        self.prompts = Prompts(
            tokenizer,
            keep_billing_header=settings.keep_billing_header,
            most_tokens=self.context_tokens,
            answers=self.answers,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        _ = self.prompts.traits  # probed now, so that no request waits for it
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
        self._told = False
        self._pending = 0
        self._short = ThreadPoolExecutor(1, thread_name_prefix="penstock-prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="penstock-long-prompts")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammars")
        self._aside = ThreadPoolExecutor(ASIDE_THREADS, thread_name_prefix="penstock-sessions")

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self.engine.alive

    async def open(self, request: Request, label: str) -> ActiveRequest:
        """Hand a request to the engine and return what its events come through.

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
        answering = ActiveRequest(self, [await self._handle(r) for r in requests], recent)
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
            handle.listen(answering.told)
        return answering

    def _in_context(self, request: Request) -> Request:
        """Leave an answer the tokens that the prompt leaves of the model's context.

        Raises:
            BadRequest: the prompt leaves none, or the answer alone is longer than the context.
        """
        prompt, most = len(request.prompt), self.model_context
        if most is None or prompt + request.max_tokens <= most:
            return request
        if prompt >= most:
            raise PromptTooLong(prompt, most)
        if request.max_tokens > most:
            raise BadRequest(
                f"This model's maximum context length is {most} tokens; "
                f"{prompt + request.max_tokens} were asked for ({prompt} in the prompt, "
                f"{request.max_tokens} in the answer). Lower max_tokens",
                code="context_length_exceeded",
                param="max_tokens",
            )
        return request.model_copy(update={"max_tokens": most - prompt})

    async def _handle(self, request: Request) -> Handle:
        """Return the engine's handle; a grammar is compiled for it, which takes long."""
        if request.grammar is None:
            return self.engine.open(request)
        return await self._in(self._compiling, self.engine.open, request)

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

    def check_tokens(self, prompt: Sequence[int]) -> None:
        """Raise BadRequest if a prompt has a token that the model does not know."""
        for token in prompt:
            if not 0 <= token < self.vocabulary_size:
                raise BadRequest(
                    f"prompt: there is no token {token}; the model knows "
                    f"{self.vocabulary_size:,} tokens, 0 to {self.vocabulary_size - 1}",
                    param="prompt",
                )

    async def ask(self, question: Callable[[EngineView], T]) -> T:
        """Have the engine's thread answer a question between two steps."""
        return await asyncio.wrap_future(self.engine.ask(question))

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a slow function in a worker thread: `await service.work(prompts.render, messages)`.

        There is one such thread for short requests, and one for long ones, which lets the other
        go first between two pieces of a text. The thread stops there once the client has gone.
        Grammars, which may take seconds to compile, have a thread of their own.

        Raises:
            ServerError: 429, as many as may wait for it do already.
        """
        hold = HOLD.get()
        worker = self._short if hold is None or hold.body_bytes < LONG_BYTES else self._long
        return await self._in(worker, call, *args, **kwargs)

    async def _in(
        self, worker: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a slow function in a worker; raises as `work`."""
        if self._pending > self.max_queue:  # one of them is at work
            raise ServerError(
                f"{self.max_queue} requests wait for their prompts to be read; try again later",
                status=429,
                code="queue_full",
            )
        loop, stop, context = asyncio.get_running_loop(), ThreadEvent(), copy_context()
        context.run(STOP.set, stop)
        self._pending += 1
        try:
            return await loop.run_in_executor(worker, partial(context.run, call, *args, **kwargs))
        finally:
            stop.set()
            self._pending -= 1

    async def aside(self, call: Callable[[], T]) -> T:
        """Run a function that waits for a disk in a thread; at most `ASIDE_THREADS` at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, call)

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
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False, cancel_futures=True)

    def wake_soon(self) -> None:
        """Have the readers look for events, each at most once; from any thread."""
        if self._told or self._loop is None:
            return
        self._told = True
        with suppress(RuntimeError):  # the loop is closed, and its readers are gone
            self._loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        self._told = False  # before events are looked for: none is missed
        for answering in self._open:
            answering.look()

    def _closed(self, answering: ActiveRequest) -> None:
        self._open.discard(answering)
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


@dataclass(slots=True)
class _Times:
    """Times of a request's tokens, in seconds of `time.monotonic`."""

    started: float = field(default_factory=time.monotonic)
    last: dict[int, float] = field(default_factory=dict)
    """Time of the last token of every answer, by the answer's number."""


class ActiveRequest:
    """A request that the engine works on. Leaving it early cancels what has not ended.

    >>> async def texts(service, request):
    ...     async with await service.open(request, "/v1/completions") as answering:
    ...         return [event.text async for event in answering]

    One task reads it, by `batches`, by iteration or by `result`.
    """

    def __init__(self, service: Service, handles: Sequence[Handle], recent: Recent) -> None:
        self.handles = tuple(handles)
        self.recent = recent
        self.finishes: dict[int, Finish] = {}
        """Ends of answers, by the answers' numbers."""
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._offsets = _offsets(handles)
        self._wake = asyncio.Event()
        self._patient = False
        self._follows = False
        self._slow = False
        self._error: BaseException | None = None
        self._closed = False
        self._times = _Times()

    @property
    def answers(self) -> int:
        """Number of answers."""
        return sum(handle.request.n for handle in self.handles)

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return len(self.finishes) == self.answers

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of reading its prompts, together; None while they wait for a place."""
        return progress_of(self.handles)

    def usage(self) -> Usage:
        """Return the usage so far, summed over the answers that have ended."""
        totals = [
            total_usage([self.finishes[i] for i in range(start, end) if i in self.finishes])
            for start, end in zip(self._offsets, [*self._offsets[1:], self.answers], strict=True)
        ]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in totals),
            cached_tokens=sum(usage.cached_tokens for usage in totals),
            completion_tokens=sum(usage.completion_tokens for usage in totals),
        )

    async def batches(self, *, with_progress: bool = False) -> AsyncIterator[list[Event]]:
        """Yield events, all that are there at once, until the last answer has ended.

        Args:
            with_progress: yield an empty list, too, when more of the prompts has been read.

        Raises:
            PenstockError: what made an answer fail: its timeout, the end of the engine, a reader
                that is too slow.
        """
        shown_tokens = -1
        self._follow_prompts(with_progress)
        while True:
            self._wake.clear()  # before the events are taken: none is missed
            events = self._take()
            progress = self.progress if self._follows else None
            if progress is not None and progress.done_tokens > shown_tokens:
                shown_tokens = progress.done_tokens
                yield []
            if events:
                yield events
            elif self._error is not None:
                raise self._error
            elif self.done:
                return
            else:
                await self._wake.wait()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.batches():
            for event in events:
                yield event

    async def result(self, http: HttpRequest | None = None) -> list[Choice]:
        """Wait for the end of all answers and return them, in the order of their numbers.

        Args:
            http: request whose client is watched: when the client goes, the answers are cancelled.

        Raises:
            ClientGone: the client has gone.
            PenstockError: as `batches`.
        """
        self._patient = True
        await (self._read_all() if http is None else until_gone(http, self._read_all()))
        return [choice for handle in self.handles for choice in handle.choices]

    def _follow_prompts(self, follows: bool) -> None:
        self._follows = follows
        for handle in self.handles if follows else ():
            handle.follow_prompt()

    async def _read_all(self) -> None:
        async for _ in self.batches():
            pass

    def told(self) -> None:
        """Have the reader look, unless it can wait; the engine's thread calls this after a step.

        A loop that is woken takes a core from the model.
        """
        if not (self._patient and self._can_wait(self._unread())):
            self._service.wake_soon()

    def look(self) -> None:
        """Wake the reader if there is something for it, or cancel if it has left too much."""
        unread = self._unread()
        if unread > self._service.settings.max_unread and not self._slow:
            self._slow = True
            for handle in self.handles:
                handle.cancel()
        if self._follows or (unread and not (self._patient and self._can_wait(unread))):
            self._wake.set()

    def _unread(self) -> int:
        unread = 0
        for handle in self.handles:
            unread += handle.unread
        return unread

    def _can_wait(self, unread: int) -> bool:
        """Tell whether nothing has come but tokens after the first one, and few of them."""
        ended = sum(handle.ends for handle in self.handles) > len(self.finishes)
        few = unread < min(PATIENCE, self._service.settings.max_unread)
        return few and not ended and self.recent.first_token_seconds is not None

    def fail(self, error: BaseException) -> None:
        """End it with an error, after the events that are there."""
        self._error = self._error or error
        self._wake.set()

    def fail_soon(self, error: BaseException) -> None:
        """Do as `fail`, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and its readers are gone
            self._loop.call_soon_threadsafe(self.fail, error)

    def close(self) -> None:
        """Cancel the answers that have not ended; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self.done:
            for handle in self.handles:
                handle.cancel()
        self._note_end()
        self._service._closed(self)

    async def __aenter__(self) -> ActiveRequest:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- events

    def _take(self) -> list[Event]:
        """Return the events that are there, numbered through, without ends that are errors."""
        events: list[Event] = []
        for offset, handle in zip(self._offsets, self.handles, strict=True):
            for event in handle.events():
                if offset:
                    event = replace(event, choice=event.choice + offset)
                if isinstance(event, Finish):
                    self.finishes[event.choice] = event
                    error = self._error_of(event)
                    if error is not None:
                        self._error = self._error or error
                        continue
                events.append(event)
        if events:
            self._note(events)
        return events

    def _error_of(self, finish: Finish) -> BaseException | None:
        if finish.error is not None:
            return finish.error
        if finish.reason == "timeout":
            return TimedOut()
        if finish.reason == "cancelled":
            if self._slow:
                return TooSlow("the client does not read its stream; it was cancelled")
            return Unavailable("the server stopped before the answer ended", code="shutting_down")
        return None

    def _note(self, events: Sequence[Event]) -> None:
        """Note the figures of new events."""
        now, times, recent = time.monotonic(), self._times, self.recent
        came: dict[int, int] = {}
        for event in events:
            if isinstance(event, Token):
                came[event.choice] = came.get(event.choice, 0) + 1
        if came and recent.first_token_seconds is None:
            recent.first_token_seconds = now - times.started
            recent.state = "running"
            for listener in self._service.listeners:
                listener.first_token(recent.first_token_seconds)
        for choice, tokens in came.items():
            recent.completion_tokens += tokens
            last = times.last.get(choice)
            times.last[choice] = now
            if last is not None:
                for listener in self._service.listeners:
                    for _ in range(tokens):
                        listener.next_token((now - last) / tokens)

    def _note_end(self) -> None:
        recent = self.recent
        recent.seconds = time.monotonic() - self._times.started
        if self.finishes:
            usage = self.usage()
            recent.cached_tokens = usage.cached_tokens
            recent.completion_tokens = max(recent.completion_tokens, usage.completion_tokens)
        if self._error is not None:
            recent.state, recent.finish = "failed", type(self._error).__name__
        elif not self.done:
            recent.state, recent.finish = "cancelled", "cancelled"
        else:
            recent.state, recent.finish = "done", self.finishes[0].reason
            for handle in self.handles:
                for choice in handle.choices:
                    request = handle.request
                    self._service.answers.remember(request.salt, request.prompt, choice.tokens)


def _offsets(handles: Sequence[Handle]) -> list[int]:
    offsets = [0]
    for handle in handles[:-1]:
        offsets.append(offsets[-1] + handle.request.n)
    return offsets


async def until_gone(http: HttpRequest, doing: Awaitable[T]) -> T:
    """Await a result as long as the client waits; its body must have been read.

    Raises:
        ClientGone: the client has closed the connection; what was done is cancelled.
    """
    task = asyncio.ensure_future(doing)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has closed the connection")
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
