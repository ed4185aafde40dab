"""Trials of a step in reserved bytes: small ones tell what larger ones take, and how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import log2
from typing import TypeAlias

import mlx.core as mx

logger = logging.getLogger(__name__)

Reserve: TypeAlias = Callable[[int], AbstractContextManager[object]]
"""Reserves bytes until a `with` block is left."""

ROUNDS = 12
"""Most measurements of a step; the largest counts."""
RANK_ROUNDS = 3
"""Measurements of a step of several ranks, which all run it equally often."""
ROUNDS_SECONDS = 0.1
"""Seconds of measuring after which a step is not measured again."""
TRIAL_TOKENS = 8
"""Tokens of the chunk that tells how long a whole one would take, and how many bytes."""
TRIAL_SECONDS = 1.0
"""Seconds that it may take to be read twice: the first time MLX makes its kernels."""
MOST_SECONDS = 5.0
"""Seconds that a step may be expected to take and still be measured. A slower one is reckoned from
a shorter one, in proportion: its bytes grow no faster than its tokens, but for the scores."""
SLACK = 1.10
"""Factor from the bytes of a measured step to the bytes that are reserved for it."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was run."""

    size: int
    """Tokens or rows of it."""
    nbytes: int
    seconds: float

    def scaled(self, size: int) -> int:
        """Return the bytes of a larger step, in proportion."""
        return -(-self.nbytes * size // self.size)


class StepTrials:
    """Runs steps in reserved bytes, and not for long: small ones tell what larger ones take.

    Args:
        reserve: reserves bytes.
        free: returns the bytes that could be reserved.
        alone: whether this is the only process. Ranks wait for each other within a step: none may
            run one more than the others, or another one.
        whole: whether the whole step is measured, however long it takes.
    """

    def __init__(
        self, reserve: Reserve, free: Callable[[], float], *, alone: bool, whole: bool = False
    ) -> None:
        self._reserve = reserve
        self._free = free
        self._alone = alone
        self._whole = whole

    def measure(
        self,
        run: Callable[[int], object],
        size: int,
        unit_bytes: int,
        *,
        beside: int = 0,
        scores: Callable[[int], int] = lambda size: 0,
    ) -> MeasuredStep:
        """Measure a step of `size` tokens or rows, or of as many as there is time for.

        Args:
            run: runs a step of a size.
            size: the size that is asked for.
            unit_bytes: bytes that a token or row takes, about.
            beside: bytes that every step takes beside that; they are left out of the result.
            scores: bytes that do not grow in proportion, by the size; 0 by default.

        Raises:
            LedgerFull, NeverFits: there is no room for the next larger step.
        """
        if not self._alone:
            taken, seconds = peak_of(lambda: run(size), float("inf"), RANK_ROUNDS)
            return MeasuredStep(size, max(0, taken - beside), seconds)
        reached = min(TRIAL_TOKENS, size)
        less, taken, seconds = 0, 0, 0.0
        for count in dict.fromkeys((max(1, reached // 2), reached)):
            less = taken
            with self._reserve(beside + less + unit_bytes * -(-count // 2)):
                taken, seconds = peak_of(lambda: run(count), TRIAL_SECONDS, 2)  # noqa: B023
            taken = max(1, taken - beside)
        last = size if self._whole else _fitting(reached, seconds, size)
        if last < size:
            logger.info("extrapolating the largest steps from size %d to %d", last, size)
        elif seconds * size > reached:
            logger.info("measuring the largest steps, for about %.0f s", seconds * size / reached)
        while reached < last:
            following, expected = last, int(SLACK * taken * last / reached) + scores(last)
            if beside + expected > self._free():  # it may take less: a line or a power tells
                following = min(2 * reached, last)
                line = taken + (taken - less) * (following - reached) * 2 // reached
                power = taken * (taken / max(1, less)) ** log2(following / reached)
                expected = int(SLACK * max(line, power if less else 0))
            with self._reserve(beside + expected):
                often = (ROUNDS_SECONDS, ROUNDS) if following == last else (TRIAL_SECONDS, 1)
                less = taken
                taken, seconds = peak_of(lambda: run(following), *often)  # noqa: B023
                taken, reached = max(1, taken - beside), following
        if last <= TRIAL_TOKENS:
            with self._reserve(beside + taken):
                again, seconds = peak_of(lambda: run(last), ROUNDS_SECONDS, ROUNDS)
            taken = max(taken, again - beside)
        return MeasuredStep(last, taken, seconds)


def _fitting(reached: int, seconds: float, size: int) -> int:
    """Return the size up to which a step is measured whose first `reached` take some seconds."""
    most = size if seconds * size <= MOST_SECONDS * reached else reached
    while most < size and seconds * 2 * most <= MOST_SECONDS * reached:
        most *= 2
    return most


def peak_of(
    run: Callable[[], object], limit_seconds: float = ROUNDS_SECONDS, rounds: int = ROUNDS
) -> tuple[int, float]:
    """Return the most bytes and the least seconds that `run` takes after any other work.

    MLX hands a cached buffer out again even if it is larger than the request, so its cache is off
    meanwhile. The lag of MLX's threads behind their caller differs by some percent from run to run,
    so a quick step is run again.
    """
    kept = mx.set_cache_limit(0)
    mx.clear_cache()
    peaks: list[int] = []
    seconds: list[float] = []
    try:
        while len(peaks) < rounds and sum(seconds) < limit_seconds:
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
            peaks.append(mx.get_peak_memory() - before)
    finally:
        mx.set_cache_limit(kept)
    return max(peaks), min(seconds)
