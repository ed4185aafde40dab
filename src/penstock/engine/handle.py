"""Handle of a submitted request: its events as they arrive, and its answers at the end."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO

from penstock.engine.model.prompt_logprobs import LastOutput, PromptLogprobs
from penstock.engine.model.sampling import Rule
from penstock.engine.request import Event, Finish, Request, Token
from penstock.errors import EngineStopped
from penstock.kv.numpy_arrays import Floats

logger = logging.getLogger(__name__)

MAX_PHASES = 64
WAIT_SECONDS = 0.5
"""Interval at which a waiting caller checks that the engine is alive."""


@dataclass(slots=True)
class Choice:
    """One answer, as generated so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    _written: StringIO = field(default_factory=StringIO, repr=False, compare=False)

    @property
    def text(self) -> str:
        """Text generated so far. Each access copies it; to stream, read the text of each event."""
        return self._written.getvalue()

    def take(self, event: Event) -> None:
        """Append an event, in time proportional to the event's text, not to the answer."""
        self._written.write(event.text)
        if isinstance(event, Finish):
            self.finish = event
            return
        self.tokens.append(event.token)
        if event.logprob is not None:
            self.logprobs.append(event)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the cache."""
    done_tokens: int
    """Prompt tokens processed so far, cached tokens included."""
    seconds: float
    """Seconds since the start of the prefill."""

    @property
    def done(self) -> bool:
        """Whether the whole prompt has been processed."""
        return self.done_tokens >= self.prompt_tokens

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the prefill ends; None before the first chunk."""
        computed = self.done_tokens - self.cached_tokens
        if computed <= 0:
            return None
        return self.seconds / computed * (self.prompt_tokens - self.done_tokens)


class Handle:
    """Handle of a submitted request. Iterate over its events, or wait for `result`.

    Only one thread at a time may read it. It queues at most `n x (max_tokens + 1)` events.
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
        """Compiled grammar of the request; None if not compiled yet."""
        self.choices = [Choice() for _ in range(request.n)]
        self.phases: list[tuple[str, float]] = []
        """States that the first answer entered, with their `time.time()`; at most `MAX_PHASES`."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Log-probabilities of the prompt, complete at the first event; None if not requested."""
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
    def embedding(self) -> Floats | None:
        """Output (width,) of a request with `embeds`, complete at the first event; else None."""
        output = self.prompt_logprobs
        return output.values if isinstance(output, LastOutput) else None

    @property
    def done(self) -> bool:
        """Whether the `Finish` of every answer has been read from this handle."""
        return self._open == 0

    @property
    def unread(self) -> int:
        return self._events.qsize()

    @property
    def ends(self) -> int:
        """Number of answers whose `Finish` was queued, read or not."""
        return self._ends

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of the prefill; None while the request waits in the queue."""
        return self._progress

    def follow_prompt(self) -> None:
        """Also call the listener after each chunk of the prompt."""
        self._follows_prompt = True

    def listen(self, callback: Callable[[], object]) -> None:
        """Register a callback for new events.

        The callback runs on the engine's thread and must return quickly. It is called once per step
        for all handles that share it. If events are already queued, it is also called immediately,
        on this thread. No event is missed, but the callback may run twice for one event. If it
        raises, the error is logged and it is not called again. For an event loop, register
        `lambda: loop.call_soon_threadsafe(wake)` and read `events()` in `wake`.
        """
        self._listener = callback
        if self.unread:
            notify([self])

    def cancel(self) -> None:
        """Ask the engine to cancel the request; memory is freed within a step. Idempotent."""
        self._cancel(self)

    def events(self) -> list[Event]:
        """Return all queued events, without waiting."""
        events = []
        while not self._events.empty():
            events.append(self._take(self._events.get_nowait()))
        return events

    def __iter__(self) -> Iterator[Event]:
        """Yield events as they arrive, until the last answer has ended.

        Raises:
            EngineStopped: the engine stopped before the answers ended.
        """
        while not self.done:
            yield self._wait(None)

    def result(self, timeout_seconds: float | None = None) -> list[Choice]:
        """Wait until all answers have ended, and return them.

        Raises:
            TimeoutError: an answer did not end in time; the request continues.
            EngineStopped: the engine stopped before the answers ended.
            PenstockError: the error of a failed answer.
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.done:
            self._wait(until)
        for choice in self.choices:
            if choice.finish is not None and choice.finish.error is not None:
                raise choice.finish.error
        return self.choices

    def post(self, event: Event) -> None:
        """Queue an event. Engine thread only; call `notify` after the last event."""
        self._ends += isinstance(event, Finish)
        self._events.put(event)

    def note_prompt(self, done_tokens: int, cached_tokens: int) -> None:
        """Update the progress of the prefill. Engine thread only.

        Tokens recomputed after a preemption do not count as progress.
        """
        now, before = time.monotonic(), self._progress
        if self._read_since is None:
            self._read_since = now
        done = done_tokens if before is None else max(done_tokens, before.done_tokens)
        seconds = now - self._read_since
        self._progress = PromptProgress(len(self.request.prompt), cached_tokens, done, seconds)
        if self._follows_prompt:
            notify([self])

    def note_phase(self, state: str) -> None:
        """Record that the first answer enters a state. Engine thread only."""
        if len(self.phases) < MAX_PHASES:
            self.phases.append((state, time.time()))

    def _wait(self, until: float | None) -> Event:
        while True:
            left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, until - time.monotonic())
            try:
                return self._take(self._events.get(timeout=max(0.0, left)))
            except queue.Empty:
                pass
            if until is not None and time.monotonic() >= until:
                raise TimeoutError("the request did not finish in time")
            if not self._alive() and self._events.empty():
                raise EngineStopped("the engine was stopped before this request ended")

    def _take(self, event: Event) -> Event:
        self.choices[event.choice].take(event)
        self._open -= isinstance(event, Finish)
        return event


def notify(handles: Iterable[Handle]) -> None:
    """Call each listener of the handles once. Engine thread only, after a step."""
    listening: dict[Callable[[], object], list[Handle]] = {}
    for handle in handles:
        if handle._listener is not None:
            listening.setdefault(handle._listener, []).append(handle)
    for listener, its in listening.items():
        try:
            listener()
        # Errors of the caller's code, such as a closed event loop, must not stop the engine.
        except Exception:
            for handle in its:
                handle._listener = None
            logger.exception("the listener of a request failed and will not be called again")
