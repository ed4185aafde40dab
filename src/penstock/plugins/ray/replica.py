"""Replica deployment: one engine with its whole server, called through Ray instead of sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Message

from penstock.config import ApiKey, ModelSource, ServerSettings, WeightsDtype
from penstock.engine.engine import Engine
from penstock.engine.view import EngineView
from penstock.errors import EngineStopped
from penstock.models.head_source import head_of
from penstock.models.loading import load_within
from penstock.plugins.ray.autoscaling import CLAIMED
from penstock.plugins.ray.hang_watcher import watch_this_process
from penstock.plugins.ray.router import BLOCKS, METRICS
from penstock.routing import Summary
from penstock.server.access import Access, KeyHolder
from penstock.server.app import create_app
from penstock.server.service import Service

T = TypeVar("T")

USED = "penstock.used"
"""Type of an answer's last message, which has the number of prompt and generated tokens."""
OPERATOR = KeyHolder(ApiKey(name="", sha256="0" * 64, admin=True))
GONE_SECONDS = 5.0
"""Seconds for a request to end after its client has disconnected."""


@dataclass(frozen=True, slots=True)
class Served:
    model: str
    """Folder or Hugging Face name."""
    name: str
    settings: ServerSettings
    limits: dict[str, Any]
    preload: bool = False
    weights_dtype: WeightsDtype = "auto"
    model_source: ModelSource = "auto"


class Replica:
    """The application of `penstock serve`, called through Ray."""

    def __init__(self, served: Served) -> None:
        limit = served.limits.get("memory_limit")
        how = served.weights_dtype, limit, served.model_source
        loaded = load_within(served.model, *how, mtp=head_of(served.limits))
        self._engine = Engine(loaded.model, loaded.tokenizer, **served.limits)
        if served.preload:
            self._engine.preload()
        self._service = Service(
            self._engine,
            loaded.tokenizer,
            served.settings,
            served.name,
            sampling=loaded.sampling,
            # The key file may be on another machine, so the door reads it.
            access=Access(served.settings.api_key, file=served.settings.keys),
        )
        self._app = create_app(self._service)
        self._watching: asyncio.Task[None] | None = None
        self._watcher = watch_this_process()

    async def names(self) -> tuple[str, int]:
        return await self._ask(lambda view: (view.fingerprint, view.limits.block_size))

    async def _ask(self, question: Callable[[EngineView], T]) -> T:
        return await asyncio.wrap_future(self._engine.ask(question))

    async def answer(
        self,
        scope: dict[str, Any],
        body: bytes,
        *,
        block_hashes: bytes = b"",
        cache_key: str | None = None,
        attempt: str = "",
    ) -> AsyncIterator[Message]:
        """Yield the answer to a request as ASGI messages; closing the iterator cancels it.

        Args:
            scope: ASGI scope of the request.
            body: body of the request.
            block_hashes: block hashes of the prompt, concatenated; used by the router.
            cache_key: `prompt_cache_key` of the request; used by the router.
            attempt: name of the attempt; used by the router.
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
            if (client := scope["state"]["key_holder"]) is not None and client.tokens:
                yield {"type": USED, "tokens": client.tokens}
        finally:
            gone.set()
            if not answering.done():
                await asyncio.wait((answering,), timeout=GONE_SECONDS)
                answering.cancel()

    # ---- methods that Ray calls, by these names

    async def record_routing_stats(self) -> dict[str, bytes]:
        with suppress(EngineStopped):
            blocks = await self._ask(lambda view: Summary.of(view.block_hashes()).to_bytes())
            return {BLOCKS: blocks, METRICS: await self._metrics()}
        return {}

    async def _metrics(self) -> bytes:
        request = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http"}
        where = {"path": "/metrics", "raw_path": b"/metrics", "query_string": b""}
        scope = {**request, **where, "headers": [], "state": {"key_holder": OPERATOR}}
        messages = [message async for message in self.answer(scope, b"")]
        return b"".join(message.get("body", b"") for message in messages)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        with suppress(EngineStopped):
            return {CLAIMED: await self._ask(lambda view: view.claimed_share)}
        return {}

    async def check_health(self) -> None:
        if not self._engine.alive:
            raise EngineStopped("the engine's thread has died")

    async def __del__(self) -> None:
        await self.close()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._service.draining = True
        settings = self._service.settings
        await asyncio.to_thread(self._engine.drain, settings.drain_timeout_seconds)
        await asyncio.to_thread(self._engine.close)
        self._service.close()
