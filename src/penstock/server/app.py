"""The application: its routes, the middlewares in front of them, and the process that serves it.

socket ─> request id ─> last resort ─> path ─> CORS ─> host ─> key ─> body ─> routes ─> Service

Streams pass through all of it as they come: no middleware here holds a response back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, Literal, cast

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.config import LOOPBACK_HOSTS, ServerSettings
from penstock.errors import PenstockError
from penstock.server import (
    anthropic,
    cache_routes,
    live,
    metrics,
    openai,
    reference,
    responses,
    sessions,
    tokenize_routes,
)
from penstock.server.connections import Connections
from penstock.server.paths import Paths, served_methods, unserved
from penstock.server.problems import (
    FROM_ANTHROPIC,
    REQUEST_ID,
    ServerError,
    Unauthorized,
    Unavailable,
    problem_of,
    response_for,
)
from penstock.server.prompt_memory import PromptMemory
from penstock.server.request_body import Body
from penstock.server.service import Service

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/favicon.ico"})
"""Paths that are answered without a key."""
OPEN_FOLDER = "/page/"
"""Folder of the page's own files, which are answered without a key."""
GOODBYE_SECONDS = 1.0
"""Seconds that a server still answers after its engine has died or hangs."""
TAIL_SECONDS = 4.0
"""Seconds that clients have to read the ends of their answers after the engine has drained."""
TAIL_LOOK_SECONDS = 0.05
FLUSH_SECONDS = 3
"""Seconds that connections have for their last bytes when the server stops."""


class Health(BaseModel):
    """The answer of `/health` and `/ready`."""

    status: Literal["ok", "draining", "dead"]
    model: str
    open_requests: int
    """Requests that have not ended."""


def create_app(service: Service) -> FastAPI:
    """Make the application around a service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch())
        yield
        watching.cancel()
        service.close()

    app = FastAPI(
        title="penstock",
        version=__version__,
        summary="Language models inside a fixed amount of memory",
        lifespan=lifespan,
        docs_url=None,  # the default pages load their scripts from elsewhere
        redoc_url=None,
    )
    for error in (HTTPException, RequestValidationError, PenstockError):
        app.add_exception_handler(error, _respond)
    modules = (
        *(openai, responses, anthropic, tokenize_routes),
        *(cache_routes, sessions, metrics, live),
    )
    routers = [_health(service), *(module.router(service) for module in modules)]
    for router in routers:
        app.include_router(router)
    app.state.served = served_methods(routers)
    reference.add_reference(app)
    _guard(app, service.settings, service.memory)
    return app


def _respond(http: HttpRequest, error: Exception) -> Response:
    """Tell the client of an error that a route has raised, or that there is no such route."""
    if isinstance(error, HTTPException):
        error = unserved(http, error, http.app.state.served)
    problem = problem_of(error)
    if problem.status >= 500 and problem.status != 503:  # a refusal is no fault
        logger.error("%s failed: %s", http.url.path, type(error).__name__)
        logger.debug("its error", exc_info=error)
    return response_for(http.url.path, error)


def _health(service: Service) -> APIRouter:
    router = APIRouter(tags=["health"])

    def state(status: Literal["ok", "draining", "dead"]) -> JSONResponse:
        report = Health(
            status=status, model=service.model_name, open_requests=service.open_requests
        )
        return JSONResponse(report.model_dump(), 200 if status == "ok" else 503)

    @router.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """Tell whether the engine lives: 503 when its thread has ended."""
        return state("ok" if service.alive else "dead")

    @router.get("/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """Tell whether requests are taken in: 503 also while the server drains."""
        if not service.alive:
            return state("dead")
        return state("draining" if service.draining else "ok")

    return router


# ---- the middlewares


def _guard(app: FastAPI, settings: ServerSettings, memory: PromptMemory) -> None:
    """Put the middlewares around the routes, the innermost first."""
    app.add_middleware(Body, settings=settings, memory=memory)
    if settings.api_key is not None:
        app.add_middleware(Key, api_key=settings.api_key)
    elif settings.on_loopback:
        app.add_middleware(OwnHost)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Paths)
    app.add_middleware(LastResort)
    app.add_middleware(RequestId)


class RequestId:
    """Middleware that adds `x-request-id` to responses: the client's own if it is a plain word."""

    PLAIN = re.compile(r"[\w.:-]{1,64}", re.ASCII)

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if self.PLAIN.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = name
        REQUEST_ID.set(name)
        FROM_ANTHROPIC.set("anthropic-version" in Headers(scope=scope))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                headers["request-id"] = name  # as Anthropic's clients look for it
            await send(message)

        return await self.app(scope, receive, named)


