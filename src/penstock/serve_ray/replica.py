"""One engine and its whole server, without a socket: Ray hands requests in and answers out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from penstock.config import ServerSettings, WeightsDtype
from penstock.engine.engine import Engine
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped
from penstock.models.within_limit import load_within
from penstock.routing import Summary
from penstock.serve_ray.autoscaling import CLAIMED
from penstock.serve_ray.router import BLOCKS
from penstock.server.app import create_app
from penstock.server.service import Service

GONE_SECONDS = 5.0
"""Seconds that a request has to end after its client disconnected."""


@dataclass(frozen=True, slots=True)
class Served:
    """Settings of all replicas, from which every one makes an engine of its own."""

    model: str
    """Folder or hub name."""
    name: str
    settings: ServerSettings
    limits: dict[str, Any]
    """Limits of the engine, as `Engine` takes them."""
    preload: bool = False
    weights_dtype: WeightsDtype = "auto"


class Replica:
    """A replica: the application of `penstock serve`, asked through Ray.

    Raises:
        ModelError, NeverFits, SettingError: as `load_within` and `Engine`; the deployment fails.
    """

    def __init__(self, served: Served) -> None:
        limit = served.limits.get("memory_limit")
        loaded = load_within(served.model, served.weights_dtype, limit)
        self._engine = Engine(loaded.model, loaded.tokenizer, **served.limits)
        if served.preload:
            self._engine.preload()
        self._service = Service(
            self._engine,
            loaded.tokenizer,
            served.settings,
            served.name,
            sampling=loaded.sampling,
        )
        self._app = create_app(self._service)
        self._watching: asyncio.Task[None] | None = None

    async def names(self) -> tuple[str, int]:
        """Return the fingerprint and the block's tokens, by which a prompt's blocks are named."""
        return await self._service.ask(lambda view: (view.fingerprint, view.limits.block_size))

    async def answer(
        self,
        scope: dict[str, Any],
        body: bytes,
        *,
        block_hashes: bytes = b"",
        cache_key: str | None = None,
    ) -> AsyncIterator[Message]:
        """Answer a request in ASGI's messages; left early, it is cancelled.

        Args:
            scope: ASGI's, of one HTTP request.
            body: all of it.
            block_hashes: of the prompt's blocks, and
            cache_key: the client's: for the router alone.
        """
        if self._watching is None:
            self._watching = asyncio.create_task(self._service.watch())
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if coming:
                return coming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.ensure_future(self._app(scope, receive, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await answering
        finally:
            gone.set()
            if not answering.done():
                await asyncio.wait((answering,), timeout=GONE_SECONDS)
                answering.cancel()

    # ---- what Ray asks, by these names

    async def record_routing_stats(self) -> dict[str, bytes]:
        """Return the summary of the blocks it holds."""
        with suppress(EngineStopped):
            return {BLOCKS: await self._service.ask(summary_of)}
        return {}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the share of memory that requests have claimed."""
        with suppress(EngineStopped):
            return {CLAIMED: await self._service.ask(lambda view: view.claimed_share)}
        return {}

    async def check_health(self) -> None:
        """Raise if the engine has died: Ray starts another replica then.

        Raises:
            EngineStopped: it has.
        """
        if not self._engine.alive:
            raise EngineStopped("the engine's thread has died")

    async def __del__(self) -> None:
        """Write pending blocks and end; Ray calls this after the open requests have ended."""
        if self._watching is not None:
            self._watching.cancel()
        self._service.draining = True
        settings = self._service.settings
        await asyncio.to_thread(self._engine.drain, settings.drain_timeout_seconds)
        await asyncio.to_thread(self._engine.close)
        self._service.close()


def summary_of(view: EngineView) -> bytes:
    """Return the summary of all blocks in an engine's tree."""
    return Summary.of(view.block_hashes()).to_bytes()
