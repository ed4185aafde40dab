"""Prompt-lookup speculation for one sequence, and its acceptance rate; no MLX arrays.

    propose ──> continuation of the same n-gram elsewhere ──> verified in one decode step
        judged  ──> acceptance rate ──> number of tokens proposed next time

A proposed token is accepted if the sampler chooses it, so answers are the same with and without
proposals.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.prefill_rate import RunningMean

LEAST_NGRAM = 3
"""Minimum n-gram length for a proposal."""
LONGEST_NGRAM = 16
"""Maximum n-gram length compared."""
TEXT_KINDS = ("short", "long", "resumed")
PLACES_ASKED = 8
"""Number of most recent matches whose next tokens are counted."""
LONG_AGREEMENT = 8
"""Minimum length of a long match, which is accepted more often."""
RESUMED_FROM = 4
"""Minimum number of matching tokens before a replaced one to propose the tokens after it."""
FIRST_SHARE = 0.6
"""Assumed acceptance rate of a new sequence."""
RETRY_TOKENS = 64
"""Number of tokens without a proposal after which the acceptance rate is reset."""

RESUMED = 1
"""Agreement of a proposal that continues an earlier one after a replaced token."""
DRAFTED = -1
"""Agreement of a proposal by a draft model."""
LEAST_PREDICTION = 1_024
"""Minimum length in tokens up to which an expected answer is used, however short the prompt."""

Tokens = npt.NDArray[np.intc]
TextPlaces = npt.NDArray[np.intp]


class Proposal(NamedTuple):
    """Proposed tokens, and the length of the match that they continue."""

    tokens: list[int]
    agreement: int = 0
    """Length of the matching n-gram; or `RESUMED`, or `DRAFTED`."""


NOTHING = Proposal([])


class Proposer(Protocol):
    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Return up to `limit` tokens to follow `tokens`, which only grows from call to call."""


class NgramProposer:
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
    """Return the most common continuation over all positions, token by token; ties go to the last.

    Positions that continue differently are dropped. After its end, the text is assumed to repeat.
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
    """Proposes from an expected answer supplied by the caller.

    At most as many of its tokens are used as the prompt has, or `LEAST_PREDICTION`.
    """

    def __init__(self, prediction: Sequence[int], prompt_tokens: int) -> None:
        limit = max(prompt_tokens, LEAST_PREDICTION)
        self._text = np.array(prediction[:limit], np.intc)
        self._prompt_tokens = prompt_tokens
        self._expected = 0
        """Index of the next token if the answer follows the expected text."""
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
            # Of equal matches, the next one after the last: edits usually keep the order.
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
    """Return the positions after the longest n-grams matching the end of `last`, and their length.

    The search stops at the length of `last`, and at the beginning of the text.
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
    def __init__(self, proposers: Sequence[Proposer] = ()) -> None:
        self.accepted_tokens = 0
        self.rejected_tokens = 0
        self.proposers = proposers
        self._shares = {kind: RunningMean(FIRST_SHARE) for kind in (*TEXT_KINDS, "draft")}
        self._ahead: list[int] = []
        self._agreed = 0
        self._missed = False
        self._read = 0
        self._without = 0

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Return the tokens most likely to follow; empty if no proposer has any.

        A single token that differs from an earlier proposal counts as a replacement, and the text
        after it is proposed.
        """
        if self._ahead:
            self._follow(tokens)
        self._read = len(tokens)
        best = NOTHING
        for proposer in self.proposers:
            # After the best possible match, the other proposers only record the tokens.
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
        """Follow the text of the last proposal; give up after two differing tokens."""
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
        """Return the expected acceptance rate of proposals; see `Proposal.agreement`."""
        return self._shares[_kind(agreement)].value

    def expect(self, agreement: int, share: float) -> None:
        self._shares[_kind(agreement)].value = share

    def judged(self, proposed: int, accepted: int, agreement: int) -> None:
        """Record how many tokens of a proposal were accepted; `proposed` is 0 without one.

        After `RETRY_TOKENS` tokens without a proposal, rates are reset to the initial one, except
        for a draft model, which would have to prefill all of the text.
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
    """Return 1 for each accepted token, and 0 for the first rejected one."""
    return [1.0] * accepted + [0.0] * (accepted < proposed)


def _kind(agreement: int) -> str:
    if agreement == DRAFTED:
        return "draft"
    if agreement == RESUMED:
        return "resumed"
    return "long" if agreement >= LONG_AGREEMENT else "short"
