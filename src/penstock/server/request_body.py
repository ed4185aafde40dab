"""Request bodies: scanned on arrival, refused if too costly, parsed off the event loop.

    part ──BodyScan──> cost, depth ──too much?──> the rest is discarded ──> 400, 413 or 503
    whole body ──up to 64 KiB──> parsed on the event loop
               ──longer────────> parsed and validated in a worker thread

No step on the event loop takes longer than scanning one part.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config import ServerSettings
from penstock.plurals import counted
from penstock.server.access import CLIENT
from penstock.server.body_scan import BodyScan
from penstock.server.disconnect import until_gone
from penstock.server.half_pairs import whole_pairs_in
from penstock.server.problems import BadRequest, ServerError, TooLarge, response_for
from penstock.server.prompt_memory import HOLD, PromptHold, PromptMemory
from penstock.server.service import ARRIVED
from penstock.server.workers import LONG_BYTES

T = TypeVar("T")
P = ParamSpec("P")


class Body:
    """Middleware that reads a request's whole body and enforces limits."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, memory: PromptMemory) -> None:
        self.app = app
        self._settings = settings
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self.app(scope, receive, send)
        hold = self._memory.hold(CLIENT.get())
        try:
            return await self._serve(scope, receive, send, hold)
        finally:
            hold.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, hold: PromptHold) -> None:
        try:
            body = await self._read(scope, receive, hold)
        except ServerError as error:
            response = response_for(scope["path"], error)
            response.headers["Connection"] = "close"  # the rest of the body is not read
            return await response(scope, receive, send)
        if body is None:
            return None
        ARRIVED.set(time.monotonic())
        HOLD.set(hold)
        delivered = False

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, hold: PromptHold) -> bytes | None:
        """Return the body, with its memory held; None if the client has disconnected."""
        length = Headers(scope=scope).get("content-length", "0")
        limit = self._settings.max_body_bytes
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise _too_large(limit)
        arriving = _Arriving(self._settings, hold)
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    arriving.add(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            seconds = self._settings.body_timeout_seconds
            raise ServerError(
                f"the body did not arrive within {seconds:.0f} s", status=408
            ) from None
        if not _is_json(scope):
            raise ServerError(
                "send this with Content-Type: application/json, which web pages from other origins "
                "can only send if --cors-origin allows it",
                status=415,
                code="not_json",
            )
        return arriving.whole()


class _Arriving:
    def __init__(self, settings: ServerSettings, hold: PromptHold) -> None:
        self._settings = settings
        self._hold = hold
        self._parts: list[bytes] = []
        self._scan = BodyScan()
        self._refusal: ServerError | None = None

    def add(self, part: bytes) -> None:
        """Add a part; raises TooLarge beyond the byte limit."""
        if self._refusal is not None:
            self._scan.nbytes += len(part)
        else:
            self._scan.add(part)
        if self._scan.nbytes > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)
        if self._refusal is None:
            try:
                self._check(part)
            except ServerError as error:  # raised at the end, when the client reads
                self._refusal = error
                self._parts.clear()
                self._hold.resize(0)

    def _check(self, part: bytes) -> None:
        if self._scan.depth > self._settings.max_depth:
            raise BadRequest(
                f"the body has more than {self._settings.max_depth} nested brackets",
                code="too_deep",
            )
        self._hold.check_fits(self._scan.cost[0])
        self._hold.resize(2 * self._scan.nbytes)  # the parts are joined at the end
        self._parts.append(part)

    def whole(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        self._hold.take_body(self._scan)
        return whole_pairs_in(b"".join(self._parts))


_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.ASCII | re.IGNORECASE)


def _is_json(scope: Scope) -> bool:
    """Return whether the content type is JSON; methods other than POST may omit it.

    Browsers let any page POST forms or plain text to any origin. Other methods and types need a
    preflight request, which is subject to the allowed origins.
    """
    kind = Headers(scope=scope).get("content-type", "").strip()
    return bool(_JSON.fullmatch(kind)) or (scope["method"] != "POST" and not kind)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {counted(limit, 'byte')}", code="body_too_large")


class _ReadRequest(HttpRequest):
    def __init__(self, http: HttpRequest, body: bytes, content: Any) -> None:
        super().__init__(http.scope, http.receive)
        self._bytes, self._content = body, content

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        return self._content


class ReadsAside(Protocol):
    """Anything with a worker that reads bodies, such as `Service`."""

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


def reading_aside(service: ReadsAside) -> type[APIRoute]:
    """Return a route class that parses long bodies in a worker thread."""

    class Aside(APIRoute):
        """Route whose long bodies are parsed and validated outside the event loop."""

        def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_aside(http: HttpRequest) -> Response:
                body = await http.body()
                if len(body) < LONG_BYTES or self.body_field is None:
                    return await handle(http)
                # The parsed model itself: it is not validated again.
                content = await until_gone(http, service.work(self._read, body))
                return await handle(_ReadRequest(http, body, content))

            return handle_aside

        def _read(self, body: bytes) -> Any:
            assert self.body_field is not None
            content, errors = self.body_field.validate(loads(body), {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors)
            return content

    return Aside


def loads(body: bytes) -> Any:
    """Parse JSON with Python hooks, so that other threads can run."""
    try:
        return json.loads(body, parse_int=_int, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([problem]) from None
    except (ValueError, RecursionError):  # not UTF-8, or a number of thousands of digits
        raise BadRequest("the body cannot be read as JSON", code="invalid_json") from None


def _int(digits: str) -> int:
    """Parse a number in Python code, so that threads can switch."""
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)
