"""Turns of models on one device: equal time, however long their steps are."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import pytest
from patience import SOON
from servers import wait_until

from penstock.engine.turns import Turns

STEP_SECONDS = {"small": 1.0, "large": 10.0}
LENGTH = 60.0
"""Seconds for which both models have work."""
TURN_SECONDS = STEP_SECONDS["large"] + STEP_SECONDS["small"]
"""Longest turn beside a model that waits."""


class StepTurns(Turns):
    """Turns of a step each, in which models with long steps get more time."""

    def is_over(self, owner: Hashable) -> bool:
        return self.is_contended


class SavedTurns(Turns):
    """Turns in which the time that a model leaves unused is credited to it."""

    def _enter(self, owner: Hashable) -> None:
        self._used_seconds.setdefault(owner, 0.0)


def lengths_of_turns(
    kind: type[Turns], alone_seconds: float, *, idle: bool = False
) -> list[tuple[str, float]]:
    """Let both models compute; return owner and length of each turn while both have work.

    Args:
        alone_seconds: time for which the large one computes before the small one has work.
        idle: whether neither computes when both get work.
    """
    now = [0.0]
    turns, taken = kind(lambda: now[0]), []
    end = alone_seconds + LENGTH

    def work(owner: str) -> None:
        if owner == "small":
            wait_until(lambda: now[0] >= alone_seconds)
        while now[0] < end:
            with turns.turn(owner):
                since = max(now[0], alone_seconds)
                while now[0] < end:
                    wait_until(lambda: turns.is_contended or not alone_seconds <= now[0] < end)
                    now[0] += STEP_SECONDS[owner]
                    if turns.is_over(owner):
                        break
                taken.append((owner, now[0] - since))

    if idle:
        with turns.turn("large"):
            now[0] = alone_seconds
    threads = [threading.Thread(target=work, args=(owner,)) for owner in STEP_SECONDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return taken


def check(taken: list[tuple[str, float]]) -> None:
    small, large = (
        sum(length for name, length in taken if name == owner) for owner in STEP_SECONDS
    )
    assert abs(small - large) <= TURN_SECONDS
    assert max(length for _, length in taken) <= TURN_SECONDS


@pytest.mark.parametrize(("alone_seconds", "idle"), [(0.0, False), (50.0, False), (50.0, True)])
def test_models_with_short_and_long_steps_get_equal_time(alone_seconds: float, idle: bool) -> None:
    check(lengths_of_turns(Turns, alone_seconds, idle=idle))


def test_check_detects_unequal_turns() -> None:
    with pytest.raises(AssertionError):
        check(lengths_of_turns(StepTurns, 0.0))
    with pytest.raises(AssertionError):
        check(lengths_of_turns(SavedTurns, 50.0))
