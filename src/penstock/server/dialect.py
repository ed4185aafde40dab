"""`Dialect`: base of the request handlers of all APIs.

    body ──read──> tokens ──rules──> grammar ──requests──> Service ──> events ──chunk──> a stream
                                                                          └────whole──> an object

A new API is one file: a subclass, and a route that calls `respond`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from sse_starlette import ServerSentEvent
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.handle import Choice, PromptProgress
from penstock.engine.request import Event, Finish, ReasoningBudget, Request
from penstock.server.active_request import ActiveRequest
from penstock.server.answers import Delta, Reader
from penstock.server.disconnect import until_gone
from penstock.server.problems import Problem, dumps
from penstock.server.prompt_progress import ping_comment
from penstock.server.second_asking import ALONE, ASKING
from penstock.server.service import Service
from penstock.server.sse import Stream, error_event
from penstock.server.tools.calls import UNENFORCED, CallGrammar, named_header
from penstock.server.workers import LONG_BYTES


class Dialect(ABC):
    """A request, from body to response. Methods run on the event loop unless noted."""

    path: ClassVar[str]
    """Path of the route, used as the metrics label and to choose the error format."""
    answering: ActiveRequest

    def __init__(self, service: Service, *, streams: bool) -> None:
        self.service = service
        self.streams = streams
        self.headers: dict[str, str] = {}
        """Response headers; `read` may add to them."""
        self.rule = CallGrammar(None)
        self.in_reasoning = False
        self.readers: list[Reader] = []

    async def respond(self, http: HttpRequest) -> Response:
        """Serve the request as one object or a stream; stop if the client disconnects."""
        service = self.service
        await until_gone(http, service.work(self.read))
        if self.binds():
            self.rule = await until_gone(http, service.workers.compile(self.rules))
            self.headers |= named_header(UNENFORCED, self.rule.unenforced)
        self.answering = await until_gone(http, service.open_all(self.requests(), self.path))
        if self.streams:
            events = self._events()
            return Stream(
                service, self.answering, events, self.failure, self.headers, ping=self.ping
            )
        async with self.answering:
            choices = await self.answering.result(http)
            write = partial(self._written, choices, await self.usage())
            return await service.workers.write(write) if self.is_long(choices) else write()

    # ---- the request

    @abstractmethod
    def read(self) -> None:
        """Tokenize the body. Worker thread."""

    def binds(self) -> bool:
        return False

    def rules(self) -> CallGrammar:
        """Return the grammar of the answers; called only if `binds()`. Worker thread."""
        return CallGrammar(None)

    @abstractmethod
    def requests(self) -> Sequence[Request]: ...

    # ---- the answer

    @abstractmethod
    async def usage(self) -> dict[str, Any]: ...

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the response object. Worker thread if `is_long()`."""

    def begin(self) -> Iterable[bytes]:
        return ()

    @abstractmethod
    def chunk(self, events: Sequence[Event]) -> Iterable[bytes]:
        """Return the stream events for a batch. Worker thread if `is_long_chunk()`."""

    def progress(self) -> Iterable[bytes]:
        return ()

    def end(self, usage: dict[str, Any]) -> Iterable[bytes]:
        """Return the last stream events; `usage` is empty unless `streams_usage`."""
        return ()

    def failure(self, problem: Problem) -> Iterable[bytes]:
        yield error_event(self.path, problem)

    def ping(self, progress: PromptProgress | None) -> ServerSentEvent:
        return ping_comment(progress)

    @property
    def streams_usage(self) -> bool:
        return True

    def batches(self) -> AsyncIterator[list[Event]]:
        return self.answering.batches()

    def is_long(self, choices: Sequence[Choice]) -> bool:
        return sum(len(choice.text) for choice in choices) > LONG_BYTES

    def is_long_chunk(self, events: Sequence[Event]) -> bool:
        return False

    # ---- for implementations

    def budget(
        self, prompt: Sequence[int], limit: ReasoningBudget | None = None
    ) -> ReasoningBudget | None:
        """Return the reasoning budget to use, and set `in_reasoning`.

        A grammar that includes the reasoning replaces `limit` by None; another one, by a budget
        for the reasoning that the prompt has opened.
        """
        prompts, bound = self.service.prompts, self.rule.grammar is not None
        if bound and self.rule.free:
            limit = None
        elif bound and not (limit is not None and limit.inside):
            limit = prompts.open_reasoning(prompt)
        is_open = not bound or self.rule.free or limit is not None
        self.in_reasoning = is_open and prompts.starts_in_reasoning(prompt)
        return limit

    def delta(self, event: Event) -> Delta:
        reader = self.readers[event.choice]
        return reader.end(event) if isinstance(event, Finish) else reader.push(event.text)

    def reasoning_tokens(self) -> int:
        count = self.service.prompts.reasoning_tokens
        choices = (choice for handle in self.answering.handles for choice in handle.choices)
        return sum(count(choice.tokens, inside=self.in_reasoning) for choice in choices)

    # ---- the driver

    def _written(self, choices: Sequence[Choice], usage: dict[str, Any]) -> Response:
        whole = dumps(self.whole(choices, usage))
        return Response(whole, headers=self.headers, media_type="application/json")

    async def _events(self) -> AsyncIterator[bytes]:
        asking = ASKING.get(ALONE)
        if asking.has_sent:
            for written in self.begin():
                yield written
        async for events in self.batches():
            if not asking.has_sent:  # until now the request can be retried
                asking.has_sent = True
                for written in self.begin():
                    yield written
            written_events = self.chunk(events) if events else self.progress()
            if not self.is_long_chunk(events):
                for written in written_events:
                    yield written
                continue
            step = partial(next, iter(written_events), None)
            while (long := await self.service.workers.write(step)) is not None:
                yield long
        for written in self.end(await self.usage() if self.streams_usage else {}):
            yield written
