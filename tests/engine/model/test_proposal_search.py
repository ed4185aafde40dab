"""Asking proposers lazily gives the same proposals as asking all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.model import shared_text
from penstock.engine.model.proposals import (
    NOTHING,
    RESUMED,
    RESUMED_FROM,
    NgramProposer,
    PredictionProposer,
    Proposal,
    Speculation,
)
from penstock.engine.model.shared_text import SharedProposer, SharedText

SALT = b"one".ljust(8)


class AskingAll(Speculation):
    """Speculation that calls every proposer and takes the longest match."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        if self._ahead:
            self._follow(tokens)
        self._read = len(tokens)
        asked = [proposer.propose(tokens, 2 * most) for proposer in self.proposers]
        best = max(asked, key=lambda proposal: proposal.agreement)
        if best.tokens:
            if best.tokens[: len(self._ahead)] != self._ahead[: len(best.tokens)]:
                self._agreed = 0
            self._ahead, self._agreed = best.tokens, max(self._agreed, best.agreement)
        elif self._agreed >= RESUMED_FROM:
            best = Proposal(self._ahead, RESUMED)
        return Proposal(best.tokens[:most], best.agreement)


Parts = list[tuple[int, list[int], int]]
PARTS: Any = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=40), st.integers(0, 6)),
    max_size=16,
)


@given(PARTS, st.lists(st.integers(0, 5), max_size=30))
@settings(max_examples=150)
def test_shared_search_matches_separate_proposers(parts: Parts, expected: list[int]) -> None:
    """Sequences take turns; there are few pages, so the oldest are reused."""
    check_same(parts, expected)


def check_same(parts: Parts, expected: list[int], page: int = 8) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_text, "PAGE_TOKENS", page)
        text, searched = SharedText(page * 6), SharedText(page * 6)
        ours = [speculation(text, expected, number) for number in range(3)]
        theirs = [searching(searched, expected, number) for number in range(3)]
        texts: list[list[int]] = [[] for _ in ours]
        for number, tokens, most in parts:
            texts[number] += tokens
            if texts[number]:
                proposed = ours[number].propose(texts[number], most)
                assert proposed == theirs[number].propose(texts[number], most)


def speculation(text: SharedText, expected: list[int], number: int) -> Speculation:
    shared = SharedProposer(text, number, SALT)
    return Speculation([PredictionProposer(expected, 0), NgramProposer(), shared])


def searching(text: SharedText, expected: list[int], number: int) -> Speculation:
    shared = SharedProposer(text, number, SALT)
    return AskingAll([PredictionProposer(expected, 0), NgramProposer(), shared])


def test_shared_search_matches_separate_proposers_on_repetition() -> None:
    draw = random.Random(1)
    lines = [[draw.randrange(30) for _ in range(40)] for _ in range(20)]
    parts = []
    for _ in range(120):
        line = list(draw.choice(lines))
        line[draw.randrange(40)] = draw.randrange(30)
        at = draw.randrange(1, 40)
        number = draw.randrange(3)
        parts += [(number, line[:at], 4), (number, line[at:], 4)]
    check_same(parts, [token for line in lines for token in line], page=64)


def test_check_detects_proposer_that_skips_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if not asked, it skips text."""
    propose = SharedProposer.propose

    def lazy(self: SharedProposer, tokens: Sequence[int], most: int) -> Proposal:
        if most:
            return propose(self, tokens, most)
        self._added = len(tokens)
        return NOTHING

    monkeypatch.setattr(SharedProposer, "propose", lazy)
    with pytest.raises(AssertionError):
        test_shared_search_matches_separate_proposers_on_repetition()
