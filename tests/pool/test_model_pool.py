"""The pool of models: loading, room, failures, limits; on real engines of tiny models."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from patience import SOON
from pool_models import NAMES, TinyModels, answer
from servers import wait_until

from penstock.errors import EngineStopped, ModelError, NeverFits
from penstock.ledger import Kind
from penstock.pool import open_model
from penstock.pool.model_policy import Standing
from penstock.pool.model_pool import ModelPool

TWO = 2.5
"""Models that a limit holds: two, and some keys and values."""


@contextmanager
def pooled(models: TinyModels, fit: float = TWO, **settings: Any) -> Iterator[ModelPool]:
    """Open a pool, and check all bytes at its end."""
    gc.collect()
    before = mx.get_active_memory()
    pool = ModelPool(models.specs(**settings), int(fit * models.fixed_bytes), aside_bytes=100_000)
    with pool:
        yield pool
        wait_until(lambda: not any(state.open_requests for state in pool.states()))
        pool.check()
    assert pool.ledger.used_bytes == 0
    gc.collect()
    assert mx.get_active_memory() <= before + 1_000


BROKEN = """
import sys

import penstock
import mlx.core as mx
from penstock.errors import ModelError
from penstock.pool import model_pool
from penstock.pool.open_model import PoolMember

if "unclaimed" in sys.argv:
    model_pool.claim_main_thread = lambda: None


def load(limit):
    for more in range(30):
        try:
            numbers = mx.linalg.inv(mx.zeros((4, 4)))  # fails in a thread of MLX
            for _ in range(more):
                numbers = numbers + 1
            mx.eval(numbers)
        except RuntimeError:
            pass
    raise ModelError("broken")


broken = PoolMember(name="broken", load=load, expected_bytes=lambda limit: 1000)
with model_pool.ModelPool([broken], 10**9) as pool:
    for _ in range(60):
        error = pool.enter("broken").exception()
        assert str(error) == "broken", error
print("refused")
"""
"""Program that loads a model whose file is damaged again and again."""


def load_broken(*arguments: str, seconds: float) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", BROKEN, *arguments], stdout=subprocess.PIPE, timeout=seconds
    )
    assert ran.returncode == 0
    return ran.stdout.decode()


def test_damaged_model_is_refused_each_time() -> None:
    """MLX's count of running tasks stays right; see benchmarks/notes/structure.md."""
    assert load_broken(seconds=SOON) == "refused\n"


def test_check_detects_load_in_mlx_main_thread() -> None:
    """Negative control."""
    with pytest.raises(subprocess.TimeoutExpired):
        load_broken("unclaimed", seconds=15)


def standings(pool: ModelPool) -> dict[str, str]:
    return {state.name: state.standing.value for state in pool.states()}


def test_models_load_on_demand_and_unload_others(models: TinyModels) -> None:
    with pooled(models) as pool:
        assert set(standings(pool).values()) == {"away"}
        for name in "abcab":
            assert answer(pool, name) == models.alone[name]
            assert pool.ledger.used_bytes <= pool.ledger.limit_bytes
        assert sorted(standings(pool).values()) == ["away", "loaded", "loaded"]


