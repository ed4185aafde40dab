"""A server of several models, each the embedded one or its folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from patience import SOON
from servers import settings, wait_until

from penstock.models.loading import expected_bytes, load_all
from penstock.pool.model_pool import ModelPool
from penstock.pool.open_model import PoolMember
from penstock.server.app import Server
from penstock.server.several_models import ServedModel, SeveralModels

ASKED = "The code of the amber falcon is 4821. What is the code of the amber falcon?"
ENGINE = {"block_size": 64, "max_kv_size": 4_096}
ONE = 45_000_000
"""A limit for one of the models, and none beside it."""


@dataclass
class Address:
    url: str
    several: SeveralModels

    def chat(self, model: str | None, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 8, **more}
        if model is not None:
            body["model"] = model
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=SOON)

    def answer(self, model: str | None, **more: Any) -> str:
        answered = self.chat(model, **more)
        assert answered.status_code == 200, answered.text
        return str(answered.json()["choices"][0]["message"]["content"])

    def models(self) -> dict[str, dict[str, Any]]:
        listed = httpx.get(f"{self.url}/v1/models", timeout=SOON).json()["data"]
        return {model["id"]: model for model in listed}


def spec(name: str, path: Path, slow: threading.Event | None = None, **more: Any) -> PoolMember:
    def load(limit: int) -> Any:
        if slow is not None:
            slow.wait(SOON)
        return load_all(path, limit_bytes=limit)

    def expected(limit: int) -> int:
        return expected_bytes(path, "auto", limit)

    return PoolMember(name=name, load=load, expected_bytes=expected, settings=ENGINE, **more)


@contextmanager
def serve_pool(
    models: Sequence[ServedModel],
    specs: Sequence[PoolMember],
    limit_bytes: int,
    *,
    prompt_bytes: int = 2_000_000,
    any_name: bool = False,
    **changed: Any,
) -> Iterator[Address]:
    """Serve models until left; check that all bytes are released."""
    several = SeveralModels(
        models, settings(**changed), prompt_bytes=prompt_bytes, any_name=any_name
    )
    several.pool = ModelPool(
        specs,
        limit_bytes,
        aside_bytes=prompt_bytes,
        opened=several.opened,
        closing=several.closing,
        stuck=several.stuck,
    )
    server = Server(several, several.app())
    thread = threading.Thread(target=server.run, name="test-server", daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Address(f"http://127.0.0.1:{server.port}", several)
        wait_until(lambda: not any(state.open_requests for state in several.pool.states()))
        several.pool.check()
    finally:
        server.should_exit = True
        thread.join(SOON)
        several.pool.close()
        assert several.pool.ledger.used_bytes == 0
        assert several.memory.used_bytes == several._stored.nbytes


@contextmanager
def served(
    specs: list[PoolMember], limit_bytes: int, *, any_name: bool = False, **changed: Any
) -> Iterator[Address]:
    """Serve models with an alias each."""
    models = [ServedModel(s.name, settings(**changed), (f"{s.name}-alias",)) for s in specs]
    with serve_pool(models, specs, limit_bytes, any_name=any_name, **changed) as address:
        yield address
