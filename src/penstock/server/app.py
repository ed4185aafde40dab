"""The application: routes, middlewares, and the process that serves it.

socket ─> request id ─> last resort ─> path ─> CORS ─> host ─> key ─> body ─> routes ─> Service

No middleware buffers responses, so streams pass through unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import Any, Literal, Protocol, cast

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
from uvicorn.config import LOGGING_CONFIG

from penstock import __version__
from penstock.config import LOOPBACK_HOSTS, NOTICES, ServerSettings
from penstock.errors import PenstockError
from penstock.server import cache_routes, live, metrics, reference, sessions, tokenize_routes
from penstock.server.access import CLIENT, KEY_HOLDER, Access, checked
from penstock.server.anthropic import messages
from penstock.server.connections import Connections
from penstock.server.decisions import decision_routes
from penstock.server.ollama import ollama_routes
from penstock.server.openai import openai_routes, responses
from penstock.server.paths import Paths, served_methods, unserved
from penstock.server.problems import (
    FROM_ANTHROPIC,
    REQUEST_ID,
    TRACEPARENT,
    ServerError,
    ShuttingDown,
    problem_of,
    response_for,
    stopping_text,
)
from penstock.server.prompt_memory import PromptMemory
from penstock.server.request_body import Body
from penstock.server.service import Service

logger = logging.getLogger(__name__)
notices = logging.getLogger(NOTICES)

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/favicon.ico"})
UNCOUNTED = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that rate limits do not count."""
OPEN_FOLDER = "/page/"
GOODBYE_SECONDS = 1.0
"""Seconds the server continues to answer after its engine has died or hangs."""
TAIL_SECONDS = 4.0
"""Seconds for clients to read the rest of their answers after the engine has drained."""
TAIL_LOOK_SECONDS = 0.05
FLUSH_SECONDS = 3
"""Seconds for connections to send their last bytes when the server stops."""
HURRIED_FLUSH_SECONDS = 1
"""`FLUSH_SECONDS` after a second signal."""


class Health(BaseModel):
    """The answer of `/health` and `/ready`."""

    status: Literal["ok", "draining", "dead"]
    model: str
    models: list[str]
    open_requests: int


class ServedByApp(Protocol):
    """Interface of what a process serves: one model (`Service`), or several (`SeveralModels`)."""

    draining: bool
    died: list[Callable[[], None]]

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def model_names(self) -> list[str]: ...
    @property
    def alive(self) -> bool: ...
    @property
    def open_requests(self) -> int: ...
    def drain(self, timeout_seconds: float) -> bool: ...
    def cancel_all(self) -> None: ...
    def fail_all(self, error: BaseException) -> None: ...


def create_app(service: Service) -> FastAPI:
    app = routes_app(service, live.Pulse(service))
    guard(app, service.settings, service.access, service.memory)
    return app


def routes_app(service: Service, pulse: live.Pulse) -> FastAPI:
    """Return the application of one model without middlewares."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch())
        yield
        watching.cancel()
        service.close()

    modules = (
        *(openai_routes, responses, messages, decision_routes, ollama_routes, tokenize_routes),
        *(cache_routes, sessions, metrics),
    )
    routers = [health_router(service), *(module.router(service) for module in modules)]
    return app_of([*routers, live.router(service, pulse)], lifespan)


def app_of(
    routers: Sequence[APIRouter], lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastAPI:
    app = FastAPI(
        title="penstock",
        version=__version__,
        summary="Language models inside a fixed amount of memory",
        lifespan=lifespan,
        docs_url=None,  # the default pages load scripts from other hosts
        redoc_url=None,
    )
    for error in (HTTPException, RequestValidationError, PenstockError):
        app.add_exception_handler(error, _respond)
    routers = [*routers, live.page_router()]
    for router in routers:
        app.include_router(router)
    app.state.served = served_methods(routers)
    reference.add_reference(app)
    return app


def _respond(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = unserved(http, error, http.app.state.served)
    problem = problem_of(error)
    if problem.status >= 500 and problem.status != 503:  # 503 is a refusal, not a fault
        name, path = REQUEST_ID.get(), http.url.path
        logger.error("request %s to %s failed with %s", name, path, type(error).__name__)
        logger.debug("traceback of request %s", name, exc_info=error)
    return response_for(http.url.path, error)


def health_router(service: ServedByApp) -> APIRouter:
    router = APIRouter(tags=["health"])

    def state(status: Literal["ok", "draining", "dead"]) -> JSONResponse:
        names = service.model_names
        report = Health(
            status=status, model=names[0], models=names, open_requests=service.open_requests
        )
        return JSONResponse(report.model_dump(), 200 if status == "ok" else 503)

    @router.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """Report liveness; 503 once the engine thread has ended."""
        return state("ok" if service.alive else "dead")

    @router.get("/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """Report readiness; 503 also while the server drains."""
        if not service.alive:
            return state("dead")
        return state("draining" if service.draining else "ok")

    return router


# ---- the middlewares


def guard(app: FastAPI, settings: ServerSettings, access: Access, memory: PromptMemory) -> None:
    app.add_middleware(Body, settings=settings, memory=memory)
    if access.needed:
        app.add_middleware(Key, access=access)
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
    """Middleware that adds `x-request-id` to responses, the client's own if well-formed."""

    PLAIN = re.compile(r"[\w.:-]{1,64}", re.ASCII)

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        client_id = Headers(scope=scope).get("x-request-id", "")
        name = client_id if self.PLAIN.fullmatch(client_id) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = name
        REQUEST_ID.set(name)
        TRACEPARENT.set(Headers(scope=scope).get("traceparent", ""))
        CLIENT.set(scope["client"][0] if scope.get("client") else "")
        FROM_ANTHROPIC.set("anthropic-version" in Headers(scope=scope))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                headers["request-id"] = name  # the header that Anthropic's clients read
            await send(message)

        return await self.app(scope, receive, named)


