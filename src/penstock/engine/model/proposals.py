"""Speculation: tokens proposed for a sequence, and how many of them pay. Pure: no arrays of MLX.

    propose ──> what followed the same tokens earlier ──> checked in one decode step
    judged  ──> how many were right ──> how many are proposed next time

A proposal is accepted where it is the token that the sampler chooses, so that an answer is the same
with and without. It costs a wider step: as many tokens are proposed as are expected to pay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from penstock.engine.offload.prefill_rate import RunningMean

LEAST_NGRAM = 3
"""Tokens that must have occurred before, in this order, for a proposal."""
LONGEST_NGRAM = 16
"""Tokens after which a longer agreement counts no more."""
FIRST_SHARE = 0.6
"""Share of right proposals that is assumed of a sequence before the first."""
RETRY_TOKENS = 64
"""Tokens without a proposal after which the assumption is made again."""
WIDTHS = (1, 2, 4, 8, 16)
"""Numbers of proposed tokens among which the best is chosen."""


class NgramProposer:
    """Proposes what followed the last tokens where they occurred before in the same text."""

    def __init__(self) -> None:
        self._text = array("i")

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow; none if the end never occurred before.

        Of several places the one counts whose tokens agree longest, and of these the last.

        Args:
            tokens: prompt and answer so far; from call to call they only grow.
            most: tokens to propose.
        """
        self._text.extend(tokens[len(self._text) :])
        count = len(self._text)
        if most < 1 or count <= LEAST_NGRAM:
            return []
        text = np.frombuffer(self._text, np.intc)
        ends = _ends(text)
        if not ends.size:
            return []
        start = int(ends[-1]) + 1
        period = count - start
        return [int(text[start + i % period]) for i in range(most)]


def _ends(text: np.ndarray[tuple[int], np.dtype[np.intc]]) -> np.ndarray[tuple[int], np.dtype]:
    """Return where the longest agreement with the end of a text ends, all such places."""
    last = len(text) - 1
    ends = np.flatnonzero(text[LEAST_NGRAM - 1 : last] == text[last]) + LEAST_NGRAM - 1
    for back in range(1, LONGEST_NGRAM):
        reaching = ends[ends >= back]
        agreeing = reaching[text[reaching - back] == text[last - back]]
        if not agreeing.size:
            return ends if back >= LEAST_NGRAM else agreeing
        ends = agreeing
    return ends


class StepCosts:
    """Measured seconds of decode steps by the number of their rows and new tokens of each."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], RunningMean] = {}

    def add(self, rows: int, width: int, seconds: float) -> None:
        """Take in a step."""
        self._seconds.setdefault((rows, width), RunningMean(seconds)).add(seconds)

    def ratio(self, rows: int, width: int) -> float:
        """Return how many times longer a step takes than one of a token a row.

        A width that was never measured is taken to cost what the next narrower one does.
        """
        one = self._seconds.get((rows, 1))
        known = [w for of, w in self._seconds if of == rows and w <= width]
        if one is None or not known:
            return 1.0
        return self._seconds[rows, max(known)].value / one.value


class Speculation:
    """The proposals of one sequence: the tokens, and how many of them pay."""

    def __init__(self) -> None:
        self._proposer = NgramProposer()
        self._share = RunningMean(FIRST_SHARE)
        self._without = 0
        """Tokens since the last proposal."""

    def propose(self, tokens: Sequence[int], most: int, rows: int, costs: StepCosts) -> list[int]:
        """Return the tokens to check in the next step, none if that does not pay.

        Args:
            tokens: prompt and answer so far.
            most: tokens to propose; 0 is none.
            rows: sequences of the step.
            costs: of the engine's steps.
        """
        proposal = self._proposer.propose(tokens, self._best(most, rows, costs))
        self._without = 0 if proposal else self._without + 1
        if self._without >= RETRY_TOKENS:
            self._without, self._share = 0, RunningMean(max(self._share.value, FIRST_SHARE))
        return proposal

    def judged(self, proposed: int, accepted: int) -> None:
        """Take in how many first tokens of a proposal were right."""
        for right in [1.0] * accepted + [0.0] * (accepted < proposed):
            self._share.add(right)

    def _best(self, most: int, rows: int, costs: StepCosts) -> int:
        """Return the number of proposed tokens with most expected tokens a second; 0 is none."""
        best, speed = 0, 1.0
        for count in sorted({min(width, most) for width in WIDTHS} - {0}):
            expected = sum(self._share.value**i for i in range(count + 1))
            gained = expected / costs.ratio(rows, count + 1)
            if gained > speed:
                best, speed = count, gained
        return best
