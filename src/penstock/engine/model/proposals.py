"""Proposed tokens of one sequence, and how many of them are right. Pure: no arrays of MLX.

    propose ──> continuation of the same tokens elsewhere ──> checked in one decode step
    judged  ──> how many were right ──> how many are proposed next time

A proposed token is accepted if the sampler chooses it, so that answers are the same with and
without proposals.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.prefill_rate import RunningMean

LEAST_NGRAM = 3
"""Tokens that must have occurred before, in this order, for a proposal."""
LONGEST_NGRAM = 16
"""Tokens after which a longer agreement makes no difference."""
TEXT_KINDS = ("short", "long", "resumed")
"""Kinds of proposals from text."""
PLACES_ASKED = 8
"""Last places of one agreement whose next tokens are counted."""
LONG_AGREEMENT = 8
"""Tokens from which an agreement counts as long: such proposals are more often right."""
RESUMED_FROM = 4
"""Tokens that agreed with a place before a replaced token, from which its text continues."""
FIRST_SHARE = 0.6
"""Assumed share of right proposals of a new sequence."""
RETRY_TOKENS = 64
"""Tokens without a proposal after which the assumption is made again."""

RESUMED = 1
"""Agreement of the tokens after a replaced one, at the place of an earlier proposal."""
DRAFTED = -1
"""Agreement of the tokens chosen by a draft model."""
LEAST_PREDICTION = 1_024
"""Tokens that an expected answer may have however short the prompt is."""

Tokens = npt.NDArray[np.intc]
TextPlaces = npt.NDArray[np.intp]
"""Places in a text, by the number of the token."""


class Proposal(NamedTuple):
    """Tokens that may follow, and the confidence in their place."""

    tokens: list[int]
    agreement: int = 0
    """Number of last tokens that agreed in front of them; or `RESUMED`, or `DRAFTED`."""


NOTHING = Proposal([])


class Proposer(Protocol):
    """A source of proposals for one sequence."""

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Return up to `limit` tokens that may follow; from call to call `tokens` only grow."""


class NgramProposer:
    """Proposes the continuation of the last tokens at earlier places in the same text."""

    def __init__(self) -> None:
        self._text = array("i")

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        self._text.extend(tokens[len(self._text) :])
        if limit < 1 or len(self._text) <= LEAST_NGRAM:
            return NOTHING
        text = np.frombuffer(self._text, np.intc)
        ends, agreement = agreements(text[:-1], text[-LONGEST_NGRAM:])
        if agreement < LEAST_NGRAM:
            return NOTHING
        return Proposal(_most_common(text, ends[-PLACES_ASKED:] + 1, limit), agreement)


def _most_common(text: Tokens, starts: TextPlaces, limit: int) -> list[int]:
    """Return the most common tokens of all places, one by one; on a tie the last place decides.

    A place that continues differently is dropped. A text that ends is assumed to repeat itself.
    """
    tokens: list[int] = []
    periods = len(text) - starts
    while len(starts) > 1 and len(tokens) < limit:
        following = text[starts + len(tokens) % periods][::-1].tolist()
        tokens.append(max(following, key=following.count))
        same = [token == tokens[-1] for token in reversed(following)]
        starts, periods = starts[same], periods[same]
    rest = (np.arange(len(tokens), limit) % periods[0]) + starts[0]
    return [*tokens, *text[rest].tolist()]


class PredictionProposer:
    """Proposes from a text that the caller expects as the answer.

    The text counts up to the length of the prompt, or `LEAST_PREDICTION`.
    """

    def __init__(self, prediction: Sequence[int], prompt_tokens: int) -> None:
        limit = max(prompt_tokens, LEAST_PREDICTION)
        self._text = np.array(prediction[:limit], np.intc)
        self._prompt_tokens = prompt_tokens
        self._expected = 0
        """Index of the next token, if the answer continues as expected."""
        self._seen = prompt_tokens

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        new = tokens[self._seen :]
        self._seen = len(tokens)
        agreement = LONGEST_NGRAM
        if not self._follows(new):
            last = tokens[max(self._prompt_tokens, self._seen - LONGEST_NGRAM) :]
            ends, agreement = agreements(self._text, np.array(last, np.intc))
            if agreement < LEAST_NGRAM:
                self._expected = len(self._text)
                return NOTHING
            # Of equal places the next one behind the last, as an edit leaves the order as it is.
            later = ends[ends >= self._expected]
            self._expected = int(later[0] if later.size else ends[-1]) + 1
        return Proposal(
            self._text[self._expected : self._expected + max(0, limit)].tolist(), agreement
        )

    def _follows(self, new: Sequence[int]) -> bool:
        start, end = self._expected, self._expected + len(new)
        if end >= len(self._text) or self._text[start:end].tolist() != list(new):
            return False
        self._expected = end
        return True


