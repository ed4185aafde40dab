"""A short request beside one that fills the memory is admitted at once, at little cost."""

from __future__ import annotations

from typing import Any

import pytest
from fault_setup import Setup, assert_begins_right, end_of, made

from penstock.engine.handle import Handle
from penstock.engine.schedule import fair_shares
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence_kv import SequenceKV

LARGE: dict[str, Any] = {"max_kv_size": 4_096, "max_batch_size": 8, "max_queue": 16}
PROMPT, ANSWER = 500, 200
SHORT = 20


def fill(setup: Setup, missing_tokens: int = 0) -> Handle:
    """Submit a request that fills the memory; return its handle."""
    needed = setup.core.view.sequence_bytes(PROMPT + ANSWER - missing_tokens)
    setup.core.set_limit(setup.fixed + needed.per_sequence + needed.shared)
    return setup.ask(PROMPT, ANSWER, client="a")


def steps_until_placed(setup: Setup, handle: Handle) -> int:
    for steps in range(1, 200):
        setup.step()
        if setup.state(handle) is not State.WAITING:
            return steps
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("steps", [2, 5, 9, 25])
def test_short_request_is_admitted_in_next_step(steps: int) -> None:
    """While the long request prefills, and while it decodes."""
    with made(**LARGE) as setup:
        long = fill(setup)
        setup.step(steps)
        short = setup.ask(SHORT, 2, client="b")
        assert steps_until_placed(setup, short) == 1
        assert setup.state(long) is State.PREEMPTED
        setup.drain()
        for handle in (long, short):
            assert_begins_right(handle)
            assert end_of(handle).usage.completion_tokens == handle.request.max_tokens
        read = setup.core.view.stats().prefilled_tokens - (PROMPT - 1) - (SHORT - 1)
        assert read <= 2 * setup.core.limits.block_size, "little of the long one is read again"


def test_check_detects_missing_early_turn_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(fair_shares, "EARLY_WORK", 10**9)
    with made(**LARGE) as setup:
        fill(setup)
        setup.step(5)
        assert steps_until_placed(setup, setup.ask(SHORT, 2, client="b")) > 1


def run_beside_short_requests(setup: Setup, missing_tokens: int) -> int:
    """Submit short requests all the time; return the prefilled tokens of the long one."""
    long, asked = fill(setup, missing_tokens), 0
    short = None
    for _ in range(1_000):
        setup.step()
        if setup.state(long) is State.DONE:
            break
        if short is None or setup.state(short) is State.DONE:
            short, asked = setup.ask(SHORT, 2, client="b"), asked + 1
    else:
        raise AssertionError("the long one never gets on")
    setup.drain()
    assert_begins_right(long)
    assert end_of(long).usage.completion_tokens >= ANSWER - missing_tokens
    assert asked > 10
    return setup.core.view.stats().prefilled_tokens - asked * (SHORT - 1)


@pytest.mark.parametrize("missing_tokens", [0, 30, 100])
def test_request_filling_memory_progresses_beside_short_ones(missing_tokens: int) -> None:
    """Only missing KV is recomputed."""
    with made(**LARGE) as setup:
        assert run_beside_short_requests(setup, missing_tokens) < 1.5 * PROMPT


def test_check_detects_full_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(SequenceKV, "shorter_paths", lambda self: iter([[]]))
    with made(**LARGE) as setup:
        assert run_beside_short_requests(setup, 30) > 1.5 * PROMPT
