"""A submitted request for its caller: events as they come, and the answers at the end."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO

from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.model.sampling import Rule
from penstock.engine.request import Event, Finish, Request, Token
from penstock.errors import EngineStopped

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5
"""Seconds between two looks of a wait at the engine's thread."""


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Token] = field(default_factory=list)
    """The events of tokens that came with their log-probability."""
    finish: Finish | None = None
    _written: StringIO = field(default_factory=StringIO, repr=False, compare=False)

    @property
    def text(self) -> str:
        """Text so far, copied at each call: a stream reads the texts of its events."""
        return self._written.getvalue()

    def take(self, event: Event) -> None:
        """Add an event. An event costs its own text, not that of the answer so far."""
        self._written.write(event.text)
        if isinstance(event, Finish):
            self.finish = event
            return
        self.tokens.append(event.token)
        if event.logprob is not None:
            self.logprobs.append(event)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of reading a prompt."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose KV was in the cache."""
    done_tokens: int
    """Tokens of the prompt that are read, the cached ones included."""
    seconds: float
    """Seconds between the start of reading and this progress."""

    @property
    def done(self) -> bool:
        """Whether the prompt is read to its end."""
        return self.done_tokens >= self.prompt_tokens

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the prompt is read, at the pace so far; None before the first chunk."""
        computed = self.done_tokens - self.cached_tokens
        if computed <= 0:
            return None
        return self.seconds / computed * (self.prompt_tokens - self.done_tokens)


class Handle:
    """A submitted request. Iterate for its events, or ask for `result`.

    Any one thread may read it. At most `n x (max_tokens + 1)` events are ever in it.
    """

    def __init__(
        self,
        request: Request,
        cancel: Callable[[Handle], None],
        alive: Callable[[], bool] = lambda: True,
        constraint: Rule | None = None,
    ) -> None:
        self.request = request
        self.constraint = constraint
        """Compiled grammar of the request; None if it is not compiled yet."""
        self.choices = [Choice() for _ in range(request.n)]
        self.prompt_logprobs: PromptLogprobs | None = None
        """Log-probabilities of the prompt, complete with the first event; None if not asked for."""
        self._cancel = cancel
        self._alive = alive
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open = request.n
        self._ends = 0
        self._listener: Callable[[], object] | None = None
        self._follows_prompt = False
        self._progress: PromptProgress | None = None
        self._read_since: float | None = None

    @property
    def done(self) -> bool:
        """Whether the end of every answer has been read."""
        return self._open == 0

    @property
    def unread(self) -> int:
        """Events that were posted and not taken yet."""
        return self._events.qsize()

    @property
    def ends(self) -> int:
        """Answers whose end was posted, taken or not."""
        return self._ends

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of reading the prompt; None while the request waits for its place."""
        return self._progress

    def follow_prompt(self) -> None:
        """Have the listener called for each chunk of the prompt as well."""
        self._follows_prompt = True

    def listen(self, callback: Callable[[], object]) -> None:
        """Have `callback` called when events are there, on the engine's thread: it must be quick.

        It is called once a step, for all handles that it listens to. If events are there already,
        it is also called at once, on this thread. So no event is missed, and one may be notified
        twice. A callback that raises is logged and not called again. An event loop listens with
        `lambda: loop.call_soon_threadsafe(wake)` and takes `events()` there.
        """
        self._listener = callback
        if self.unread:
            notify([self])

    def cancel(self) -> None:
        """Ask the engine to cancel; bytes are freed within a step. A second call does nothing."""
        self._cancel(self)

    def events(self) -> list[Event]:
        """Return the events that are there, without waiting."""
        events = []
        while not self._events.empty():
            events.append(self._take(self._events.get_nowait()))
        return events

    def __iter__(self) -> Iterator[Event]:
        """Yield events as they come, until the last answer has ended.

        Raises:
            EngineStopped: the engine is gone and nothing will come any more.
        """
        while not self.done:
            yield self._wait(None)

    def result(self, timeout_seconds: float | None = None) -> list[Choice]:
        """Wait for the end of all answers and return them.

        Raises:
            TimeoutError: they did not end in time; the request goes on.
            EngineStopped: the engine is gone.
            PenstockError: the reason why an answer failed.
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.done:
            self._wait(until)
        for choice in self.choices:
            if choice.finish is not None and choice.finish.error is not None:
                raise choice.finish.error
        return self.choices

    def post(self, event: Event) -> None:
        """Add an event; the engine's thread calls this, and `notify` when it has added all."""
        self._ends += isinstance(event, Finish)
        self._events.put(event)

    def note_prompt(self, done_tokens: int, cached_tokens: int) -> None:
        """Note how many tokens of the prompt are read; the engine's thread calls this.

        Tokens read again after a preemption are no progress.
        """
        now, before = time.monotonic(), self._progress
        if self._read_since is None:
            self._read_since = now
        done = done_tokens if before is None else max(done_tokens, before.done_tokens)
        seconds = now - self._read_since
        self._progress = PromptProgress(len(self.request.prompt), cached_tokens, done, seconds)
        if self._follows_prompt:
            notify([self])

    def _wait(self, until: float | None) -> Event:
        while True:
            left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, until - time.monotonic())
            try:
                return self._take(self._events.get(timeout=max(0.0, left)))
            except queue.Empty:
                pass
            if until is not None and time.monotonic() >= until:
                raise TimeoutError("the answer did not end in time")
            if not self._alive() and self._events.empty():
                raise EngineStopped("the engine was stopped before this request ended")

    def _take(self, event: Event) -> Event:
        self.choices[event.choice].take(event)
        self._open -= isinstance(event, Finish)
        return event


def notify(handles: Iterable[Handle]) -> None:
    """Call every listener of the handles once; the engine's thread does so after a step."""
    listening: dict[Callable[[], object], list[Handle]] = {}
    for handle in handles:
        if handle._listener is not None:
            listening.setdefault(handle._listener, []).append(handle)
    for listener, its in listening.items():
        try:
            listener()
        # A boundary: a reader's code, say a loop that was closed, must not end the engine.
        except Exception:
            for handle in its:
                handle._listener = None
            logger.exception("the listener of a request has failed and is not called again")
