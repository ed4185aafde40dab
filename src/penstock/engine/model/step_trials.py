"""Trial runs of a step within reserved bytes, extrapolated to larger steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
"""Number of measurements with several ranks, which must all run a step equally often."""
ROUNDS_SECONDS = 0.1
"""Total seconds of measuring after which a step is not repeated."""
SURE_ROUNDS = 2
"""Number of measurements from which the largest is used without `UNREPEATED`."""
UNREPEATED = 1.2
"""Factor on the bytes of a step measured only once, if larger steps are extrapolated by growth:
the bytes vary by a quarter between runs, and `SLACK` covers a part of that."""
TRIAL_TOKENS = 8
"""Tokens of the first trial chunk, from which time and bytes of a whole chunk are estimated."""
TRIAL_ROWS = 2
"""Rows of the first trial of a decode or sampling step."""
TRIAL_SECONDS = 1.0
"""Maximum seconds of half a trial chunk; if it takes longer, the whole one is not run."""
MOST_SECONDS = 5.0
"""Maximum seconds of all measured steps, excluding the first short ones. The bytes of slower
steps are extrapolated proportionally from shorter ones: they grow no faster than the number of
tokens, except for the scores."""
LEAST_SECONDS = 0.1
"""Minimum of this limit, for small models: penstock itself takes two seconds to start."""
SECOND_WEIGHT_BYTES = 5_000_000_000
"""Weight bytes per second of this limit: loading them takes ten seconds, measuring a tenth."""
ROOM = 2
"""Factor on the extrapolated bytes that must be free: they may be overestimated, and other
reservations of a step are not counted yet."""
SLOPE = 2
"""Factor on the growth between two measured steps in extrapolations."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Bytes and seconds of the largest step that was run, from which larger ones are estimated."""

    size: int
    """Number of tokens or rows."""
    nbytes: int
    seconds: float
    small_size: int = 0
    """Size of the smallest measured step."""
    small_bytes: int = 0
    """Bytes of the smallest measured step; 0 to extrapolate proportionally."""

    @classmethod
    def of(cls, step: _Reached, small: _Reached | None) -> MeasuredStep:
        if small is None:
            return cls(step.size, step.nbytes, step.seconds)
        return cls(step.size, step.nbytes, step.seconds, small.size, small.nbytes)

    def scaled(self, size: int) -> int:
        """Return an upper estimate of the bytes of a larger step."""
        whole = -(-self.nbytes * size // self.size)
        if not self.small_bytes or self.small_size == self.size:
            return whole
        growth = max(0, self.nbytes - self.small_bytes) / (self.size - self.small_size)
        added = growth * (size - self.size)
        return max(self.nbytes + int(added), min(whole, self.nbytes + int(SLOPE * added)))


class StepTrials:
    """Runs steps within reserved bytes and limited time, starting with small ones.

    Args:
        free: returns the bytes that could be reserved.
        alone: whether this is the only process. Ranks wait for each other within a step, so
            all must run the same steps.
        seconds: maximum expected seconds of all steps together; see `trial_seconds`.
        kinds: number of kinds of steps, which share the seconds evenly; unused seconds go to later
            kinds.
        clock: clock for these seconds, such as processor time, which other processes do not affect.
    """

    def __init__(
        self,
        reserve: Reserve,
        free: Callable[[], float],
        *,
        alone: bool,
        seconds: float = inf,
        kinds: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reserve = reserve
        self._free = free
        self._alone = alone
        self._left = seconds
        self._kinds = kinds
        self._clock = clock

    def measure(
        self,
        run: Callable[[int], object],
        size: int,
        unit_bytes: int,
        *,
        first: int = TRIAL_TOKENS,
        beside: int = 0,
        scores: Callable[[int], int] = lambda size: 0,
        constant: bool = False,
    ) -> MeasuredStep:
        """Measure a step of `size` tokens or rows, or the largest that the time allows.

        The time limit is exceeded if the extrapolated bytes are not free, since the actual bytes
        may be fewer.

        Args:
            run: runs a step of a number of tokens or rows.
            size: number of tokens or rows of the step.
            unit_bytes: approximate bytes per token or row.
            first: size of the first trial, after a trial of half its size, or a quarter if
                `constant`.
            beside: constant bytes of every step, excluded from the result.
            scores: bytes that do not grow linearly, by size; 0 by default.
            constant: whether steps have further constant bytes. A larger step is then
                extrapolated by growth.

        Raises:
            LedgerFull, NeverFits: no memory for the next larger step.
        """
        if not self._alone:
            taken, seconds = peak_of(lambda: run(size), float("inf"), RANK_ROUNDS)
            return MeasuredStep(size, max(0, taken - beside), seconds)
        others = self._left * (1 - 1 / self._kinds) if self._left < inf else 0.0
        self._kinds = max(1, self._kinds - 1)
        trial, step = min(first, size), _Reached()
        small = step
        for count in dict.fromkeys((max(1, trial // (4 if constant else 2)), trial)):
            if step.spent > max(self._left, TRIAL_SECONDS):
                break
            with self._reserve(beside + step.nbytes + unit_bytes * -(-count // 2)):
                step = self._ran(run, count, beside, step)
            small = small if small.size else step
        while step.size < size:
            last = _fitting(step.size, step.spent, size, self._left - others)
            if last == step.size:
                reckoned = MeasuredStep.of(step, small if constant else None).scaled(size)
                if (
                    ROOM * (beside + int(SLACK * UNREPEATED * reckoned) + scores(size))
                    <= self._free()
                ):
                    break
                last = min(2 * step.size, size)
            if last == size:
                _announce(step.seconds * size / step.size)
            following, expected = last, int(SLACK * step.nbytes * last / step.size) + scores(last)
            if beside + expected > self._free():  # estimated by growth, it may fit
                following = min(2 * step.size, last)
                expected = int(SLACK * step.grown(following))
            with self._reserve(beside + expected):
                step = self._ran(run, following, beside, step)
        if step.size < size:
            logger.debug(
                "extrapolating the memory of a step from %d to %d tokens or rows", step.size, size
            )
        taken, seconds, rounds, ran = step.nbytes, step.seconds, 1, step.seconds
        while rounds < ROUNDS and ran < ROUNDS_SECONDS and step.spent <= self._left - others:
            with self._reserve(beside + taken):
                again, took, _ = self._run(partial(run, step.size))
            taken, seconds, ran = max(taken, again - beside), min(seconds, took), ran + took
            rounds += 1
        if rounds < SURE_ROUNDS and constant:
            taken = int(UNREPEATED * taken)
            small = replace(small, nbytes=int(UNREPEATED * small.nbytes))
        step = replace(step, nbytes=taken, seconds=seconds)
        return MeasuredStep.of(step, small if constant else None)

    def _ran(
        self, run: Callable[[int], object], size: int, beside: int, step: _Reached
    ) -> _Reached:
        taken, seconds, spent = self._run(partial(run, size))
        return _Reached(size, max(1, taken - beside), seconds, spent, step.size, step.nbytes)

    def _run(self, run: Callable[[], object]) -> tuple[int, float, float]:
        """Run a step once; return its bytes, its seconds, and the seconds on the trials' clock."""
        began = self._clock()
        taken, seconds = peak_of(run, rounds=1)
        spent = self._clock() - began
        self._left -= spent
        return taken, seconds, spent


@dataclass(frozen=True, slots=True)
class _Reached:
    """The largest step so far, and the size and bytes of the one before it."""

    size: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    lower: int = 0
    less: int = 0

    def grown(self, size: int) -> float:
        """Estimate the bytes of a larger step by a line or power law through the last two."""
        steps = (size - self.size) / (self.size - self.lower)
        power = log2(size / self.size) / log2(self.size / self.lower) if self.less else 0.0
        line = self.nbytes + (self.nbytes - self.less) * steps
        return float(max(line, self.nbytes * (self.nbytes / max(1, self.less)) ** power))


def trial_seconds(weight_bytes: int) -> float:
    """Return the seconds for all trials: about a tenth of the time to load the weights."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, weight_bytes / SECOND_WEIGHT_BYTES))


def _announce(seconds: float) -> None:
    if seconds > 1:
        logger.info("measuring the memory of the largest steps, for about %.0f s", seconds)


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
    """Return the peak bytes, and the shortest time in seconds, of `run` over several rounds.

    MLX's cache is disabled meanwhile, because it reuses buffers larger than requested. The peak
    varies by some percent with the lag of MLX's threads, so a fast step is repeated.

    Args:
        run: function to measure.
        limit_seconds: total seconds after which it is not run again.
        rounds: maximum number of runs.
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
