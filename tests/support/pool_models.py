"""Three tiny random models for pools, and their expected answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from patience import SOON
from small_models import BASE, build

from penstock import Engine, Request
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.view import EngineView
from penstock.errors import ModelError
from penstock.models.mlx_lm import Loaded
from penstock.pool.model_pool import ModelPool
from penstock.pool.open_model import PoolMember

NAMES = ["a", "b", "c"]
SETTINGS = {"max_kv_size": 256, "block_size": 16, "max_batch_size": 4, "prefill_chunk": 32}
PROMPT = tuple(3 + 7 * i % 40 for i in range(70))
TOKENS = 12


def made(name: str) -> Any:
    """Return a model with reproducible weights."""
    mx.random.seed(NAMES.index(name))
    return build({**BASE, "model_type": "llama", "torch_dtype": "float32"})


def request(prompt: tuple[int, ...] = PROMPT, max_tokens: int = TOKENS) -> Request:
    return Request(prompt=prompt, max_tokens=max_tokens)


def answer(pool: ModelPool, name: str, asked: Request | None = None) -> list[int]:
    """Return the tokens of a model's answer; the model is loaded if necessary."""
    model = pool.enter(name).result(SOON)
    try:
        return list(model.engine.submit(asked or request()).result(SOON)[0].tokens)
    finally:
        pool.leave(name)


@dataclass
class TinyModels:
    alone: dict[str, list[int]] = field(default_factory=dict)
    """Answers to `PROMPT`, each of an engine with nothing beside it."""
    fixed_bytes: int = 0
    """Bytes that each takes without a request, with such a limit."""
    broken: set[str] = field(default_factory=set)
    """Models whose header shows that they cannot be loaded."""
    broken_late: set[str] = field(default_factory=set)
    """Models that fail after their weights were read."""
    seen_broken: set[str] = field(default_factory=set)
    """Models that have failed."""

    @classmethod
    def measured(cls) -> TinyModels:
        models = cls()
        for name in NAMES:
            with Engine(made(name), memory_limit=5_000_000, **SETTINGS) as engine:
                models.alone[name] = list(engine.submit(request()).result(SOON)[0].tokens)
                fixed = engine.ask(EngineView.holdings).result().fixed_bytes
                models.fixed_bytes = max(models.fixed_bytes, fixed)
        return models

    def specs(self, *, pinned: set[str] = frozenset(), **more: Any) -> list[PoolMember]:  # type: ignore[assignment]
        return [
            PoolMember(
                name=name,
                load=lambda limit, name=name: self._load(name),
                expected_bytes=lambda limit, name=name: self._expected(name),
                settings=SETTINGS,
                pinned=name in pinned,
                **more,
            )
            for name in NAMES
        ]

    def _load(self, name: str) -> Loaded:
        model: Any = made(name)
        if name in self.broken_late:
            self.seen_broken.add(name)
            raise ModelError(f"{name} is broken")
        return Loaded(model, None, {})  # type: ignore[arg-type]

    def _expected(self, name: str) -> int:
        if name in self.broken:
            raise ModelError(f"{name} is broken")
        return weight_bytes(made(name))
