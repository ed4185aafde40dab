"""Measured times of decode steps, and the number of proposed tokens with the best throughput."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WIDTHS = (1, 2, 4, 8, 16)
"""Candidates for the number of proposed tokens."""
SAMPLES = 9
"""Number of steps whose median time is used."""
LEAST_SAMPLES = 3
"""Minimum number of measured steps for a median."""
DRAFT_PASS = -1
"""Key of the times of the draft model's passes."""
FORGET_STEPS = 512
"""Number of steps after which an unused time expires, because contexts grow."""


@dataclass(slots=True)
class _WidthTimes:
    last_step: int
    _median: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, seconds: float, step: int) -> None:
        if step - self.last_step > FORGET_STEPS:
            self._seconds.clear()
        self._seconds.append(seconds)
        self.last_step = step
        self._median = None

    @property
    def median_seconds(self) -> float | None:
        """Median time; None if too few steps were measured."""
        if self._median is None and len(self._seconds) >= LEAST_SAMPLES:
            self._median = median(self._seconds)
        return self._median


class StepCosts:
    """Measured times of one engine.

    Args:
        drafts_at_once: whether all tokens of a proposal are drafted in one pass.
    """

    def __init__(self, *, drafts_at_once: bool = False) -> None:
        self._drafts_at_once = drafts_at_once
        self._times: dict[tuple[int, int], _WidthTimes] = {}
        self._steps = 0

    def add(self, rows: int, proposed: int, seconds: float) -> None:
        """Add the time of a step whose longest proposal had `proposed` tokens."""
        self._steps += 1
        self._add(rows, _bucket(proposed) if proposed else 0, seconds)

    def _add(self, rows: int, kind: int, seconds: float) -> None:
        times = self._times.get((rows, kind))
        if times is None:
            times = self._times[rows, kind] = _WidthTimes(self._steps)
        times.add(seconds, self._steps)

    def ratio(self, rows: int, proposed: int) -> float:
        """Return the time of a step with proposals relative to one without; 1.0 if unmeasured.

        A number of proposed tokens that was not measured is assumed to take as long as the next
        smaller one of `WIDTHS`.

        Args:
            rows: number of sequences in the step.
            proposed: number of tokens of the longest proposal.
        """
        alone = self._seconds(rows, 0)
        known = (self._seconds(rows, width) for width in reversed(WIDTHS) if width <= proposed)
        proposed_seconds = next((seconds for seconds in known if seconds is not None), None)
        return 1.0 if alone is None or proposed_seconds is None else proposed_seconds / alone

    def add_draft(self, rows: int, tokens: int, seconds: float) -> None:
        """Add the time in which `tokens` tokens were drafted for each row."""
        self._add(rows, DRAFT_PASS, seconds / self._passes(tokens))

    def _passes(self, tokens: int) -> int:
        return 1 if self._drafts_at_once else tokens

    def draft_ratio(self, rows: int, drafted_rows: int, tokens: int) -> float:
        """Return the time of drafting `tokens` tokens relative to a step without proposals.

        0 until both times have been measured.
        """
        alone, drafting = self._seconds(rows, 0), self._seconds(drafted_rows, DRAFT_PASS)
        return 0.0 if alone is None or drafting is None else self._passes(tokens) * drafting / alone

    def saved_seconds(self, rows: int, speed: float) -> float:
        """Return the seconds saved per token of a row at the relative speed `speed`."""
        alone = self._seconds(rows, 0)
        return 0.0 if alone is None else alone * (1 - 1 / speed)

    def best_width(self, proposals: Sequence[tuple[int, float]]) -> int:
        """Return the number of proposed tokens per row with the highest throughput. See `best`."""
        return self.best(proposals)[0]

    def best(
        self, proposals: Sequence[tuple[int, float]], drafted_rows: int = 0
    ) -> tuple[int, float]:
        """Return the best number of proposed tokens per row, and the resulting relative speed.

        The speed is relative to a step without proposals. A step is as wide as its widest row. The
        number is 0 if proposals are not worthwhile, or if no step with this number of rows and no
        proposals has been timed.

        Args:
            proposals: length and expected acceptance rate of each row's proposal.
            drafted_rows: number of rows whose tokens a draft model would have to generate first.
        """
        rows, longest = len(proposals), max((length for length, _ in proposals), default=0)
        best, speed = 0, 1.0
        if self._seconds(rows, 0) is None:
            return best, speed
        for width in sorted({min(width, longest) for width in WIDTHS} - {0}):
            gained = sum(_expected(min(width, length), share) for length, share in proposals) / rows
            taken = self.ratio(rows, _bucket(width)) + self.draft_ratio(rows, drafted_rows, width)
            if gained / taken > speed:
                best, speed = width, gained / taken
        return best, speed

    def _seconds(self, rows: int, width: int) -> float | None:
        times = self._times.get((rows, width))
        if times is None or self._steps - times.last_step > FORGET_STEPS:
            return None
        return times.median_seconds


def _expected(length: int, share: float) -> float:
    """Return the expected tokens of a row: accepted ones, and the one sampled after them."""
    return sum(share**i for i in range(length + 1))


def _bucket(proposed: int) -> int:
    return next((width for width in WIDTHS if proposed <= width), WIDTHS[-1])
