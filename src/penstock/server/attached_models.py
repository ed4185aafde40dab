"""Service and application of each loaded model, on a server of several models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import fastapi.dependencies.models
from fastapi import FastAPI

from penstock.config import ServerSettings
from penstock.models.encoder_types import WRITING
from penstock.pool.model_pool import LoadedMember
from penstock.pool.open_model import OpenEncoder
from penstock.server.access import Access
from penstock.server.app import routes_app
from penstock.server.encoders.embedding_routes import EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from penstock.server.encoders.encoder_app import encoder_app, encoder_object
from penstock.server.encoders.encoder_service import EncoderService
from penstock.server.live import Pulse
from penstock.server.openai.openai_routes import model_object
from penstock.server.prompt_memory import PromptMemory
from penstock.server.response_store import ResponseStore
from penstock.server.service import Service

STARTED_SECONDS = 60.0
ENCODING = frozenset({EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS})
"""Paths on which requests that name no model go to an encoder."""

AttachedService: TypeAlias = Service | EncoderService


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Names and settings with which one of several models is served."""

    name: str
    settings: ServerSettings
    """The server's settings, updated by this model's."""
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    kinds: tuple[str, ...] = WRITING
    """Kinds of requests that the model answers; see `encoder_types.kinds_of`."""

    @property
    def writes(self) -> bool:
        return self.kinds == WRITING


class AttachedModel:
    """Service and application of a loaded model, until `close`.

    Args:
        about: returns the model's entry in a list of models.
        loop: event loop on which the application runs.
        pulse: publisher of the model's snapshots; None for an encoder.
    """

    def __init__(
        self,
        service: AttachedService,
        app: FastAPI,
        about: Callable[[], dict[str, Any]],
        loop: asyncio.AbstractEventLoop,
        pulse: Pulse | None = None,
    ) -> None:
        self.pulse = pulse
        self.service = service
        self.app = app
        self.about = about
        self._loop = loop
        self._over = asyncio.Event()
        self._ended = threading.Event()
        asyncio.run_coroutine_threadsafe(self._live(), loop)

    async def _live(self) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                await self._over.wait()
        finally:
            self._ended.set()

    def give_way(self) -> None:
        """End the open requests of a stuck model, see `ModelPool`. Thread-safe."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.service.give_way)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, and so has the service
            self._loop.call_soon_threadsafe(self._over.set)
            self._ended.wait(STARTED_SECONDS)
        forget_routes()


def forget_routes() -> None:
    """Clear FastAPI's caches of routes' functions, which would keep each service in memory."""
    for value in vars(fastapi.dependencies.models).values():
        clear = getattr(value, "cache_clear", None)
        if clear is not None:
            clear()


def attached(
    model: LoadedMember,
    served: ServedModel,
    loop: asyncio.AbstractEventLoop,
    *,
    access: Access,
    memory: PromptMemory,
    stored: ResponseStore,
) -> AttachedModel:
    """Create the service and the application of a loaded model."""
    if isinstance(model, OpenEncoder):
        encoders = EncoderService(model.engine, served.settings, model.name, memory)
        return AttachedModel(
            encoders, encoder_app(encoders), lambda: encoder_object(encoders), loop
        )
    model.engine.bound_process()
    service = Service(
        model.engine,
        model.loaded.tokenizer,
        served.settings,
        model.name,
        sampling=model.loaded.sampling,
        access=access,
        memory=memory,
        stored=stored,
    )
    pulse = Pulse(service)
    app = routes_app(service, pulse)
    return AttachedModel(service, app, lambda: model_object(service, model.name), loop, pulse)