class LastResort:
    """Middleware that answers 500 to unforeseen exceptions; the log has the class and no text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        # A boundary: the outermost one.
        except Exception as error:
            name = scope.get("state", {}).get("request_id", "")
            logger.error("request %s failed: %s", name, type(error).__name__)
            logger.debug("its error", exc_info=error)
            if not started:
                await response_for(scope["path"], error)(scope, receive, send)
        return None


class OwnHost:
    """Middleware that refuses requests whose Host header does not name this machine.

    A server without a key trusts every program on its machine. A page from elsewhere is none,
    but it can let its own name point here (DNS rebinding); its requests carry that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _names_loopback(Headers(scope=scope).get("host", "")):
            error = ServerError(
                "without an API key only requests to localhost are answered; start the server "
                "with --api-key, or ask for http://127.0.0.1",
                status=403,
                code="foreign_host",
            )
            return await response_for(scope["path"], error)(scope, receive, send)
        return await self.app(scope, receive, send)


def _names_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine's own address.

    >>> [_names_loopback(h) for h in ("localhost:8080", "[::1]:8080", "a.example", "")]
    [True, True, False, True]
    """
    if not host:  # HTTP/1.0, which no browser speaks
        return True
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    return name.lower() in LOOPBACK_HOSTS


class Key:
    """Middleware that demands the key, except for paths that reveal nothing of any request."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or shows_key(scope, self._key):
            return await self.app(scope, receive, send)
        response = response_for(scope["path"], Unauthorized())
        response.headers["WWW-Authenticate"] = "Bearer"
        return await response(scope, receive, send)


def shows_key(scope: Scope, api_key: str) -> bool:
    """Tell whether a request shows the key, as a bearer token or in `x-api-key`."""
    headers = Headers(scope=scope)
    kind, _, token = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", "")]
    if kind.lower() == "bearer":
        given.append(token.strip())
    # All are compared, each in constant time; headers are Latin-1 on the wire.
    known = [hmac.compare_digest(one.encode("latin-1"), api_key.encode()) for one in given]
    return any(known)


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDER) and ".." not in path)


# ---- the process


class Server(uvicorn.Server):
    """Uvicorn server that drains the engine before it stops, and stops when the engine has died.

    After the first signal no more requests are taken in, `/ready` says so, and open requests go
    on to their end, or for `drain_timeout_seconds`. The second signal ends the process at once.
    """

    def __init__(self, service: Service, **settings: Any) -> None:
        self.service = service
        config = uvicorn.Config(
            create_app(service),
            host=service.settings.host,
            port=service.settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            http=cast(Any, Connections(service.settings)),
            ws="none",
            **settings,
        )
        super().__init__(config)
        self.dead = False
        """Whether the engine's thread has ended by itself."""
        service.died.append(self._engine_died)

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; the second time, stop at once."""
        if self.service.draining:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self.drain()

    def drain(self) -> None:
        """Take in no more requests, and stop when the open ones have ended."""
        self.service.draining = True
        threading.Thread(target=self._drain, name="penstock-drain", daemon=True).start()

    def _drain(self) -> None:
        service = self.service
        try:
            if not self._drained():
                service.cancel_all()
            if not self._all_read(TAIL_SECONDS):  # a long step, or readers that do not read
                service.fail_all(Unavailable("the server is shutting down", code="shutting_down"))
                self._all_read(GOODBYE_SECONDS)
        finally:
            self.should_exit = True  # which cuts off the streams that are open

    def _drained(self) -> bool:
        try:
            return self.service.engine.drain(self.service.settings.drain_timeout_seconds)
        except TimeoutError:  # a step that takes too long
            return False

    def _all_read(self, seconds: float) -> bool:
        """Wait until every reader has got the end of its answer; tell whether so in time."""
        until = time.monotonic() + seconds
        while self.service.open_requests and time.monotonic() < until:
            time.sleep(TAIL_LOOK_SECONDS)
        return self.service.open_requests == 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; log an engine that died on the way."""
        await super().shutdown(sockets)
        self.dead = self.dead or not self.service.alive

    def _engine_died(self) -> None:
        self.dead = True
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self._stop)

    def _stop(self) -> None:
        self.should_exit = True
