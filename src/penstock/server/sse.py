"""Streams of server-sent events: kept alive while a prompt is read, ended when not read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from penstock.engine.handle import PromptProgress
from penstock.server.active_request import ActiveRequest
from penstock.server.problems import body_for, dumps, problem_of
from penstock.server.prompt_progress import ping_comment
from penstock.server.service import Service

logger = logging.getLogger(__name__)

LOOKS = 4
"""Number of looks at a send within its timeout."""

EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
"""Schema of a stream's events, for the OpenAPI document; their data is JSON, or `[DONE]`."""


def data(content: Any, event: str | None = None) -> bytes:
    r"""Write one event with `content` as its JSON.

    >>> data({"n": 1}), data({}, "ping")
    (b'data: {"n":1}\n\n', b'event: ping\ndata: {}\n\n')
    """
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + dumps(content) + b"\n\n"


class Stream(EventSourceResponse):
    """A stream of a request's events. However it ends, open answers are cancelled.

    Args:
        service: for its settings.
        path: of the request; errors have the form that clients of it expect.
        answering: closed at the end; None if there is no request behind the stream.
        events: written as they come. Raises a PenstockError to end with an `error` event.
        headers: of the response, beside the content type.
        ping: makes the event that keeps the stream alive, from the progress of the prompt.
    """

    def __init__(
        self,
        service: Service,
        path: str,
        answering: ActiveRequest | None,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        *,
        ping: Callable[[PromptProgress | None], ServerSentEvent] = ping_comment,
    ) -> None:
        super().__init__(
            _with_error(path, events),
            ping=service.settings.ping_seconds,
            ping_message_factory=lambda: ping(answering.progress if answering else None),
            send_timeout=service.settings.send_timeout_seconds,
            headers={"Content-Type": "text/event-stream; charset=utf-8", **(headers or {})},
        )
        self._answering = answering
        self._send_scope = anyio.CancelScope()
        self._sending_since: float | None = None

    async def _stream_response(self, send: Send) -> None:
        """Stream inside one scope, and look from time to time whether a send takes too long.

        A scope for every send, as sse-starlette makes them, takes a seventh of a stream's time.
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
        """End the stream if its reader has taken nothing for too long."""
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
            logger.info("a stream was ended: its reader did not read it")
        finally:
            if self._answering is not None:
                self._answering.close()


async def _with_error(path: str, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass events on; an error after the first byte is an event too, and the last one."""
    try:
        async for event in events:
            yield event
    # A boundary: the status has been sent, so nothing above could tell the client any more.
    except Exception as error:
        problem = problem_of(error)
        if problem.status == 500:
            logger.error("a stream has failed: %s", type(error).__name__)
            logger.debug("its error", exc_info=error)
        yield data(body_for(path, problem), "error")