def test_requests_of_three_models_at_once_are_all_answered(models: TinyModels) -> None:
    answers: dict[str, list[list[int]]] = {name: [] for name in NAMES}
    with pooled(models) as pool:

        def client(name: str) -> None:
            for _ in range(2):
                answers[name].append(answer(pool, name))

        threads = [threading.Thread(target=client, args=(name,)) for name in NAMES * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    assert answers == {name: [models.alone[name]] * 4 for name in NAMES}


def test_model_that_needs_pinned_memory_is_refused(models: TinyModels) -> None:
    with pooled(models, 1.6, pinned={"a"}) as pool:
        assert answer(pool, "a") == models.alone["a"]
        with pytest.raises(NeverFits, match=r"b needs .* beside .* of pinned a. Raise"):
            answer(pool, "b")
        assert standings(pool)["a"] == "loaded"
        assert answer(pool, "a") == models.alone["a"]


def test_broken_model_fails_only_its_own_requests(models: TinyModels) -> None:
    models.broken.add("b")
    with pooled(models) as pool:
        waiting = [pool.enter(name) for name in ("a", "b", "b", "c")]
        for name, entered in zip("abbc", waiting, strict=True):
            if name == "b":
                with pytest.raises(ModelError, match="b is broken"):
                    entered.result(SOON)
            else:
                entered.result(SOON)
                pool.leave(name)
        assert {state.name: state.error for state in pool.states()}["b"] == "b is broken"
        models.broken.clear()
        assert answer(pool, "b") == models.alone["b"]
        assert all(state.error is None for state in pool.states())


def test_failed_load_leaves_no_bytes_reserved(models: TinyModels) -> None:
    models.broken_late.add("b")
    with pooled(models) as pool:
        with pytest.raises(ModelError):
            answer(pool, "b")
        assert pool.ledger.used_bytes == 100_000  # for prompts
        assert answer(pool, "a") == models.alone["a"]


def test_unload_waits_for_open_requests(models: TinyModels) -> None:
    with pooled(models) as pool:
        pool.load("a").result(SOON)
        pool.enter("a").result(SOON)
        gone = pool.unload("a")
        wait_until(lambda: standings(pool)["a"] == "leaving")
        late = pool.enter("a")
        assert not gone.done() and not late.done()
        pool.leave("a")
        gone.result(SOON)
        late.result(SOON)  # it was loaded again
        pool.leave("a")
        pool.unload("b").result(SOON)  # it is away


def test_idle_model_is_unloaded_after_its_ttl(models: TinyModels) -> None:
    now = [0.0]
    pool = ModelPool(models.specs(ttl_seconds=60.0), 10**9, clock=lambda: now[0])
    with pool:
        pool.load("a").result(SOON)
        now[0] = 61.0
        wait_until(lambda: standings(pool)["a"] == "away")


def test_cancelled_request_does_not_load_model(models: TinyModels) -> None:
    with pooled(models) as pool:
        pool.enter("a").result(SOON)
        pool.enter("b").result(SOON)  # both stay in use
        waiting = pool.enter("c")
        assert waiting.cancel()
        pool.leave("a")
        pool.leave("b")
        wait_until(lambda: not pool._wanted)
        assert standings(pool)["c"] == "away"


def test_lowered_limit_unloads_models(models: TinyModels) -> None:
    with pooled(models, 4.0) as pool:
        for name in NAMES:
            answer(pool, name)
        assert set(standings(pool).values()) == {"loaded"}
        pool.set_limit(int(1.5 * models.fixed_bytes)).result(SOON)
        assert pool.ledger.used_bytes <= pool.ledger.limit_bytes
        assert list(standings(pool).values()).count("loaded") == 1
        pool.set_limit(int(4.0 * models.fixed_bytes)).result(SOON)
        assert answer(pool, "a") == models.alone["a"]
        pool.enter("a").result(SOON)
        with pytest.raises(NeverFits, match=r"the limit cannot be 1.00 kB"):
            pool.set_limit(1_000).result(SOON)
        pool.leave("a")


def test_closed_pool_refuses_requests(models: TinyModels) -> None:
    pool = ModelPool(models.specs(), int(TWO * models.fixed_bytes))
    for name in "ab":
        pool.enter(name).result(SOON)
    waiting = pool.enter("c")
    pool.close()
    for refused in (waiting, pool.enter("a")):
        with pytest.raises(EngineStopped):
            refused.result(SOON)
    assert pool.ledger.used_bytes == 0


def test_check_detects_leaked_reservation(models: TinyModels) -> None:
    with ModelPool(models.specs(), 10**9) as pool:
        answer(pool, "a")
        pool.check()
        with pool.turns.turn("test"):
            leak = pool.ledger.reserve(Kind.WEIGHTS, 1)
        with pytest.raises(AssertionError, match="weights"):
            pool.check()
        leak.release()


def test_check_detects_weights_retained_after_unload(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(open_model, "unload", kept.append)
    with pytest.raises(AssertionError), pooled(models) as pool:
        answer(pool, "a")
    assert kept


def test_close_during_load_fails_waiting_requests(models: TinyModels) -> None:
    with pooled(models) as pool:
        loading = pool.load("a")
        wait_until(lambda: pool.states()[0].standing is not Standing.AWAY)
        pool.close()
        assert loading.done()
