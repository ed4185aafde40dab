"""Response of a server of several models, which may begin before the model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Message, Send

from penstock.server.problems import body_for, dumps, problem_of
from penstock.server.prompt_memory import HOLD
from penstock.server.second_asking import ASKING, Asking

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamForm:
    """Encoding of a stream's comments, and of an error object in it."""

    media_type: str
    comment: Callable[[str], bytes]
    error: Callable[[bytes], bytes]


EVENTS = StreamForm(
    "text/event-stream; charset=utf-8",
    lambda words: f": {words}\n\n".encode(),
    lambda body: b"event: error\ndata: " + body + b"\n\n",
)


class WaitingResponse:
    """A response whose stream may begin with comments while its model is being loaded.

    Args:
        form: encoding of the stream; None for a response that is not streamed.
        ping_seconds: interval of the comments.
    """

    def __init__(self, path: str, send: Send, form: StreamForm | None, ping_seconds: float) -> None:
        self._path = path
        self._send = send
        self._form = form or EVENTS
        self._ping_seconds = None if form is None else ping_seconds
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
            await self._write(self._form.comment(words()))

    def ask(self) -> None:
        """Begin a new attempt to answer the request."""
        if self.asking.fails and (hold := HOLD.get()) is not None:
            hold.ask_again()
        self.asking = Asking()
        ASKING.set(self.asking)

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", self._form.media_type.encode())]
            headers.append((b"cache-control", b"no-store"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, content: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})

    async def fail(self, error: BaseException) -> None:
        body = dumps(body_for(self._path, problem_of(error)))
        await self._write(self._form.error(body), more=False)

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
            await self._write(self._form.error(b"".join(self._failed)), more=False)
        return None


def _begins_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return message.get("status") == 200 and b"content-length" not in headers
