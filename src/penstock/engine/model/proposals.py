"""Proposed tokens of one sequence, and how many of them are right. Pure: no arrays of MLX.

    propose ──> what followed the same tokens elsewhere ──> checked in one decode step
    judged  ──> how many were right ──> how many are proposed next time

A proposal is accepted where it is the token that the sampler chooses, so that an answer is the same
with and without.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.model.ngram_filter import LEAST_NGRAM, NgramFilter
from penstock.engine.offload.prefill_rate import RunningMean

LONGEST_NGRAM = 16
"""Tokens after which a longer agreement counts no more."""
TEXT_KINDS = ("short", "long", "resumed")
"""Kinds of proposals from text."""
PLACES_ASKED = 8
"""Last places of one agreement whose next tokens are counted."""
LONG_AGREEMENT = 8
"""Tokens from which an agreement counts as long: such proposals are more often right."""
RESUMED_FROM = 4
"""Tokens that agreed with a place whose next token was replaced, from which its text goes on."""
FIRST_SHARE = 0.6
"""Share of right proposals that is assumed of a sequence before the first."""
RETRY_TOKENS = 64
"""Tokens without a proposal after which the assumption is made again."""

RESUMED = 1
"""Agreement of the tokens behind one that was replaced, at the place of an earlier proposal."""
DRAFTED = -1
"""Agreement of the tokens that a draft model has chosen."""
LEAST_PREDICTION = 1_024
"""Tokens that an expected answer may have however short the prompt is."""

Tokens = npt.NDArray[np.intc]
TextPlaces = npt.NDArray[np.intp]
"""Places in a text, by the number of the token."""


class Proposal(NamedTuple):
    """Tokens that may follow, and how sure their place is."""

    tokens: list[int]
    agreement: int = 0
    """Number of last tokens that were the same in front of them; or `RESUMED`, or `DRAFTED`."""


NOTHING = Proposal([])


class Proposer(Protocol):
    """A source of proposals for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return up to `most` tokens that may follow; none without an agreement.

        Args:
            tokens: prompt and answer so far; from call to call they only grow.
            most: tokens to propose.
        """


class NgramProposer:
    """Proposes the tokens behind the last ones where those occurred before in the same text."""

    def __init__(self) -> None:
        self._text = array("i")
        self._runs = NgramFilter(LEAST_PREDICTION)

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return up to `most` tokens that may follow; none if the end never occurred before.

        The places count whose tokens agree longest. The tokens are the ones that most of them go on
        with, see `_most_common`.
        """
        occurred = self._add(tokens)
        count = len(self._text)
        if not occurred or most < 1 or count <= LEAST_NGRAM:
            return NOTHING
        text = np.frombuffer(self._text, np.intc)
        ends, agreement = agreements(text[:-1], text[-LONGEST_NGRAM:])
        if agreement < LEAST_NGRAM:
            return NOTHING
        return Proposal(_most_common(text, ends[-PLACES_ASKED:] + 1, most), agreement)

    def _add(self, tokens: Sequence[int]) -> bool:
        """Take in the new tokens; tell whether the last ones may have occurred before."""
        start = len(self._text)
        self._text.extend(tokens[start:])
        if len(self._text) > self._runs.tokens:
            self._runs.clear(len(self._text) + 1)
            start = 0
        return self._runs.add(self._text[max(0, start + 1 - LEAST_NGRAM) :])


def _most_common(text: Tokens, starts: TextPlaces, most: int) -> list[int]:
    """Return the tokens of most places, one by one; of equally many the last one counts.

    A place that goes on with another token is left. A text that ends is taken to repeat itself.
    """
    tokens: list[int] = []
    periods = len(text) - starts
    while len(starts) > 1 and len(tokens) < most:
        following = text[starts + len(tokens) % periods][::-1].tolist()
        tokens.append(max(following, key=following.count))
        same = [token == tokens[-1] for token in reversed(following)]
        starts, periods = starts[same], periods[same]
    rest = (np.arange(len(tokens), most) % periods[0]) + starts[0]
    return [*tokens, *text[rest].tolist()]


