"""Real servers for tests: a model behind uvicorn, on a local socket."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from patience import SOON

from penstock import Engine, load
from penstock.config import ServerSettings
from penstock.recall import MODEL_PATH
from penstock.server import app
from penstock.server.app import Server
from penstock.server.service import Service
from penstock_bench.recall import Dialogue, dialogue

MODEL_NAME = "recall"


@dataclass(frozen=True)
class Running:
    """A listening server."""

    url: str
    service: Service
    server: Server


@contextmanager
def serve_in_thread(service: Service) -> Iterator[Running]:
    """Serve on a free port in a thread with its own event loop until left."""
    server = Server(service, app.create_app(service))
    thread = threading.Thread(target=server.run, name="test-server", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + SOON
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{server.port}", service, server)
    finally:
        server.should_exit = True
        thread.join(SOON)
        assert not thread.is_alive(), "the server did not stop"


def settings(**changed: Any) -> ServerSettings:
    return ServerSettings(**{"port": 0, "max_tokens": 512, **changed})


@contextmanager
def serving(
    model: Any = None,
    tokenizer: Any = None,
    *,
    engine: dict[str, Any] | None = None,
    sampling: dict[str, float] | None = None,
    name: str = MODEL_NAME,
    **changed: Any,
) -> Iterator[Running]:
    """Serve a model, the embedded one by default; `changed` are settings of the server.

    At the end the engine is recounted.
    """
    if model is None:
        model, loaded = load(MODEL_PATH)
        tokenizer = tokenizer or loaded
    with Engine(
        model, tokenizer, **{"memory_limit": "200MB", "block_size": 64, **(engine or {})}
    ) as made:
        service = Service(made, tokenizer, settings(**changed), name, sampling=sampling)
        with serve_in_thread(service) as running:
            yield running
        if made.alive:
            made.check()
    del made, service, running, model
    gc.collect()  # arrays in cycles would be counted as somebody else's later


@pytest.fixture(scope="module")
def recall_server() -> Iterator[Running]:
    """One server of the embedded model for the tests of a file that leave it as it was.

    It is gone before the next file: other tests count what MLX holds in this process.
    """
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def told() -> Dialogue:
    """A dialogue with facts whose questions the embedded model answers."""
    return dialogue(7, tokens=600, facts=4)


@contextmanager
def slow_shutdown(seconds: float = SOON) -> Iterator[None]:
    """Have servers whose engine dies answer for longer than a second before they stop: on a busy
    machine a test asks late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "GOODBYE_SECONDS", seconds)
        yield


def wait_until(true: Any, seconds: float = SOON) -> None:
    """Wait until a function returns something true."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.01)
