"""Forwarding of a request, retried on another replica until the response body has begun.

no body yet, status held back ──replica fails──> retried elsewhere, unnoticed by the client
body has begun                ──replica fails──> a stream ends with an error event, others are cut
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from penstock.plugins.ray.fleet_state import fleet_state
from penstock.plugins.ray.replica import USED
from penstock.server.problems import ServerError, Unavailable, body_for, problem_of, response_for
from penstock.server.sse import data

logger = logging.getLogger(__name__)

MAX_TRIES = 4
"""Maximum attempts per request, so that a crashing request does not crash all replicas."""
PAUSE_SECONDS = 0.2
"""Seconds of pause before the second attempt; each further pause is longer by as much."""
COMMENT = b":"
"""Prefix of an SSE comment, which keeps a stream alive."""


class _Failed(Exception):
    pass


class Passing:
    """A forwarded request and its answer; `silence_seconds` without data count as a failure."""

    def __init__(self, replicas: DeploymentHandle, scope: Scope, silence_seconds: float) -> None:
        self.tokens = 0
        self.retries = 0
        self._replicas = replicas
        self._scope = scope
        self._silence_seconds = silence_seconds
        self._replica: str | None = None
        """Replica of the last attempt; None if none accepted it."""
        self._start: Message | None = None
        """Status and headers, held back until the body begins."""
        self._started = False
        self._begun = False
        """Whether the client has received data other than status, headers and comments."""
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(
        self,
        forwarded: tuple[dict[str, Any], bytes],
        hint: dict[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        """Forward the request and send the answer, retrying on other replicas.

        Args:
            forwarded: ASGI scope and body for the replica.
            hint: routing hint, as keyword arguments of `Replica.answer`.
        """
        error: ServerError = Unavailable("the replicas have failed", code="replica_failed")
        try:
            while True:
                try:
                    return await self._try(forwarded, hint, send)
                except _Failed as failed:
                    if self._stopped.is_set():
                        error = Unavailable("the server is shutting down", code="shutting_down")
                        break
                    name = self._scope.get("state", {}).get("request_id", "")
                    replica = self._replica or "(none)"
                    logger.warning("request %s: replica %s failed: %s", name, replica, failed)
                    if self._begun or self.retries == MAX_TRIES - 1:
                        break
                    self.retries += 1
                    await asyncio.sleep(PAUSE_SECONDS * self.retries)
        except BackPressureError:
            error = ServerError("too many requests wait", status=429, code="queue_full")
        if not self._started:
            await response_for(self._scope["path"], error)(self._scope, receive, send)
        elif self._streams:
            event = data(body_for(self._scope["path"], problem_of(error)), "error")
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            raise error  # cuts the connection, so that the answer does not look complete

    async def _try(
        self, forwarded: tuple[dict[str, Any], bytes], hint: dict[str, Any], send: Send
    ) -> None:
        name, loop = uuid.uuid4().hex, asyncio.get_running_loop()
        ejected, replaced = asyncio.Event(), asyncio.Event()
        events = {False: ejected, True: replaced}
        fleet_state().begin(name, lambda gone: loop.call_soon_threadsafe(events[gone].set))
        stream = self._replicas.options(stream=True)
        coming = stream.answer.remote(*forwarded, attempt=name, **hint)
        tasks = [
            asyncio.ensure_future(coroutine)
            for coroutine in (
                *(self._pass_on(aiter(coming), send), self._stopped.wait()),
                *(replaced.wait(), ejected.wait()),
            )
        ]
        passing, stopped, _, leaving = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and self._begun:  # cannot be retried, and the replica may recover
                await asyncio.wait(tasks[:-1], return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                raise _Failed("the server is stopping" if stopped.done() else "it does not respond")
            passing.result()
        except BackPressureError:
            raise
        except RayTaskError:
            raise _Failed("its application failed") from None  # the error may quote a prompt
        except (RayError, RayServeException, TimeoutError) as error:
            raise _Failed(type(error).__name__) from None
        finally:
            self._replica = fleet_state().end(name)
            coming.cancel()
            for task in tasks:
                task.cancel()

    async def _pass_on(self, messages: AsyncIterator[Message], send: Send) -> None:
        while True:
            async with asyncio.timeout(self._silence_seconds):
                message = await anext(messages, None)
            if message is None:
                return
            if message["type"] == USED:
                self.tokens += message["tokens"]
            elif message["type"] == "http.response.start":
                if self._started and message["status"] != 200:
                    raise TimeoutError("the second replica rejected what the first had accepted")
                self._start = message
            else:
                await self._send_body(message, send)

    async def _send_body(self, message: Message, send: Send) -> None:
        body = message.get("body", b"")
        if not body and message.get("more_body", False):
            return
        if not self._started:
            assert self._start is not None
            self._started = True
            await send(self._start)
        self._begun = self._begun or not body.startswith(COMMENT)
        await send(message)

    @property
    def _streams(self) -> bool:
        headers = dict(self._start["headers"]) if self._start is not None else {}
        return bytes(headers.get(b"content-type", b"")).startswith(b"text/event-stream")