class PredictionProposer:
    """Proposes from a text that the caller expects as the answer.

    A text longer than the prompt, and than `LEAST_PREDICTION`, counts up to there.

    Args:
        prediction: the expected answer.
        prompt_tokens: tokens in front of the answer.
    """

    def __init__(self, prediction: Sequence[int], prompt_tokens: int) -> None:
        most = max(prompt_tokens, LEAST_PREDICTION)
        self._text = np.array(prediction[:most], np.intc)
        self._runs = NgramFilter(len(self._text))
        self._runs.add(self._text.tolist())
        self._prompt_tokens = prompt_tokens
        self._expected = 0
        """Place of the next token, if the answer goes on as expected."""
        self._seen = prompt_tokens

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return up to `most` tokens that may follow: the text's first ones before any answer."""
        new = tokens[self._seen :]
        self._seen = len(tokens)
        agreement = LONGEST_NGRAM
        if not self._follows(new):
            last = tokens[max(self._prompt_tokens, self._seen - LONGEST_NGRAM) :]
            ends, agreement = self._agreements(last)
            if agreement < LEAST_NGRAM:
                self._expected = len(self._text)
                return NOTHING
            # Of equal places the next one behind the last, as an edit leaves the order as it is.
            later = ends[ends >= self._expected]
            self._expected = int(later[0] if later.size else ends[-1]) + 1
        return Proposal(
            self._text[self._expected : self._expected + max(0, most)].tolist(), agreement
        )

    def _agreements(self, last: Sequence[int]) -> tuple[TextPlaces, int]:
        """Return the places that agree with the answer's last tokens, and in how many of them."""
        if len(last) < LEAST_NGRAM or last[-LEAST_NGRAM:] not in self._runs:
            return np.zeros(0, np.intp), 0
        return agreements(self._text, np.array(last, np.intc))

    def _follows(self, new: Sequence[int]) -> bool:
        """Move on by new tokens of the answer; tell whether they were the expected ones."""
        start, end = self._expected, self._expected + len(new)
        if end >= len(self._text) or self._text[start:end].tolist() != list(new):
            return False
        self._expected = end
        return True


def agreements(text: Tokens, last: Tokens) -> tuple[TextPlaces, int]:
    """Return all places where the longest agreement with the end of `last` ends, and its length.

    At least as long as `last`, or as the text in front of a place, it is not looked at further.
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
    """The proposals of one sequence: the tokens, and how many of them were right.

    Args:
        proposers: those of the sequence, in order; the longest agreement counts.
    """

    def __init__(self, proposers: Sequence[Proposer] = ()) -> None:
        self.accepted_tokens = 0
        """Proposed tokens that are in the answer."""
        self.rejected_tokens = 0
        """Proposed tokens that are not."""
        self.proposers = proposers
        self._shares = {kind: RunningMean(FIRST_SHARE) for kind in (*TEXT_KINDS, "draft")}
        self._ahead: list[int] = []
        """Tokens behind the present end at the place of the last proposal."""
        self._agreed = 0
        """Tokens that agreed with that place."""
        self._missed = False
        """Whether the last token was another one there."""
        self._read = 0
        """Tokens that were compared with that place, and all before."""
        self._without = 0
        """Tokens since the last proposal."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return the tokens that are most likely to follow; none if no proposer has any.

        Where an agreement of some tokens ended in another one, that is taken to be replaced, and
        the text behind it is proposed.

        Args:
            tokens: prompt and answer so far.
            most: tokens to propose; 0 is none.
        """
        if self._ahead:
            self._follow(tokens)
        self._read = len(tokens)
        best = NOTHING
        for proposer in self.proposers:
            # Behind a proposal that is as sure as any, the others only take the tokens in.
            wanted = 0 if best.agreement >= LONGEST_NGRAM else 2 * most
            proposal = proposer.propose(tokens, wanted)
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
        return Proposal(best.tokens[:most], best.agreement)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Go on at the place of the last proposal; two tokens that are others there leave it."""
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
        """Return the share of proposals behind such an agreement that are expected to be right."""
        return self._shares[_kind(agreement)].value

    def expect(self, agreement: int, share: float) -> None:
        """Expect such a share of proposals behind such an agreement to be right."""
        self._shares[_kind(agreement)].value = share

    def judged(self, proposed: int, accepted: int, agreement: int) -> None:
        """Take in how many first tokens of a checked proposal were right.

        After a while without any, the share of the first one is assumed again, but not of a draft
        model's: it would have to read all of the text.
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
    """Return 1 for each token that was right, and 0 for the first that was not."""
    return [1.0] * accepted + [0.0] * (accepted < proposed)


def _kind(agreement: int) -> str:
    """Return the kind of proposals whose share is measured together."""
    if agreement == DRAFTED:
        return "draft"
    if agreement == RESUMED:
        return "resumed"
    return "long" if agreement >= LONG_AGREEMENT else "short"
