"""`/v1/live` of several models: their states, the shared ledger, and snapshots of one model.

    `?model=`, or any model ──> loaded? ── yes ──> snapshots of its `Pulse` ──┐
                                   └── no ──> snapshots of the ledger only ───┴──> stream

A stream neither loads its model nor keeps it loaded; once the model is unloaded, it shows another.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
from penstock.engine.stats import Stats, StepTimes
from penstock.pool.model_pool import ModelPool
from penstock.server.attached_models import ServedModel
from penstock.server.cache_routes import CacheStats
from penstock.server.live import (
    HISTORY_SECONDS,
    UNWATCHED_SECONDS,
    WATCHED_SECONDS,
    History,
    ListedModel,
    Pulse,
    Snapshot,
    check_watchers,
    live_stream,
)
from penstock.server.paths import ENDLESS
from penstock.server.sse import Streaming

NO_STEPS = StepTimes(0, 0.0, 0.0, 0.0)


class LedgerMoment(NamedTuple):
    at_seconds: float
    limit_bytes: int
    by_kind: dict[str, int]


class PoolPulse:
    """Publisher of a pool's snapshots.

    Args:
        is_draining: returns whether streams are to end.
        served: how each model is served.
    """

    def __init__(
        self,
        pool: ModelPool,
        is_draining: Callable[[], bool],
        served: Mapping[str, ServedModel],
    ) -> None:
        self._served = served
        self._pool = pool
        self._is_draining = is_draining
        self._watchers = 0
        self._history: deque[LedgerMoment] = deque(maxlen=int(HISTORY_SECONDS / WATCHED_SECONDS))

    async def run(self) -> None:
        while True:
            self._history.append(self._moment())
            await asyncio.sleep(WATCHED_SECONDS if self._watchers else UNWATCHED_SECONDS)

    def check(self) -> None:
        """Raise Unavailable if the maximum number of streams is open."""
        check_watchers(self._watchers)

    async def snapshots(self, name: str | None) -> AsyncIterator[Snapshot]:
        """Yield snapshots of the model `name` while it is loaded, else of another loaded one."""
        shown: Pulse | None = None
        with self._watched():
            while not self._is_draining():
                shown = self._chosen(name, shown)
                if shown is None:
                    yield self._without_model()
                    await asyncio.sleep(WATCHED_SECONDS)
                    continue
                async with aclosing(shown.snapshots()) as snapshots:
                    async for snapshot in snapshots:
                        yield self._within(snapshot)
                        if self._chosen(name, shown) is not shown:
                            break

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def _chosen(self, name: str | None, shown: Pulse | None) -> Pulse | None:
        attached = {model: loaded.attached for model, loaded in self._pool.loaded().items()}
        pulses: dict[str, Pulse] = {
            model: service.pulse
            for model, service in attached.items()
            if service is not None and service.pulse is not None and not service.pulse.ended
        }
        if name in pulses:
            return pulses[name]
        if shown in pulses.values():
            return shown
        return next(iter(pulses.values()), None)

    def _within(self, snapshot: Snapshot) -> Snapshot:
        """Return a model's snapshot with the memory figures of all models."""
        now = self._moment()
        stats = replace(snapshot.stats, **_memory(now))
        history = snapshot.history and self._remembered(snapshot.history.generated_per_second)
        changed = dict(CacheStats.of(stats)) | {"models": self._models(), "history": history}
        return snapshot.model_copy(update=changed)

    def _without_model(self) -> Snapshot:
        now = self._moment()
        nothing: dict[str, Any] = {field.name: 0 for field in fields(Stats)}
        nothing |= {"tiers": {}, "spilling": None, "decode": NO_STEPS, "prefill": NO_STEPS}
        return Snapshot(
            **dict(CacheStats.of(Stats(**nothing | _memory(now)))),
            at_seconds=now.at_seconds,
            model="",
            chats=True,
            sees=False,
            version=__version__,
            max_batch_size=0,
            generated_per_second=0.0,
            prefilled_per_second=0.0,
            requests=[],
            history=self._remembered([]),
            models=self._models(),
        )

    def _models(self) -> list[ListedModel]:
        return [
            ListedModel(
                name=model.name,
                kinds=list(self._served[model.name].kinds),
                adapters=list(self._served[model.name].adapters),
                state=model.standing.value,
                size=model.nbytes,
                pinned=model.pinned,
                open_requests=model.open_requests,
            )
            for model in self._pool.states()
        ]

    def _moment(self) -> LedgerMoment:
        ledger = self._pool.ledger
        by_kind = {kind.value: nbytes for kind, nbytes in ledger.by_class().items()}
        return LedgerMoment(time.time(), ledger.limit_bytes, by_kind)

    def _remembered(self, generated_per_second: list[float]) -> History:
        now = time.time()
        shown = [past for past in self._history if now - past.at_seconds <= HISTORY_SECONDS]
        shown.append(self._moment())
        kinds = shown[-1].by_kind
        return History(
            at_seconds=[past.at_seconds for past in shown],
            limit_bytes=[past.limit_bytes for past in shown],
            by_kind={kind: [past.by_kind[kind] for past in shown] for kind in kinds},
            generated_per_second=generated_per_second,
        )


def router(served: Streaming, pulse: PoolPulse, resolved: Callable[[str | None], str]) -> APIRouter:
    """Return the route of `/v1/live`.

    Args:
        resolved: returns the model for a name or alias, or raises NotFound.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(pulse.run())
        yield
        task.cancel()

    router = APIRouter(lifespan=lifespan)

    @router.get(ENDLESS, tags=["cache"], response_model=Snapshot, include_in_schema=False)
    async def live(http: HttpRequest, model: str | None = None) -> Response:
        """Stream snapshots of one model and the states of all, until the client disconnects."""
        pulse.check()
        name = resolved(model) if model else None
        return live_stream(http, served, pulse.snapshots(name))

    return router


def _memory(moment: LedgerMoment) -> dict[str, Any]:
    used_bytes = sum(moment.by_kind.values())
    return {
        "limit_bytes": moment.limit_bytes,
        "used_bytes": used_bytes,
        "by_kind": moment.by_kind,
    }
