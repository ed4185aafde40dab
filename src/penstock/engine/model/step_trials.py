"""Trial runs of a step within reserved bytes, extrapolated to larger steps."""

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

from penstock.engine.model.step_peaks import SLACK

logger = logging.getLogger(__name__)

Reserve: TypeAlias = Callable[[int], AbstractContextManager[object]]
"""Function that reserves bytes for the duration of a `with` block."""

ROUNDS = 12
"""Maximum measurements of a step; the largest counts."""
RANK_ROUNDS = 3
"""Measurements of a step with several ranks, which must all run it equally often."""
ROUNDS_SECONDS = 0.1
"""Seconds of measuring after which a step is not repeated."""
TRIAL_TOKENS = 8
"""Tokens of the first trial chunk, from which time and bytes of a whole one are estimated."""
TRIAL_SECONDS = 1.0
"""Time limit for two runs of the trial chunk in seconds; MLX compiles kernels in the first."""
MOST_SECONDS = 5.0
"""Maximum seconds of all measured steps, beside the first short runs of each. The bytes of a slower
step are extrapolated from a shorter one, in proportion: they grow no faster than its tokens, except
for the scores."""
LEAST_SECONDS = 0.3
"""The same limit for a small model, whose loading takes less than a second."""
SECOND_WEIGHT_BYTES = 5_000_000_000
"""Weight bytes per second of the limit: they load in ten seconds, and measuring takes a tenth."""
ONCE = 1e-9
"""Time limit in seconds of a step that runs only once."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    size: int
    nbytes: int
    seconds: float

    def scaled(self, size: int) -> int:
        """Return the bytes extrapolated linearly to a larger step."""
        return -(-self.nbytes * size // self.size)


class StepTrials:
    """Runs steps within reserved bytes and limited time, starting with small ones.

    Args:
        free: returns the bytes that could be reserved.
        alone: whether this is the only process. Ranks wait for each other within a step, so
            all must run the same steps.
        seconds: maximum expected seconds of all steps together; see `trial_seconds`.
        clock: clock of these seconds. Processor time does not depend on other processes.
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
        self._left = seconds
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
        """Measure a step of `size` tokens or rows, or the largest that the time allows.

        Args:
            unit_bytes: approximate bytes per token or row.
            beside: constant bytes of every step, excluded from the result.
            scores: bytes that do not grow linearly, by size; 0 by default.

        Raises:
            LedgerFull, NeverFits: no memory for the next larger step.
        """
        if not self._alone:
            taken, seconds = peak_of(lambda: run(size), float("inf"), RANK_ROUNDS)
            return MeasuredStep(size, max(0, taken - beside), seconds)
        lower, reached = 0, 0
        less, taken, seconds, spent = 0, 0, 0.0, 0.0
        trial = min(TRIAL_TOKENS, size)
        for count in dict.fromkeys((max(1, trial // 2), trial)):
            if spent > max(self._left, TRIAL_SECONDS):
                break
            lower, less = reached, taken
            # The largest step is repeated in any case: the bytes of a run vary.
            limit = TRIAL_SECONDS if count == size else max(ONCE, min(TRIAL_SECONDS, self._left))
            with self._reserve(beside + less + unit_bytes * -(-count // 2)):
                taken, seconds, spent = self._timed(partial(run, count), limit, 2)
            taken, reached = max(1, taken - beside), count
        while (last := _fitting(reached, spent, size, self._left)) > reached:
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
        if reached < size:
            logger.info("extrapolating the largest steps from size %d to %d", reached, size)
        if reached <= TRIAL_TOKENS and seconds < ROUNDS_SECONDS:
            with self._reserve(beside + taken):
                again, seconds, _ = self._timed(partial(run, reached), ROUNDS_SECONDS, ROUNDS)
            taken = max(taken, again - beside)
        return MeasuredStep(reached, taken, seconds)

    def _timed(
        self, run: Callable[[], object], limit_seconds: float, rounds: int
    ) -> tuple[int, float, float]:
        """Return the result of `peak_of`, and the last run's seconds on the trials' clock."""
        began = [self._clock()]

        def timed() -> None:
            began.append(self._clock())
            run()

        taken, seconds = peak_of(timed, limit_seconds, rounds)
        ended = self._clock()
        self._left -= ended - began[0]
        return taken, seconds, ended - began[-1]


def trial_seconds(weight_bytes: int) -> float:
    """Return about a tenth of the seconds in which weights are loaded, within bounds."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, weight_bytes / SECOND_WEIGHT_BYTES))


def _announce(seconds: float) -> None:
    if seconds > 1:
        logger.info("measuring the largest steps, for about %.0f s", seconds)


def _fitting(reached: int, seconds: float, size: int, left: float) -> int:
    """Return the largest size that fits in `left` seconds, if `reached` takes `seconds`.

    The result is `size`, or `reached` times a power of two.
    """
    if seconds * size <= left * reached:
        return size
    largest = reached
    while 2 * largest < size and seconds * 2 * largest <= left * reached:
        largest *= 2
    return largest


def peak_of(
    run: Callable[[], object], limit_seconds: float = ROUNDS_SECONDS, rounds: int = ROUNDS
) -> tuple[int, float]:
    """Return the peak bytes and the shortest time of `run` over several rounds.

    MLX's cache is disabled meanwhile, because it reuses buffers larger than requested. The peak
    varies by some percent with the lag of MLX's threads, so a fast step is repeated.
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
