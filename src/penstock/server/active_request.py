"""An in-flight request: its events, statistics and end.

engine's thread                              event loop
step ──listen──> call_soon_threadsafe ──> ActiveRequest ──> a response, or a stream
<──────────── cancel ──────────────── left early, client gone, or reader too slow
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from types import TracebackType

from starlette.requests import Request as HttpRequest

from penstock.engine.handle import Choice, Handle, PromptProgress
from penstock.engine.request import Event, Finish, Token, Usage
from penstock.server.answers import total_usage
from penstock.server.disconnect import until_gone
from penstock.server.problems import ShuttingDown, TimedOut, TooSlow
from penstock.server.prompt_progress import progress_of
from penstock.server.recent import Listener, Recent
from penstock.server.second_asking import ALONE, ASKING, GaveWay

PATIENCE = 32
"""Events that may queue for a non-streaming client, since each wake-up costs engine time."""


@dataclass(slots=True)
class _Times:
    """Start of a request and latest token of each answer, in seconds of `time.monotonic`."""

    started: float = field(default_factory=time.monotonic)
    last: dict[int, float] = field(default_factory=dict)


class ActiveRequest:
    """A request in the engine; leaving its context early cancels its open answers.

    >>> async def texts(service, request):
    ...     async with await service.open(request, "/v1/completions") as answering:
    ...         return [event.text async for event in answering]

    Only one task may read the events, through `batches`, iteration or `result`.

    Args:
        handles: engine handles, one per prompt.
        recent: statistics of the request, updated here.
        listeners: observers of its token latencies.
        max_unread: unread events above which the request is cancelled.
        wake_soon: schedules `look` on the event loop; called from any thread.
        closed: called once, when the request closes.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        recent: Recent,
        *,
        listeners: Sequence[Listener],
        max_unread: int,
        wake_soon: Callable[[], None],
        closed: Callable[[ActiveRequest], None],
    ) -> None:
        self.handles = tuple(handles)
        self.recent = recent
        self.finishes: dict[int, Finish] = {}
        self._listeners = listeners
        self._max_unread = max_unread
        self._wake_soon = wake_soon
        self._on_close = closed
        self._loop = asyncio.get_running_loop()
        self._offsets = _offsets(handles)
        self._wake = asyncio.Event()
        self._patient = False
        self._follows = False
        self._slow = False
        self._error: BaseException | None = None
        self._closed = False
        self._times = _Times()
        self._asking = ASKING.get(ALONE)

    @property
    def answers(self) -> int:
        return sum(handle.request.n for handle in self.handles)

    @property
    def done(self) -> bool:
        return len(self.finishes) == self.answers

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of all prompts together; None while they wait for admission."""
        return progress_of(self.handles)

    def usage(self) -> Usage:
        totals = [
            total_usage([self.finishes[i] for i in range(start, end) if i in self.finishes])
            for start, end in zip(self._offsets, [*self._offsets[1:], self.answers], strict=True)
        ]
        return Usage(*map(sum, zip(*map(astuple, totals), strict=True)))

    async def batches(self, *, with_progress: bool = False) -> AsyncIterator[list[Event]]:
        """Yield batches of events until the last answer ends."""
        shown_tokens = -1
        self._follows = with_progress
        for handle in self.handles if with_progress else ():
            handle.follow_prompt()
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
        self._patient = True
        await (self._read_all() if http is None else until_gone(http, self._read_all()))
        return [choice for handle in self.handles for choice in handle.choices]

    async def _read_all(self) -> None:
        async for _ in self.batches():
            pass

    def notify(self) -> None:
        """Wake the reader unless it can wait, since each wake-up takes CPU time from the model."""
        if not (self._patient and self._can_wait(self._unread())):
            self._wake_soon()

    def look(self) -> None:
        """Wake the reader if events are pending; cancel the request if too many are unread."""
        unread = self._unread()
        if unread > self._max_unread and not self._slow:
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
        """Return whether only a few tokens after the first are pending."""
        ended = sum(handle.ends for handle in self.handles) > len(self.finishes)
        few = unread < min(PATIENCE, self._max_unread)
        return few and not ended and self.recent.first_token_seconds is not None

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wake.set()

    def give_way(self) -> None:
        """Fail with `GaveWay`; the client notices only if the request cannot be retried."""
        self._asking.fails = not self._asking.has_sent
        self.fail(GaveWay())

    def fail_soon(self, error: BaseException) -> None:
        with suppress(RuntimeError):  # the loop is closed, so there are no readers
            self._loop.call_soon_threadsafe(self.fail, error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.done:
            for handle in self.handles:
                handle.cancel()
        self._note_end()
        self._on_close(self)

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
        """Return the pending events, numbered by answer; errors are recorded instead."""
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
            return ShuttingDown("the server stopped before the answer ended")
        return None

    def _note(self, events: Sequence[Event]) -> None:
        now, times, recent = time.monotonic(), self._times, self.recent
        came: dict[int, int] = {}
        for event in events:
            if isinstance(event, Token):
                came[event.choice] = came.get(event.choice, 0) + 1
        if came and recent.first_token_seconds is None:
            recent.first_token_seconds = now - times.started
            recent.state = "running"
            for listener in self._listeners:
                listener.first_token(recent.first_token_seconds)
        for choice, tokens in came.items():
            recent.completion_tokens += tokens
            last = times.last.get(choice)
            times.last[choice] = now
            if last is not None:
                for listener in self._listeners:
                    for _ in range(tokens):
                        listener.next_token((now - last) / tokens)

    def _note_end(self) -> None:
        recent = self.recent
        recent.seconds = time.monotonic() - self._times.started
        recent.phases = list(self.handles[0].phases)
        if self.finishes:
            usage = self.usage()
            recent.cached_tokens = usage.cached_tokens
            recent.completion_tokens = max(recent.completion_tokens, usage.completion_tokens)
        if not self.done and (progress := self.progress) is not None:
            recent.cached_tokens = max(recent.cached_tokens, progress.cached_tokens)
        if self._error is not None:
            recent.state, recent.finish = "failed", type(self._error).__name__
        elif not self.done:
            recent.state, recent.finish = "cancelled", "cancelled"
        else:
            recent.state, recent.finish = "done", self.finishes[0].reason


def _offsets(handles: Sequence[Handle]) -> list[int]:
    offsets = [0]
    for handle in handles[:-1]:
        offsets.append(offsets[-1] + handle.request.n)
    return offsets
