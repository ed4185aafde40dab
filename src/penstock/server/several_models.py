"""Several models behind one address: a request's `model` names the one that answers.

    body ──model──> pool.enter ──> application of that model ──> pool.leave
                      └── away: loads it; streams get comments meanwhile

Each loaded model has a `Service` and an application of its own, without middlewares. All models
share the API keys, the prompt memory and the stored responses.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config import ServerSettings
from penstock.errors import ModelError, NeverFits
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted
from penstock.pool.model_pool import LoadedMember, ModelPool, ModelState
from penstock.server import pool_live
from penstock.server.access import Access
from penstock.server.app import OPEN_FOLDER, app_of, guard, health_router
from penstock.server.attached_models import (
    ENCODING,
    STARTED_SECONDS,
    AttachedModel,
    AttachedService,
    ServedModel,
    attached,
)
from penstock.server.disconnect import until_gone
from penstock.server.metrics import exposed
from penstock.server.ollama.ollama_routes import (
    LOADED,
    TAGS,
    loaded_object,
    ollama_object,
    untagged,
    waiting_lines,
)
from penstock.server.openai.openai_objects import Json
from penstock.server.paths import DOCUMENT, ENDLESS, REFERENCE
from penstock.server.pool_live import PoolPulse
from penstock.server.pool_metrics import PoolMetrics
from penstock.server.problems import NotFound, ShuttingDown, Unavailable, response_for
from penstock.server.prompt_memory import PromptMemory
from penstock.server.request_body import loads
from penstock.server.response_store import ResponseStore
from penstock.server.waiting_response import EVENTS, StreamForm, WaitingResponse
from penstock.server.workers import LONG_BYTES

MODELS = "/v1/models"
METRICS = "/metrics"
COMMON = frozenset({"/", "/favicon.ico", "/health", "/ready", ENDLESS, TAGS, LOADED})
"""Paths that need no model, besides those below `MODELS` and the page's files."""
UNLOADABLE = "it cannot be loaded; see the server's log"


