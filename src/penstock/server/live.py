"""`/v1/live`, a stream of engine snapshots, and the page at `/` that displays them.

    engine ──ask, twice a second──> Pulse ──the newest snapshot──> stream, stream, ...

The engine is polled once for all clients. A slow client misses snapshots; they are not queued.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
from penstock.engine.stats import Stats
from penstock.errors import EngineStopped
from penstock.models.encoder_types import WRITING
from penstock.prefix.node import NodeView
from penstock.server.cache_routes import CacheStats, Tree, tree_of
from penstock.server.engine_client import EngineState
from penstock.server.problems import NotFound, ShuttingDown, Unavailable
from penstock.server.service import Service
from penstock.server.sse import Stream, Streaming, data, error_event

logger = logging.getLogger(__name__)

WATCHED_SECONDS = 0.5
UNWATCHED_SECONDS = 2.0
"""Seconds between two history entries while no client watches."""
HISTORY_SECONDS = 300
TREE_SECONDS = 10.0
"""Seconds after which an unchanged tree is sent again, to update its nodes' ages."""
TREE_SECONDS_A_NODE = 0.000_5
"""Seconds per node between two reads of the tree; reading takes 1 % of that time."""
RATE_SECONDS = 1.4
MOST_WATCHERS = 64
SHOWN_NODES = 250
SHOWN_REQUESTS = 40

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by suffix; other files are not served."""


class History(BaseModel):
    at_seconds: list[float]
    limit_bytes: list[int]
    by_kind: dict[str, list[int]]
    generated_per_second: list[float]


class ListedModel(BaseModel):
    """A model that requests can name, by itself and with each adapter."""

    name: str
    kinds: list[str]
    """Requests that it answers."""
    adapters: list[str]
    """Names after the plus of `model+adapter`."""
    state: str
    size: int
    """Bytes in the ledger; the estimate while the model is not loaded, 0 if there is none."""
    pinned: bool
    open_requests: int


class Snapshot(CacheStats):
    at_seconds: float
    model: str
    """Model that the figures describe; empty if none of several is loaded."""
    chats: bool
    sees: bool
    """Whether the model reads images."""
    version: str
    max_batch_size: int
    generated_per_second: float
    prefilled_per_second: float
    requests: list[dict[str, Any]]
    tree: Tree | None = None
    """Prefix tree; None if unchanged since the last event."""
    history: History | None = None
    models: list[ListedModel] | None = None
    """All models of a pool, whose bytes are then together, or one with adapters; else None."""


class Moment(NamedTuple):
    at_seconds: float
    stats: Stats
    generated_per_second: float
    prefilled_per_second: float


@dataclass(frozen=True, slots=True)
class Look:
    stats: Stats
    max_batch_size: int
    mark: object
    """Fingerprint of the tree; equal while the tree is unchanged."""
    tree: list[NodeView] | None


class Pulse:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.watchers = 0
        self.ended = False
        self.history: deque[Moment] = deque(maxlen=int(HISTORY_SECONDS / WATCHED_SECONDS))
        self._number = 0
        self._newest: Look | None = None
        self._tree: Tree | None = None
        self._tree_number = 0
        self._tree_seconds = 0.0
        self._tree_nodes = 0
        self._mark: object = None
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        try:
            while not self.service.draining:
                self._wanted.clear()  # before polling: no new client is missed
                try:
                    await self._look()
                except EngineStopped:
                    return
                # A boundary: polling goes on after a failure.
                except Exception as error:
                    logger.error(
                        "engine snapshot for /v1/live failed with %s; retrying",
                        type(error).__name__,
                    )
                    logger.debug("traceback of the failed snapshot", exc_info=error)
                pause = WATCHED_SECONDS if self.watchers else UNWATCHED_SECONDS
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), pause)
        finally:
            self.ended = True
            async with self._changed:
                self._changed.notify_all()

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        self.watchers += 1
        try:
            seen, tree_seen = self._number, 0
            self._wanted.set()
            history = True
            while await self._next(seen):
                seen = self._number
                if self._tree is None:  # this poll began when no client wanted a tree
                    continue
                tree = self._tree if tree_seen != self._tree_number else None
                tree_seen = self._tree_number
                yield self._snapshot(tree, history)
                history = False
        finally:
            self.watchers -= 1

    async def _next(self, seen: int) -> bool:
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or self._number != seen)
        return not self.ended

    async def _look(self) -> None:
        now = time.time()
        age = now - self._tree_seconds
        mark = None if age > TREE_SECONDS else self._mark
        due = self.watchers > 0 and age >= self._tree_nodes * TREE_SECONDS_A_NODE
        look = await self.service.ask(partial(_look, tree=due, mark=mark))
        self._remember(now, look.stats)
        if look.tree is not None:
            self._tree = tree_of(look.tree, SHOWN_NODES)
            self._tree_number += 1
            self._tree_nodes = len(look.tree)
            self._tree_seconds, self._mark = now, look.mark
        self._newest = look
        self._number += 1
        async with self._changed:
            self._changed.notify_all()

    def _remember(self, now: float, stats: Stats) -> None:
        generated = prefilled = 0.0
        lately = [past for past in self.history if now - past.at_seconds < RATE_SECONDS]
        before = lately[0] if lately else self.history[-1] if self.history else None
        if before is not None and now > before.at_seconds:
            seconds = now - before.at_seconds
            generated = (stats.generated_tokens - before.stats.generated_tokens) / seconds
            prefilled = (stats.prefilled_tokens - before.stats.prefilled_tokens) / seconds
        self.history.append(Moment(now, stats, generated, prefilled))

    def _snapshot(self, tree: Tree | None, history: bool) -> Snapshot:
        look, now = self._newest, self.history[-1]
        assert look is not None  # `_number` counts polls
        recent = list(self.service.recent)[-SHOWN_REQUESTS:]
        return Snapshot(
            **dict(CacheStats.of(look.stats)),
            at_seconds=now.at_seconds,
            model=self.service.model_name,
            chats=self.service.tokenizer.has_chat_template,
            sees=self.service.prompts.images is not None,
            version=__version__,
            max_batch_size=look.max_batch_size,
            generated_per_second=now.generated_per_second,
            prefilled_per_second=now.prefilled_per_second,
            requests=[request.record() for request in recent],
            tree=tree,
            history=self._history(now.at_seconds) if history else None,
            models=self._models(now.stats.used_bytes) if self.service.adapters else None,
        )

    def _models(self, nbytes: int) -> list[ListedModel]:
        service = self.service
        model = ListedModel(
            name=service.model_name,
            kinds=list(WRITING),
            adapters=list(service.adapters),
            state="loaded",
            size=nbytes,
            pinned=False,
            open_requests=service.open_requests,
        )
        return [model]

    def _history(self, now: float) -> History:
        shown = [past for past in self.history if now - past.at_seconds <= HISTORY_SECONDS]
        kinds = shown[-1].stats.by_kind
        return History(
            at_seconds=[past.at_seconds for past in shown],
            limit_bytes=[past.stats.limit_bytes for past in shown],
            by_kind={kind: [past.stats.by_kind[kind] for past in shown] for kind in kinds},
            generated_per_second=[past.generated_per_second for past in shown],
        )


def router(service: Service, pulse: Pulse) -> APIRouter:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(pulse.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    router = APIRouter(lifespan=lifespan)

    @router.get("/v1/live", tags=["cache"], response_model=Snapshot, include_in_schema=False)
    async def live(http: HttpRequest) -> Response:
        """Stream snapshots of the engine as server-sent events, until the client disconnects."""
        check_watchers(pulse.watchers)
        if not service.alive and not service.draining:
            raise EngineStopped("the engine has stopped")
        return live_stream(http, service, pulse.snapshots())

    return router


def check_watchers(count: int) -> None:
    if count >= MOST_WATCHERS:
        raise Unavailable(
            f"{MOST_WATCHERS} pages and terminals watch this server, which is the limit; close "
            f"one of them",
            code="too_many",
        )


def live_stream(
    http: HttpRequest, served: Streaming, snapshots: AsyncIterator[Snapshot]
) -> Response:
    if served.draining:
        raise ShuttingDown()
    path = http.url.path
    return Stream(served, None, _events(snapshots), lambda problem: [error_event(path, problem)])


async def _events(snapshots: AsyncIterator[Snapshot]) -> AsyncIterator[bytes]:
    async for snapshot in snapshots:
        yield data(snapshot.model_dump(exclude_none=False), "snapshot")


def _look(view: EngineState, tree: bool, mark: object) -> Look:
    stats = view.stats()
    # Every change of the tree or of its pins changes one of these.
    now = (
        stats.nodes,
        stats.held_tokens,
        stats.evicted_nodes,
        stats.copied_bytes,
        stats.prompt_tokens,
        stats.finished,
        stats.preemptions,
        stats.prefilling,
        stats.restoring,
        stats.running,
    )
    nodes = view.tree() if tree and now != mark else None
    return Look(stats, view.limits.max_batch_size, now, nodes)


# ---- the page


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str
    etag: str

    def respond(self, http: HttpRequest) -> Response:
        headers = {**PAGE_HEADERS, "ETag": self.etag}
        if self.etag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.content_type, headers=headers)


@cache
def page_files() -> dict[str, PageFile]:
    pages: dict[str, PageFile] = {}
    _read(files("penstock.server") / "page", "", pages)
    return pages


def _read(folder: Traversable, path: str, pages: dict[str, PageFile]) -> None:
    for entry in folder.iterdir():
        name = f"{path}{entry.name}"
        if entry.is_dir():
            _read(entry, f"{name}/", pages)
        elif (kind := TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            content = entry.read_bytes()
            etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            pages[name] = PageFile(content, kind, etag)


def page_router() -> APIRouter:
    router = APIRouter()
    pages = page_files()

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(http: HttpRequest) -> Response:
        return pages["index.html"].respond(http)

    @router.api_route("/favicon.ico", methods=["GET", "HEAD"], include_in_schema=False)
    async def icon(http: HttpRequest) -> Response:
        return pages["icon.svg"].respond(http)

    @router.api_route("/page/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, http: HttpRequest) -> Response:
        if name not in pages:
            raise NotFound("the page has no such file")
        return pages[name].respond(http)

    return router
