"""Response of a server of several models, which may begin before the model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.types import Message, Send

from penstock.server.problems import problem_of
from penstock.server.prompt_memory import HOLD
from penstock.server.second_asking import ASKING, Asking
from penstock.server.sse import error_event

T = TypeVar("T")


class WaitingResponse:
    """A response whose stream may begin with comments while its model is being loaded."""

    def __init__(self, path: str, send: Send, ping_seconds: float | None) -> None:
        self._path = path
        self._send = send
        self._ping_seconds = ping_seconds
        self.begun = False
        self.asking = Asking()
        self._failed: list[bytes] | None = None

    async def during(self, entered: asyncio.Future[T], words: Callable[[], str]) -> T:
        """Wait for a model; every `ping_seconds`, send `words` as a comment of the stream."""
        while True:
            await asyncio.wait((entered,), timeout=self._ping_seconds)
            if entered.done():
                return entered.result()
            await self._begin()
            await self._write(f": {words()}\n\n".encode())

    def ask(self) -> None:
        """Begin a new attempt to answer the request."""
        if self.asking.fails and (hold := HOLD.get()) is not None:
            hold.ask_again()
        self.asking = Asking()
        ASKING.set(self.asking)

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            headers.append((b"cache-control", b"no-store"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, content: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})

    async def fail(self, error: BaseException) -> None:
        await self._write(error_event(self._path, problem_of(error)), more=False)

    async def send(self, message: Message) -> None:
        """Forward a message of the model's application; drop its start if one was sent."""
        if self.asking.fails:
            return None
        if not self.begun:
            self.begun = _begins_stream(message)
            return await self._send(message)
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                self._failed = []  # collects the error object, to send it as an event
            return None
        if self._failed is None:
            return await self._send(message)
        self._failed.append(message.get("body", b""))
        if not message.get("more_body", False):
            await self._write(
                b"event: error\ndata: " + b"".join(self._failed) + b"\n\n", more=False
            )
        return None


def _begins_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return message.get("status") == 200 and b"content-length" not in headers
