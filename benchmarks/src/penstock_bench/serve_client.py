"""Load generators for a server: chat completions over sockets, with timestamps.

closed loop   a session sends its next turn after the last answer
open loop     requests arrive independently of the server's answers
crowd         many connections at the same moment
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import h11
import httpx

PATIENCE_SECONDS = 600.0
"""Timeout for the next byte, in seconds, long enough for slow servers."""
FORK_AFTER = 2
"""Number of turns after which a forking session splits."""
EDIT_AT = 3
"""Turn, from 0, at which a session with an edit replaces the previous turn."""

CHAT = "/v1/chat/completions"

Message = dict[str, str]


@dataclass(slots=True)
class Reply:
    """Answer to one request. Times are seconds of the benchmark's clock."""

    turn: int
    sent: float
    text_times: list[float] = field(default_factory=list)
    """Times of the pieces of text; a single one without streaming."""
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def first_seconds(self) -> float:
        """Seconds from the request to the first piece of text."""
        return self.text_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces of text."""
        return [b - a for a, b in zip(self.text_times, self.text_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Session:
    """Lines of one agent, turn by turn, after the system prompt."""

    lines: Sequence[str]
    fork: Sequence[str] = ()
    """Lines of the second branch from `FORK_AFTER` on."""
    edit: str | None = None
    """Line at `EDIT_AT` that replaces the previous turn."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.lines) + len(self.fork)


class Client:
    """Client that sends chat completions to one server, with as many connections as needed."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self.open = 0
        self.most_open = 0
        """Maximum number of concurrent requests."""
        self.on_reply: Callable[[], None] = lambda: None
        """Called at the end of each request."""

    async def ask(
        self, messages: Sequence[Message], max_tokens: int, *, turn: int = 0, stream: bool = True
    ) -> Reply:
        """Send one request and read its answer to the end; errors are stored in the reply."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        reply = Reply(turn, time.perf_counter())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await (self._streamed(body, reply) if stream else self._whole(body, reply))
        except (httpx.HTTPError, h11.ProtocolError, OSError, ValueError, KeyError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            self.open -= 1
            self.on_reply()
        reply.ended = reply.ended or time.perf_counter()
        if reply.error is None and not reply.completion_tokens:
            reply.error = "the answer ended without its usage"
        return reply

    async def _streamed(self, body: dict[str, Any], reply: Reply) -> None:
        """Read a stream on a separate connection; bytes are parsed after the end.

        The server runs on the same machine, and parsing takes processor time: httpx takes 170 us
        per piece, more than the server.
        """
        request = self._http.build_request("POST", CHAT, json=body, headers={"Connection": "close"})
        http = h11.Connection(h11.CLIENT)
        head = h11.Request(
            method=request.method, target=request.url.raw_path, headers=request.headers.raw
        )
        parts = [
            http.send(event) for event in (head, h11.Data(request.content), h11.EndOfMessage())
        ]
        loop = asyncio.get_running_loop()
        transport, pieces = await loop.create_connection(
            _Pieces, request.url.host, request.url.port or 80
        )
        try:
            transport.writelines([part for part in parts if part])
            while True:
                taken = len(pieces.came)
                try:
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await asyncio.shield(pieces.ended)
                    break
                except TimeoutError:
                    if len(pieces.came) == taken:
                        raise
        finally:
            transport.close()
        came = pieces.came
        reply.ended = came[-1][0]
        _read(http, came, reply)

    async def _whole(self, body: dict[str, Any], reply: Reply) -> None:
        response = await self._http.post(CHAT, json=body)
        if response.status_code != httpx.codes.OK:
            reply.error = f"{response.status_code}: {response.content[:200]!r}"
            return
        body = response.json()
        reply.text = body["choices"][0]["message"]["content"] or ""
        reply.text_times.append(time.perf_counter())
        _count(body["usage"], reply)


Send = Callable[[Client], Awaitable[list[Reply]]]
"""Load to put on a server."""


class _Pieces(asyncio.Protocol):
    """Protocol that records received bytes with timestamps; an empty piece marks the end."""

    def __init__(self) -> None:
        self.came: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.came.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.came.append((time.perf_counter(), b""))
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _read(http: h11.Connection, pieces: Sequence[tuple[float, bytes]], reply: Reply) -> None:
    """Parse the response from pieces and their timestamps."""
    status, rest = 0, b""
    for received, piece in pieces:
        http.receive_data(piece)
        while (event := http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data) and status == httpx.codes.OK:
                *lines, rest = (rest + event.data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        _take(json.loads(line[6:]), reply, received)
            elif isinstance(event, h11.Data):
                rest += event.data
    if status != httpx.codes.OK:
        reply.error = f"{status}: {rest[:200]!r}"


def _take(chunk: dict[str, Any], reply: Reply, received: float) -> None:
    """Add the text, the usage or the error of one stream event."""
    if "error" in chunk:
        reply.error = str(chunk["error"])
    for choice in chunk.get("choices", ()):
        text = choice["delta"].get("content")
        if text:
            reply.text += text
            reply.text_times.append(received)
    if chunk.get("usage"):
        _count(chunk["usage"], reply)


def _count(usage: dict[str, Any], reply: Reply) -> None:
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.completion_tokens = usage["completion_tokens"]
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@asynccontextmanager
async def connected(url: str, model: str) -> AsyncIterator[Client]:
    """Yield a client without connection limit and without proxy."""
    async with httpx.AsyncClient(
        base_url=url,
        timeout=PATIENCE_SECONDS,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    ) as http:
        yield Client(http, model)


# ---------------------------------------------------------------- loads


async def closed_loop(
    client: Client, system: str, sessions: Sequence[Session], max_tokens: int
) -> list[Reply]:
    """Run all sessions concurrently; return every reply."""
    replies: list[Reply] = []

    async def talk(messages: list[Message], said: Sequence[str], first: int, of: Session) -> None:
        for turn, line in enumerate(said, first):
            if turn == EDIT_AT and of.edit is not None:
                del messages[-2:]
                line = of.edit
            messages.append({"role": "user", "content": line})
            reply = await client.ask(messages, max_tokens, turn=turn)
            replies.append(reply)
            if reply.error is not None:
                return
            messages.append({"role": "assistant", "content": reply.text})
            if turn + 1 == FORK_AFTER and of.fork:
                branches.create_task(talk(list(messages), of.fork, FORK_AFTER, Session(of.fork)))

    async with asyncio.TaskGroup() as branches:
        for session in sessions:
            start = [{"role": "system", "content": system}]
            branches.create_task(talk(start, session.lines, 0, session))
    return replies


async def open_loop(
    client: Client, system: str, said: Sequence[str], times: Sequence[float], max_tokens: int
) -> list[Reply]:
    """Send one request at each of `times` (seconds from now), regardless of open ones."""

    async def send(line: str, delay: float) -> Reply:
        await asyncio.sleep(delay)
        start = [{"role": "system", "content": system}, {"role": "user", "content": line}]
        return await client.ask(start, max_tokens)

    sent = (send(line, delay) for line, delay in zip(said, times, strict=True))
    return list(await asyncio.gather(*sent))


async def at_once(
    client: Client, said: Sequence[Sequence[Message]], max_tokens: int, *, stream: bool = True
) -> list[Reply]:
    """Send all requests at the same moment."""
    sent = (client.ask(messages, max_tokens, stream=stream) for messages in said)
    return list(await asyncio.gather(*sent))


# ---------------------------------------------------------------- figures


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` per cent of the values do not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0, 3.0, 2.0], 95)
    (2.0, 4.0)
    """
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]
