"""Trials of a step in reserved bytes: small ones tell what larger ones take, and how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import inf, log2
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
"""Most seconds that a step may be expected to take and still be measured. A slower one is reckoned
from a shorter one, in proportion: its bytes grow no faster than its tokens, but for the scores."""
LEAST_SECONDS = 0.5
"""The same of a small model, whose loading takes less than a second."""
SECOND_WEIGHT_BYTES = 5_000_000_000
"""Bytes of weights that are loaded in about ten seconds: a second of measuring is a tenth of it."""
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
        seconds: that a step may be expected to take and still be measured; see `trial_seconds`.
        clock: of these seconds. Processor time does not depend on other processes.
    """

    def __init__(
        self,
        reserve: Reserve,
        free: Callable[[], float],
        *,
        alone: bool,
        seconds: float = inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reserve = reserve
        self._free = free
        self._alone = alone
        self._seconds = seconds
        self._clock = clock

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
        lower, reached = 0, 0
        less, taken, seconds, spent = 0, 0, 0.0, 0.0
        trial = min(TRIAL_TOKENS, size)
        for count in dict.fromkeys((max(1, trial // 2), trial)):
            if spent > max(self._seconds, TRIAL_SECONDS):
                break
            lower, less = reached, taken
            with self._reserve(beside + less + unit_bytes * -(-count // 2)):
                taken, seconds, spent = self._timed(partial(run, count), TRIAL_SECONDS, 2)
            taken, reached = max(1, taken - beside), count
        left = self._seconds
        while (last := _fitting(reached, spent, size, left)) > reached:
            if last == size:
                _announce(seconds * size / reached)
            following, expected = last, int(SLACK * taken * last / reached) + scores(last)
            if beside + expected > self._free():  # it may take less: a line or a power tells
                following = min(2 * reached, last)
                steps = (following - reached) / (reached - lower)
                power = log2(following / reached) / log2(reached / lower) if less else 0.0
                line = taken + (taken - less) * steps
                expected = int(SLACK * max(line, taken * (taken / max(1, less)) ** power))
            with self._reserve(beside + expected):
                often = (ROUNDS_SECONDS, ROUNDS) if following == last else (TRIAL_SECONDS, 1)
                lower, less = reached, taken
                taken, seconds, spent = self._timed(partial(run, following), *often)
            taken, reached = max(1, taken - beside), following
            left -= spent
        if reached < size:
            logger.info("extrapolating the largest steps from size %d to %d", reached, size)
        if reached <= TRIAL_TOKENS and seconds < ROUNDS_SECONDS:
            with self._reserve(beside + taken):
                again, seconds = peak_of(partial(run, reached), ROUNDS_SECONDS, ROUNDS)
            taken = max(taken, again - beside)
        return MeasuredStep(reached, taken, seconds)

    def _timed(
        self, run: Callable[[], object], limit_seconds: float, rounds: int
    ) -> tuple[int, float, float]:
        """Return the result of `peak_of`, and the seconds of the last run by the own clock."""
        began = [0.0]

        def timed() -> None:
            began[0] = self._clock()
            run()

        taken, seconds = peak_of(timed, limit_seconds, rounds)
        return taken, seconds, self._clock() - began[0]


def trial_seconds(weight_bytes: int) -> float:
    """Return about a tenth of the seconds in which weights are loaded, within bounds."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, weight_bytes / SECOND_WEIGHT_BYTES))


def _announce(seconds: float) -> None:
    if seconds > 1:
        logger.info("measuring the largest steps, for about %.0f s", seconds)


def _fitting(reached: int, seconds: float, size: int, left: float) -> int:
    """Return the largest size that can be measured in the seconds left, by those of a step.

    It is the whole size, or `reached` times a power of two.
    """
    if seconds * size <= left * reached:
        return size
    most = reached
    while 2 * most < size and seconds * 2 * most <= left * reached:
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
