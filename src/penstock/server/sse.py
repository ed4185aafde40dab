"""Server-sent event streams, kept alive during prefill and closed if the client does not read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Protocol

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from penstock.config import ServerSettings
from penstock.engine.handle import PromptProgress
from penstock.server.active_request import ActiveRequest
from penstock.server.problems import REQUEST_ID, Problem, body_for, dumps, problem_of
from penstock.server.prompt_progress import ping_comment

logger = logging.getLogger(__name__)

LOOKS = 4
"""Number of timeout checks per `send_timeout`."""

EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def data(content: Any, event: str | None = None) -> bytes:
    r"""Encode one event with JSON data.

    >>> data({"n": 1}), data({}, "ping")
    (b'data: {"n":1}\n\n', b'event: ping\ndata: {}\n\n')
    """
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + dumps(content) + b"\n\n"


def error_event(path: str, problem: Problem) -> bytes:
    return data(body_for(path, problem), "error")


class Streaming(Protocol):
    """Owner of streams: a `Service`, or `SeveralModels`."""

    draining: bool

    @property
    def settings(self) -> ServerSettings: ...


class Stream(EventSourceResponse):
    """Response that streams events; when it ends, unfinished answers are cancelled.

    Args:
        service: service whose settings apply.
        answering: request to close at the end; None for a stream without one.
        events: encoded events; if they raise, those of `failure` follow.
        failure: returns the last events for an error.
        headers: additional response headers.
        ping: returns the keep-alive event, given the prompt's progress.
    """

    def __init__(
        self,
        service: Streaming,
        answering: ActiveRequest | None,
        events: AsyncIterator[bytes],
        failure: Callable[[Problem], Iterable[bytes]],
        headers: Mapping[str, str] | None = None,
        *,
        ping: Callable[[PromptProgress | None], ServerSentEvent] = ping_comment,
    ) -> None:
        super().__init__(
            _with_error(events, failure),
            ping=service.settings.ping_seconds,
            ping_message_factory=lambda: ping(answering.progress if answering else None),
            send_timeout=service.settings.send_timeout_seconds,
            headers={"Content-Type": "text/event-stream; charset=utf-8", **(headers or {})},
        )
        self._answering = answering
        self._send_scope = anyio.CancelScope()
        self._sending_since: float | None = None

    async def _stream_response(self, send: Send) -> None:
        """Stream inside one cancel scope, and check the send timeout periodically.

        A scope for every send, as in sse-starlette, takes a seventh of the streaming time.
        """
        self._look()
        try:
            with self._send_scope:
                await super()._stream_response(send)
        finally:
            self._next_look.cancel()
        if self._send_scope.cancel_called:
            raise SendTimeoutError

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    def _look(self) -> None:
        assert self.send_timeout is not None
        since = self._sending_since
        if since is not None and time.monotonic() - since >= self.send_timeout:
            self._send_scope.cancel()
        delay = self.send_timeout / LOOKS
        self._next_look = asyncio.get_running_loop().call_later(delay, self._look)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info("closed a stream because its client does not read it")
        finally:
            if self._answering is not None:
                self._answering.close()


async def _with_error(
    events: AsyncIterator[bytes], failure: Callable[[Problem], Iterable[bytes]]
) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield event
    # A boundary: the status has been sent, so only an event can report the error.
    except Exception as error:
        problem = problem_of(error)
        if problem.status == 500:
            name = REQUEST_ID.get()
            logger.error("stream of request %s failed with %s", name, type(error).__name__)
            logger.debug("traceback of request %s", name, exc_info=error)
        for event in failure(problem):
            yield event