class LastResort:
    """Middleware that answers unhandled exceptions with 500, or 503 on shutdown."""

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
            logger.debug("traceback of request %s", name, exc_info=error)
            if not started:
                await response_for(scope["path"], error)(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn cancels requests only when it stops
            if not started:
                await response_for(scope["path"], ShuttingDown())(scope, receive, send)
        return None


class OwnHost:
    """Middleware that rejects requests whose Host header does not name this machine.

    A server without keys trusts local programs. A web page from elsewhere can point its own host
    name at this server (DNS rebinding), but its requests carry that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _names_loopback(Headers(scope=scope).get("host", "")):
            error = ServerError(
                "without an API key the server answers only requests to localhost; start it "
                "with --api-key, or use http://127.0.0.1",
                status=403,
                code="foreign_host",
            )
            return await response_for(scope["path"], error)(scope, receive, send)
        return await self.app(scope, receive, send)


def _names_loopback(host: str) -> bool:
    """Return whether a Host header names this machine.

    >>> [_names_loopback(h) for h in ("localhost:8080", "[::1]:8080", "a.example", "")]
    [True, True, False, True]
    """
    if not host:  # HTTP/1.0, which browsers do not use
        return True
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower() in LOOPBACK_HOSTS


class Key:
    """Middleware that requires a key, except for paths that reveal nothing about requests.

    A proxy that has already checked the key passes its holder in the scope's state.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope):
            return await self.app(scope, receive, send)
        client = scope.get("state", {}).get("key_holder")
        passed_on = client is not None
        try:
            client = checked(client or self._access.client_of(scope), scope["path"])
            if not passed_on and scope["method"] not in UNCOUNTED:
                self._access.admit(client)
        except ServerError as error:
            return await response_for(scope["path"], error)(scope, receive, send)
        KEY_HOLDER.set(client)
        if client.key.name:
            CLIENT.set(client.key.name)
        try:
            return await self.app(scope, receive, send)
        finally:
            if not passed_on:
                self._access.settle(client)


def is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDER) and ".." not in path)


# ---- the process


class Server(uvicorn.Server):
    """Uvicorn server that drains the engine before it stops, and stops when the engine dies.

    First signal: refuse new requests; open ones may finish within `drain_timeout_seconds`. Second:
    end open requests with an error, and stop within `GOODBYE_SECONDS` plus
    `HURRIED_FLUSH_SECONDS`. Third: stop at once.
    """

    def __init__(self, service: ServedByApp, app: ASGIApp, **settings: Any) -> None:
        self.service = service
        config = uvicorn.Config(
            app,
            host=service.settings.host,
            port=service.settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            http=cast(Any, Connections(service.settings)),
            ws="none",
            log_config=None if service.settings.log_format == "json" else LOGGING_CONFIG,
            **settings,
        )
        super().__init__(config)
        self.dead = False
        self._hurries = False
        service.died.append(self._engine_died)

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.service.draining:
            self.drain()
        elif not self._hurries:
            self._hurries = True
            self.config.timeout_graceful_shutdown = HURRIED_FLUSH_SECONDS
            threading.Thread(target=self._end_open, name="penstock-end", daemon=True).start()
        else:
            self.should_exit = self.force_exit = True

    def drain(self) -> None:
        self.service.draining = True
        threading.Thread(target=self._drain, name="penstock-drain", daemon=True).start()

    def _drain(self) -> None:
        service = self.service
        if count := service.open_requests:
            notices.info(stopping_text(count, service.settings.drain_timeout_seconds))
        try:
            if not self._drained():
                service.cancel_all()
            self._all_read(TAIL_SECONDS)  # in vain after a long step, or if clients do not read
        finally:
            self._end_open()

    def _end_open(self) -> None:
        """End open requests with an error, and stop once clients have read it."""
        self.service.fail_all(ShuttingDown())
        self._all_read(GOODBYE_SECONDS)
        self.should_exit = True  # cuts off open streams

    def _drained(self) -> bool:
        try:
            return self.service.drain(self.service.settings.drain_timeout_seconds)
        except TimeoutError:  # a step took too long
            return False

    def _all_read(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.service.open_requests and time.monotonic() < until:
            time.sleep(TAIL_LOOK_SECONDS)
        return self.service.open_requests == 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.dead = self.dead or not self.service.alive

    def _engine_died(self) -> None:
        self.dead = True
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self._stop)

    def _stop(self) -> None:
        self.should_exit = True
