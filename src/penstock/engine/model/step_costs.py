"""Measured times of decode steps, and the number of proposed tokens that pays. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WIDTHS = (1, 2, 4, 8, 16)
"""Numbers of proposed tokens among which the best is chosen."""
SAMPLES = 9
"""Steps of a kind whose median time counts: one slow step is not the rule."""
LEAST_SAMPLES = 3
"""Steps of a kind after which its time is known."""
DRAFT_PASS = -1
"""Width under which a pass of the draft model is measured."""
FORGET_STEPS = 512
"""Steps after which a kind that was not taken since is measured again: contexts grow."""


@dataclass(slots=True)
class _WidthTimes:
    """Times of the last steps of one kind."""

    last_step: int
    _median: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, seconds: float, step: int) -> None:
        """Take in the time of a step; times of long ago are forgotten."""
        if step - self.last_step > FORGET_STEPS:
            self._seconds.clear()
        self._seconds.append(seconds)
        self.last_step = step
        self._median = None

    @property
    def median_seconds(self) -> float | None:
        """Median of the times; None before there are enough."""
        if self._median is None and len(self._seconds) >= LEAST_SAMPLES:
            self._median = median(self._seconds)
        return self._median


class StepCosts:
    """Measured seconds of decode steps by their number of rows and of proposed tokens."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], _WidthTimes] = {}
        self._steps = 0

    def add(self, rows: int, proposed: int, seconds: float) -> None:
        """Take in a step, in which the longest proposal had `proposed` tokens."""
        self._steps += 1
        self._add(rows, _bucket(proposed) if proposed else 0, seconds)

    def _add(self, rows: int, kind: int, seconds: float) -> None:
        times = self._times.get((rows, kind))
        if times is None:
            times = self._times[rows, kind] = _WidthTimes(self._steps)
        times.add(seconds, self._steps)

    def ratio(self, rows: int, proposed: int) -> float:
        """Return how many times longer a step takes than one without proposals.

        A width that is not known is taken to cost as much as the next narrower one.
        """
        alone = self._seconds(rows, 0)
        known = (self._seconds(rows, width) for width in reversed(WIDTHS) if width <= proposed)
        wide = next((seconds for seconds in known if seconds is not None), None)
        return 1.0 if alone is None or wide is None else wide / alone

    def add_draft(self, rows: int, seconds: float) -> None:
        """Add the time of a draft model's pass, which gives one token for each of `rows` rows."""
        self._add(rows, DRAFT_PASS, seconds)

    def draft_ratio(self, rows: int, drafted_rows: int, tokens: int) -> float:
        """Return how many steps without proposals fit in the time of drafting `tokens` tokens.

        The time counts as 0 until both have been measured.
        """
        alone, drafting = self._seconds(rows, 0), self._seconds(drafted_rows, DRAFT_PASS)
        return 0.0 if alone is None or drafting is None else tokens * drafting / alone

    def saved_seconds(self, rows: int, speed: float) -> float:
        """Return the seconds saved for one token of each row at this relative speed."""
        alone = self._seconds(rows, 0)
        return 0.0 if alone is None else alone * (1 - 1 / speed)

    def best_width(self, proposals: Sequence[tuple[int, float]]) -> int:
        """Return the number of proposed tokens per row that yields the most tokens per second.

        See `best`.
        """
        return self.best(proposals)[0]

    def best(
        self, proposals: Sequence[tuple[int, float]], drafted_rows: int = 0
    ) -> tuple[int, float]:
        """Return the best number of proposed tokens per row, and the speed with it.

        The speed is in tokens of a row for each step without proposals. All rows of a step are as
        wide as the widest. The number is 0 where proposals do not pay. It is also 0 until a step
        with this number of rows and no proposals has been timed.

        Args:
            proposals: length of each row's, and the share of it that is expected to be right.
            drafted_rows: rows whose tokens a draft model would have to choose first.
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
    """Return the expected tokens of a row: those accepted, and the choice behind them."""
    return sum(share**i for i in range(length + 1))


def _bucket(proposed: int) -> int:
    """Return the width under which a step with such a proposal is measured."""
    return next((width for width in WIDTHS if proposed <= width), WIDTHS[-1])