def agreements(text: Tokens, last: Tokens) -> tuple[TextPlaces, int]:
    """Return all places where the longest agreement with the end of `last` ends, and its length.

    The search ends at the length of `last`, and at the beginning of the text.
    """
    ends = np.flatnonzero(text == last[-1]) if len(last) else np.zeros(0, np.intp)
    agreement = min(1, ends.size)
    for back in range(1, len(last) if agreement else 0):
        reaching = ends[ends >= back]
        agreeing = reaching[text[reaching - back] == last[-1 - back]]
        if not agreeing.size:
            break
        ends, agreement = agreeing, back + 1
    return ends, agreement


class Speculation:
    """The proposals of one sequence, and how many of them were right."""

    def __init__(self, proposers: Sequence[Proposer] = ()) -> None:
        self.accepted_tokens = 0
        """Proposed tokens in the answer."""
        self.rejected_tokens = 0
        """Proposed tokens that are not."""
        self.proposers = proposers
        self._shares = {kind: RunningMean(FIRST_SHARE) for kind in (*TEXT_KINDS, "draft")}
        self._ahead: list[int] = []
        """Tokens after the present end at the place of the last proposal."""
        self._agreed = 0
        """Tokens that agreed with that place."""
        self._missed = False
        """Whether the last token differed there."""
        self._read = 0
        """Tokens compared with that place, and all before."""
        self._without = 0
        """Tokens since the last proposal."""

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Return the tokens that are most likely to follow; none if no proposer has any.

        After an agreement and one other token, that is assumed to be a replacement, and the text
        after it is proposed.
        """
        if self._ahead:
            self._follow(tokens)
        self._read = len(tokens)
        best = NOTHING
        for proposer in self.proposers:
            # Behind a proposal that is as sure as any, the others only take the tokens in.
            count = 0 if best.agreement >= LONGEST_NGRAM else 2 * limit
            proposal = proposer.propose(tokens, count)
            if proposal.agreement > best.agreement:
                best = proposal
        if best.tokens:
            if best.tokens[: len(self._ahead)] != self._ahead[: len(best.tokens)]:
                self._agreed = 0
            self._ahead, self._agreed = best.tokens, max(self._agreed, best.agreement)
        elif self._agreed >= RESUMED_FROM:
            best = Proposal(self._ahead, RESUMED)
        else:
            return best
        return Proposal(best.tokens[:limit], best.agreement)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Continue at the place of the last proposal; two differing tokens leave it."""
        new = tokens[self._read :]
        for token, expected in zip(new, self._ahead, strict=False):
            is_right = token == expected
            left = self._missed and not is_right
            self._missed = not is_right
            self._agreed += is_right
            if left:
                self._ahead = []
                break
        self._ahead = self._ahead[len(new) :]

    def share(self, agreement: int) -> float:
        """Return the expected share of right proposals after such an agreement."""
        return self._shares[_kind(agreement)].value

    def expect(self, agreement: int, share: float) -> None:
        self._shares[_kind(agreement)].value = share

    def judged(self, proposed: int, accepted: int, agreement: int) -> None:
        """Record how many first tokens of a checked proposal were right.

        After a while without any, the share of the first one is assumed again, but not of a
        draft model's: it would have to read all of the text.
        """
        if proposed:
            self._without = 0
            self.rejected_tokens += proposed - accepted
            for right in outcomes(proposed, accepted):
                self._shares[_kind(agreement)].add(right)
            return
        self._without += 1
        if self._without >= RETRY_TOKENS:
            self._without = 0
            for kind in TEXT_KINDS:
                self._shares[kind].value = max(self._shares[kind].value, FIRST_SHARE)


def outcomes(proposed: int, accepted: int) -> list[float]:
    """Return 1 for each right token, and 0 for the first wrong one."""
    return [1.0] * accepted + [0.0] * (accepted < proposed)


def _kind(agreement: int) -> str:
    if agreement == DRAFTED:
        return "draft"
    if agreement == RESUMED:
        return "resumed"
    return "long" if agreement >= LONG_AGREEMENT else "short"
