"""A pool of models under random operations: no byte beyond the limit, no request lost."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from patience import SOON
from pool_models import NAMES, TinyModels, request

from penstock.engine.handle import Handle
from penstock.errors import ModelError, NeverFits
from penstock.pool import open_model
from penstock.pool.model_pool import ModelPool
from penstock.pool.open_model import OpenModel

MODELS = st.sampled_from(NAMES)
ASIDE_BYTES = 100_000
SLACK_BYTES = 50_000
"""Bytes of arrays that are no model's, such as those of a test's own."""


@cache
def measured() -> TinyModels:
    return TinyModels.measured()


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.models = TinyModels(measured().alone, measured().fixed_bytes)
        gc.collect()  # what measuring has left would hide as much
        self.before_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        self.pool = ModelPool(self.models.specs(), self.limit(2.5), aside_bytes=ASIDE_BYTES)
        self.waiting: list[tuple[str, Future[OpenModel]]] = []
        self.running: list[tuple[str, Handle]] = []

    def limit(self, models: float) -> int:
        return int(models * self.models.fixed_bytes)

    # ---- acts

    @rule(name=MODELS)
    def ask(self, name: str) -> None:
        self.waiting.append((name, self.pool.enter(name)))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 100))
    def begin(self, which: int) -> None:
        """Submit a request whose model is loaded."""
        ready = [pair for pair in self.waiting if pair[1].done()]
        if ready:
            pair = ready[which % len(ready)]
            self.waiting.remove(pair)
            self.submit(*pair)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        name, handle = self.running.pop(which % len(self.running))
        self.finish(name, handle)

    @rule(name=MODELS)
    def unload(self, name: str) -> None:
        self.pool.unload(name)

    @rule(name=MODELS)
    def break_model(self, name: str) -> None:
        self.models.broken_late ^= {name}

    @precondition(lambda self: not self.running)
    @rule(models=st.sampled_from([1.3, 2.5, 4.0]))
    def change_limit(self, models: float) -> None:
        self.settle()
        self.pool.set_limit(self.limit(models)).result(SOON)

    @rule()
    def settle(self) -> None:
        """Answer all requests, then recount all bytes."""
        while self.waiting or self.running:
            for pair in [*self.running]:
                self.running.remove(pair)
                self.finish(*pair)
            for pair in [pair for pair in self.waiting if pair[1].done()]:
                self.waiting.remove(pair)
                self.submit(*pair)
            if self.waiting and not self.running:
                self.waiting[0][1].exception(SOON)
        self.pool.check()

    def submit(self, name: str, entered: Future[OpenModel]) -> None:
        error = entered.exception(SOON)
        if error is not None:
            assert isinstance(error, ModelError | NeverFits)
            assert name in self.models.seen_broken
            return
        self.running.append((name, entered.result().engine.submit(request())))

    def finish(self, name: str, handle: Handle) -> None:
        try:
            assert list(handle.result(SOON)[0].tokens) == self.models.alone[name]
        finally:
            self.pool.leave(name)

    # ---- rules

    @invariant()
    def stays_within_its_limit(self) -> None:
        ledger = self.pool.ledger
        assert ledger.used_bytes <= ledger.limit_bytes
        held = mx.get_active_memory() - self.before_bytes
        assert held <= ledger.limit_bytes + SLACK_BYTES, "MLX holds more than the limit"

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            for name, handle in self.running:
                handle.cancel()
                self.pool.leave(name)
            self.pool.close()
        assert self.pool.ledger.used_bytes == 0
        gc.collect()
        assert mx.get_active_memory() - self.before_bytes <= SLACK_BYTES, "weights stay behind"


USUAL = settings.default
assert USUAL is not None
FEW = settings(
    max_examples=USUAL.max_examples // 6, stateful_step_count=USUAL.stateful_step_count // 2
)


def test_random_operations_keep_limit_and_all_requests() -> None:
    run_machine(PoolMachine, settings=FEW)


def test_state_machine_detects_weights_retained_after_unload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(open_model, "unload", kept.append)
    machine = PoolMachine()
    machine.ask("a")
    machine.settle()
    with pytest.raises(AssertionError, match="weights stay behind"):
        machine.teardown()
