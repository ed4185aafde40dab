"""Turns of engines on the device: exclusive, shared by time, and without starvation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from patience import SOON
from servers import wait_until

from penstock.engine.turns import Turns


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def waiting(turns: Turns, owner: str, order: list[str]) -> Iterator[None]:
    """Wait for a turn that another owner has, in a thread, until left."""

    def wait() -> None:
        with turns.turn(owner):
            order.append(owner)

    before = len(turns._waiting)
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(turns._waiting) > before)
    yield
    thread.join(SOON)
    assert not thread.is_alive()


def use(turns: Turns, clock: Clock, owner: str, seconds: float) -> None:
    with turns.turn(owner):
        clock.seconds += seconds


def test_turn_is_held_by_one_thread_at_a_time() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work(owner: int) -> None:
        for _ in range(200):
            with turns.turn(owner):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert (inside[0], most[0]) == (0, 1)


def test_turn_goes_to_owner_with_least_used_time() -> None:
    clock, order = Clock(), list[str]()
    turns = Turns(clock)
    turns._used_seconds |= {"large": 5.0, "small": 1.0, "other": 0.0}
    with turns.turn("other"):
        clock.seconds += 10.0
        inner = [waiting(turns, "large", order), waiting(turns, "small", order)]
        for context in inner:
            context.__enter__()
    for context in inner:
        with pytest.raises(StopIteration):
            next(context.gen)  # type: ignore[attr-defined]
    assert order == ["small", "large"]


def test_small_model_runs_many_steps_between_long_ones() -> None:
    clock, order = Clock(), list[str]()
    turns = Turns(clock)
    use(turns, clock, "large", 1.0)
    with turns.turn("small"):
        turns._used_seconds["small"] = 0.0
        thread = waiting(turns, "large", order)
        thread.__enter__()
        steps = 0
        while not turns.is_over("small"):
            clock.seconds += 0.125
            steps += 1
    with pytest.raises(StopIteration):
        next(thread.gen)  # type: ignore[attr-defined]
    assert steps == 9  # until it has had more than the large one's second


def test_idle_time_earns_no_credit() -> None:
    clock = Clock()
    turns = Turns(clock)
    use(turns, clock, "busy", 100.0)
    with turns.turn("busy"), waiting_at_exit(turns, "new") as order:
        assert turns._used_seconds["new"] == 100.0
        assert not turns.is_over("busy")
        clock.seconds += 0.001
        assert turns.is_over("busy")
    assert order == []


@contextmanager
def waiting_at_exit(turns: Turns, owner: str) -> Iterator[list[str]]:
    """Start waiting for a turn, which is granted after the block."""
    order: list[str] = []

    def wait() -> None:
        with turns.turn(owner):
            order.append(owner)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: bool(turns._waiting))
    yield order