class SeveralModels:
    """Models that one process serves; implements `app.ServedByApp`.

    Args:
        models: models of the pool; requests that name no model go to the first.
        any_name: whether requests for unknown models go to the first, too.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: ServerSettings,
        *,
        prompt_bytes: int,
        any_name: bool = False,
    ) -> None:
        self.settings = settings
        self.access = Access.of(settings)
        self.memory = PromptMemory(prompt_bytes)
        self.created = int(time.time())
        self.died: list[Callable[[], None]] = []
        self.draining = False
        self._models = {model.name: model for model in models}
        self._stored = ResponseStore(self.memory, settings.stored_response_bytes)
        self._any_name = any_name
        self._names = {alias: model.name for model in models for alias in model.aliases}
        self._names |= {model.name: model.name for model in models}
        self._attached: dict[str, AttachedModel] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_runs = threading.Event()
        self._waiting: set[Future[LoadedMember]] = set()
        self.pool: ModelPool

    # ---- the pool's thread

    def opened(self, model: LoadedMember) -> None:
        """Attach a service to a loaded model. Called in the pool's loading thread."""
        served = self._models[model.name]
        self._loop_runs.wait(STARTED_SECONDS)
        assert self._loop is not None
        model.attached = attached(
            model,
            served,
            self._loop,
            access=self.access,
            memory=self.memory,
            stored=self._stored,
        )
        self._attached[model.name] = model.attached
        model.attached.service.draining = self.draining
        model.attached.service.change(self._models[model.name].settings)  # changed meanwhile

    def stuck(self, model: LoadedMember) -> None:
        if model.attached is not None:
            model.attached.give_way()

    def closing(self, model: LoadedMember) -> None:
        if model.attached is not None:
            del self._attached[model.name]
            model.attached.close()

    # ---- the process

    @property
    def model_names(self) -> list[str]:
        return list(self._models)

    @property
    def model_name(self) -> str:
        return next(iter(self._models))

    @property
    def alive(self) -> bool:
        return True

    @property
    def open_requests(self) -> int:
        return sum(service.open_requests for service in self._services()) + len(self._waiting)

    def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for open ones; return whether all ended in time."""
        self.draining = True
        for waiting in list(self._waiting):
            waiting.cancel()
        until = time.monotonic() + timeout_seconds
        for service in self._services():
            service.draining = True
        return all(
            service.drain(max(0.0, until - time.monotonic())) for service in self._services()
        )

    def change(self, settings: ServerSettings, of_models: Mapping[str, ServerSettings]) -> None:
        """Replace the changeable settings of the server and of each model. Takes no lock."""
        self.settings = settings
        self._models = {
            name: replace(model, settings=of_models[name]) for name, model in self._models.items()
        }
        for name, model in list(self._attached.items()):
            model.service.change(of_models[name])

    def cancel_all(self) -> None:
        for service in self._services():
            service.cancel_all()

    def fail_all(self, error: BaseException) -> None:
        for service in self._services():
            service.fail_all(error)

    def _services(self) -> list[AttachedService]:
        return [model.service for model in list(self._attached.values())]

    # ---- the application

    def app(self) -> FastAPI:
        pulse = PoolPulse(self.pool, lambda: self.draining, self._models)
        live = pool_live.router(self, pulse, partial(self.resolved, strict=True))

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            self._loop_runs.set()
            yield
            await asyncio.to_thread(self.pool.close)

        app = app_of([health_router(self), self._routes(), live], lifespan)
        app.description = "The routes of a model are listed here while one is loaded."
        app.add_middleware(_ByModel, models=self)
        guard(app, self.settings, self.access, self.memory)
        return app

    def _routes(self) -> APIRouter:
        routes = APIRouter(tags=["openai"])

        @routes.get(MODELS, response_model=None)
        async def models() -> Json:
            """List the models, loaded or not."""
            names = list(self._models)
            ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
            data = [self._object(state) for state in self.pool.states()]
            return Json({"object": "list", "data": data, **ends})

        @routes.get(f"{MODELS}/{{model_id:path}}", response_model=None)
        async def model(model_id: str) -> Json:
            """Describe a model."""
            name = self.resolved(model_id, strict=True)
            return Json(self._object(self._state(name)))

        @routes.post(f"{MODELS}/{{model_id:path}}/load", response_model=None)
        async def load(model_id: str) -> Json:
            """Load a model; respond once it is loaded."""
            name = self.resolved(model_id, strict=True)
            await asyncio.wrap_future(self.pool.load(name))
            return Json(self._object(self._state(name)))

        @routes.post(f"{MODELS}/{{model_id:path}}/unload", response_model=None)
        async def unload(model_id: str) -> Json:
            """Unload a model after its open requests; the next request loads it again."""
            name = self.resolved(model_id, strict=True)
            await asyncio.wrap_future(self.pool.unload(name))
            return Json(self._object(self._state(name)))

        @routes.get(TAGS, response_model=None)
        async def tags() -> Json:
            """List the models, loaded or not, as Ollama does."""
            states = self.pool.states()
            listed = [ollama_object(state.name, state.nbytes, self.created) for state in states]
            return Json({"models": listed})

        @routes.get(LOADED, response_model=None)
        async def running() -> Json:
            """List the loaded models, as Ollama does."""
            loaded = self.pool.loaded()
            states = [state for state in self.pool.states() if state.name in loaded]
            listed = [ollama_object(state.name, state.nbytes, self.created) for state in states]
            return Json({"models": [loaded_object(model) for model in listed]})

        registry = CollectorRegistry()
        registry.register(PoolMetrics(self.pool))
        registry.register(self.access)

        @routes.get(METRICS, response_class=PlainTextResponse)
        async def metrics(http: HttpRequest) -> Response:
            """Return the pool's metrics, or a loaded model's with `?model=NAME`."""
            return exposed(registry, http.headers.get("accept", ""))

        return routes

    def _state(self, name: str) -> ModelState:
        return next(state for state in self.pool.states() if state.name == name)

    def _object(self, state: ModelState) -> dict[str, Any]:
        model = self.pool.loaded().get(state.name)
        if model is not None and model.attached is not None:
            about = model.attached.about()
        else:
            about = {
                "id": state.name,
                "object": "model",
                "created": self.created,
                "owned_by": "penstock",
                "type": "model",
                "display_name": state.name,
            }
        return {
            "kinds": list(self._models[state.name].kinds),
            **about,
            "state": state.standing.value,
            "size": state.nbytes,
            "pinned": state.pinned,
            "open_requests": state.open_requests,
            "aliases": list(self._models[state.name].aliases),
            "adapters": list(self._models[state.name].adapters),
            "error": None if state.error is None else UNLOADABLE,
        }

    # ---- requests

    def resolved(self, name: str | None, *, strict: bool = False, path: str = "") -> str:
        """Return the model for a name or alias.

        Args:
            name: `model` of the request; without one, the first model of its kind.
            strict: whether the name must be known even with `any_name`.
            path: path of the request; without a name, it decides whether an encoder is meant. On
                Ollama's paths, NAME:latest is NAME.

        Raises:
            NotFound: there is no such model.
        """
        if name and name not in self._names:
            name = untagged(name, path)
        if name and (known := self._names.get(name)) is not None:
            return known
        if not name:
            return self._by_task(writes=path not in ENCODING)[0]
        model = self._names.get(name.rpartition("+")[0])  # its service checks the adapter
        if model is not None and self._models[model].adapters:
            return model
        if self._any_name and not strict:
            return self._by_task(writes=path not in ENCODING)[0]
        raise NotFound(
            f"there is no model {name[:80]!r}; {counted(len(self._models), 'model')} served: "
            f"{', '.join(self._models)}",
            code="model_not_found",
            param="model",
        )

    def loaded_or_first(self) -> str:
        """Return the model for requests without a body and a name: a loaded one if there is any.

        Encoders come last, as they have no prefix cache.
        """
        loaded, names = self.pool.loaded(), self._by_task(writes=True)
        return next((name for name in names if name in loaded), names[0])

    def _by_task(self, *, writes: bool) -> list[str]:
        """Return the models' names, generative ones first if `writes`, else encoders first."""
        return sorted(self._models, key=lambda name: self._models[name].writes is not writes)

    def enter(self, name: str) -> Future[LoadedMember]:
        if self.draining:
            raise ShuttingDown()
        entered = self.pool.enter(name)
        if not entered.done():
            self._waiting.add(entered)
            entered.add_done_callback(self._waiting.discard)
        return entered

    def abandon(self, entered: Future[LoadedMember], name: str) -> None:
        """Stop waiting for a model; leave it if it has been entered in the meantime."""

        def leave(done: Future[LoadedMember]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.pool.leave(name)

        if not entered.cancel():
            entered.add_done_callback(leave)

    def waiting_words(self, name: str) -> str:
        state = self._state(name)
        size = f" ({format_bytes(state.nbytes)})" if state.nbytes else ""
        return f"{name}{size}: {state.standing.value}"


class _ByModel:
    """Middleware that forwards requests to the application of the model that they name."""

    def __init__(self, app: ASGIApp, models: SeveralModels) -> None:
        self.app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        common = path in COMMON or path.startswith((MODELS, OPEN_FOLDER, REFERENCE))
        common = common or (path == METRICS and _in_query(scope) is None)
        common = common or (path == DOCUMENT and not self._models.pool.loaded())
        if scope["type"] != "http" or common:
            return await self.app(scope, receive, send)
        try:
            await self._pass_on(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the errors of loading, and unknown names
            await response_for(path, _refusal(error))(scope, receive, send)
        return None

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        content: Mapping[str, Any] = {}
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            body = (await receive()).get("body", b"")
            content = await _object_in(body)
        asked = content.get("model") or _in_query(scope)
        models = self._models
        if asked or body:
            name = models.resolved(asked if isinstance(asked, str) else None, path=scope["path"])
        else:
            name = models.loaded_or_first()
        if scope["path"] == METRICS and name not in models.pool.loaded():
            raise NotFound(f"{name} is not loaded, and has no metrics")
        form = _stream_form(scope["path"], content)
        out = WaitingResponse(scope["path"], send, form, models.settings.ping_seconds)
        while True:
            model = await self._entered(name, scope, receive, out)
            if model is None:
                return None
            out.ask()
            try:
                await model.attached.app(dict(scope), _replayed(body, receive), out.send)
            finally:
                models.pool.leave(name)
            if not out.asking.fails:
                return None

    async def _entered(
        self, name: str, scope: Scope, receive: Receive, out: WaitingResponse
    ) -> LoadedMember | None:
        """Wait for a model; return None if the stream was ended with an error."""
        models = self._models
        entered, model = models.enter(name), None
        try:
            model = await until_gone(
                HttpRequest(scope, receive),
                out.during(asyncio.wrap_future(entered), partial(models.waiting_words, name)),
            )
        except asyncio.CancelledError:
            if entered.cancelled():  # by a drain
                raise ShuttingDown() from None
            raise
        except Exception as error:
            if not out.begun:
                raise
            await out.fail(_refusal(error))
        finally:
            if model is None:
                models.abandon(entered, name)
        return model


def _refusal(error: Exception) -> Exception:
    """Return the error to report to a client if its model cannot be loaded."""
    if isinstance(error, NeverFits):
        return Unavailable(str(error), code="model_does_not_fit")
    if isinstance(error, ModelError):  # its text may name a folder of this machine
        return Unavailable(f"this model is unavailable: {UNLOADABLE}", code="model_not_loadable")
    return error


def _stream_form(path: str, content: Mapping[str, Any]) -> StreamForm | None:
    """Return the form of a request's stream; None if its answer is one object."""
    if content.get("stream") is True and path.startswith("/v1/"):
        return EVENTS
    return waiting_lines(path, content)


async def _object_in(body: bytes) -> Mapping[str, Any]:
    """Parse a body's JSON object; empty if it is none, which the model's route reports."""
    try:
        content = loads(body) if len(body) < LONG_BYTES else await asyncio.to_thread(loads, body)
    # A boundary: the route of the model reads the body again, and reports what is wrong.
    except Exception:  # noqa: BLE001
        return {}
    return content if isinstance(content, dict) else {}


def _in_query(scope: Scope) -> str | None:
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    return query["model"][0] if "model" in query else None


def _replayed(body: bytes, receive: Receive) -> Receive:
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
