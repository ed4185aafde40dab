"""Texts are searched only for what they seem to have, and the proposals are those of a search."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from engine_faults import model_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.core import Core
from penstock.engine.model import proposals, shared_text
from penstock.engine.model.ngram_filter import LEAST_NGRAM, NgramFilter
from penstock.engine.model.proposals import (
    LONGEST_NGRAM,
    NOTHING,
    PLACES_ASKED,
    RESUMED,
    RESUMED_FROM,
    NgramProposer,
    PredictionProposer,
    Proposal,
    Speculation,
    agreements,
)
from penstock.engine.model.shared_text import SharedProposer, SharedText
from penstock.engine.model.tree_proposer import TreeProposer, _branch
from penstock.engine.request import Request, Sampling

SALT = b"one".ljust(8)


# ---- the filter


@given(st.lists(st.lists(st.integers(0, 9), max_size=90), max_size=12), st.integers(1, 64))
def test_a_filter_misses_no_run(parts: list[list[int]], tokens: int) -> None:
    filtered, text = NgramFilter(tokens), list[int]()
    for part in parts:
        before = runs(text)
        text += part
        known = filtered.add(text[-len(part) - LEAST_NGRAM + 1 :] if part else [])
        if part and len(text) >= LEAST_NGRAM:
            last = tuple(text[-LEAST_NGRAM:])
            assert known or last not in before
        else:
            assert known, "no run at all"
        assert all(run in filtered for run in runs(text))


def runs(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[at : at + LEAST_NGRAM]) for at in range(len(text) - LEAST_NGRAM + 1)}


def test_a_full_filter_takes_few_others_for_known_and_four_bytes_a_token() -> None:
    draw = random.Random(0)
    for tokens in (1, 2, 100, 1_024, 1_025, 12_000):
        filtered = NgramFilter(tokens)
        assert filtered.nbytes == NgramFilter.nbytes_of(tokens) < 4 * tokens
        assert tokens <= filtered.tokens < 2 * tokens
    full = [draw.randrange(50_000) for _ in range(filtered.tokens)]
    filtered.add(full)
    assert all(run in filtered for run in runs(full)), "also across two pieces"
    asked = [tuple(draw.randrange(50_000) for _ in range(LEAST_NGRAM)) for _ in range(4_000)]
    assert 0 < sum(run in filtered for run in asked) <= 4_000 / 14, "about one in sixteen"
    filtered.clear(8)
    assert not any(run in filtered for run in runs(full))


# ---- the same proposals


class SearchingNgram:
    """Proposer that searches its whole text every time."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        if most < 1 or len(tokens) <= LEAST_NGRAM:
            return NOTHING
        text = np.array(tokens, np.intc)
        ends, agreement = agreements(text[:-1], text[-LONGEST_NGRAM:])
        if agreement < LEAST_NGRAM:
            return NOTHING
        following = proposals._most_common(text, ends[-PLACES_ASKED:] + 1, most)
        return Proposal(following, agreement)


class SearchingPrediction(PredictionProposer):
    """Proposer that searches the expected answer wherever that was left."""

    def _agreements(self, last: Sequence[int]) -> tuple[proposals.TextPlaces, int]:
        return agreements(self._text, np.array(last, np.intc))


class SearchingShared(SharedProposer):
    """Proposer that searches all pages every time."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        super().propose(tokens, 0)
        if most < 1 or len(tokens) < LEAST_NGRAM:
            return NOTHING
        return self._text.find(self._writer, tokens[-LONGEST_NGRAM:], most)


class AskingAll(Speculation):
    """Speculation that asks every proposer, and takes the longest agreement."""

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
def test_proposals_are_those_of_a_search_of_everything(parts: Parts, expected: list[int]) -> None:
    """Sequences take turns; pages are few, so that the oldest are filled anew."""
    check_same(parts, expected)


def check_same(parts: Parts, expected: list[int], page: int = 8) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_text, "PAGE_TOKENS", page)
        patch.setattr(proposals, "LEAST_PREDICTION", 16)  # filters grow from there
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
    shared = SearchingShared(text, number, SALT)
    return AskingAll([SearchingPrediction(expected, 0), SearchingNgram(), shared])


def test_long_texts_that_repeat_are_searched_as_before() -> None:
    draw = random.Random(1)
    lines = [[draw.randrange(30) for _ in range(12)] for _ in range(20)]
    parts = []
    for _ in range(120):
        line = list(draw.choice(lines))
        line[draw.randrange(12)] = draw.randrange(30)
        at = draw.randrange(1, 12)
        number = draw.randrange(3)
        parts += [(number, line[:at], 4), (number, line[at:], 4)]
    check_same(parts, [token for line in lines for token in line], page=64)


def test_a_filter_that_forgets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(NgramFilter, "add", lambda self, tokens: len(tokens) < LEAST_NGRAM)
    with pytest.raises(AssertionError):
        test_long_texts_that_repeat_are_searched_as_before()


def test_text_older_than_two_fillings_of_the_pages_is_not_known_for_ever() -> None:
    """Or every run would be taken for known in the end."""
    text, draw = SharedText(4 * shared_text.PAGE_TOKENS), random.Random(2)
    writer, known = shared_text.TextWriter(0, 1), 0
    for at in range(40 * shared_text.PAGE_TOKENS):
        known += text.add(writer, [draw.randrange(50_000)]) and at >= LEAST_NGRAM
    assert known < 40 * shared_text.PAGE_TOKENS / 7, "one in sixteen of each filter"


# ---- in the engine

PROMPT = (*range(1, 60), *range(20, 40))
SMALL: dict[str, Any] = {
    "memory_limit": "80MB",
    "block_size": 32,
    "prefill_chunk": 64,
    "max_batch_size": 3,
    "max_kv_size": 512,
}


def asked(number: int, sampled: bool) -> Request:
    sampling = Sampling(temperature=1.0, seed=number) if sampled else Sampling()
    prompt = PROMPT[: 70 + number % 2]
    return Request(prompt=prompt, max_tokens=50, ignore_eos=True, sampling=sampling)


def test_what_the_tree_proposes_is_what_a_look_at_all_branches_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, looked = TreeProposer.propose, Counter[bool]()

    def compared(self: TreeProposer, tokens: Sequence[int], most: int) -> Proposal:
        proposed = ours(self, tokens, most)
        if most >= 1:
            node = self._kv.node
            looked[node is not None and not node.children] += 1
            assert proposed == looked_at(self, tokens, most)
        return proposed

    monkeypatch.setattr(TreeProposer, "propose", compared)
    core = Core(model_of("llama"), **SMALL, speculative_tokens=8)
    try:
        for number in (1, 1, 2, 1):
            handles = [core.submit(asked(number + more, sampled=True)) for more in range(3)]
            while core.step():
                pass
            assert all(handle.result(0.0) for handle in handles)
        assert core.counters.accepted_tokens > 30
    finally:
        core.close()
    assert looked[True] > 50 and looked[False] > 5


def looked_at(proposer: TreeProposer, tokens: Sequence[int], most: int) -> Proposal:
    """Return what the branches of a proposer's node go on with."""
    node = proposer._kv.node
    if node is None:
        return NOTHING
    for at, end in _branch(node, max(node.start, proposer._kv.num_cached_tokens), tokens):
        if following := at.tokens[end - at.start :][:most].tolist():
            return Proposal(following, LONGEST_NGRAM + 1)
    return NOTHING


MOST_CALLS = 75
"""Calls of Python and C that a step of one sequence makes for proposals, where few are found."""


def test_where_nothing_repeats_little_is_called_for_proposals() -> None:
    """They were 166 while both texts were searched in each step, and are 59 where none is found."""
    calls, inside = Counter[str](), [0]
    core = Core(model_of("llama"), **SMALL, speculative_tokens=8)
    own = ("speculator.py", {"propose", "judge"})

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        entry = code.co_filename.endswith(own[0]) and code.co_name in own[1]
        if event == "call":
            inside[0] += entry
        if inside[0] and event in ("call", "c_call"):
            calls[code.co_name if event == "call" else argument.__name__] += 1
        if event == "return":
            inside[0] -= entry

    try:
        request = asked(1, sampled=True)
        core.submit(request.model_copy(update={"prompt": tuple(range(1, 60))}))
        while not core.counters.decode_steps:
            core.step()
        before = core.counters.decode_steps
        sys.setprofile(count)
        while core.step():
            pass
        sys.setprofile(None)
        steps = core.counters.decode_steps - before
        assert core.counters.failed_proposals == 0
    finally:
        sys.setprofile(None)
        core.close()
    assert steps > 30 and calls["propose"] > steps, "it was on"
    assert calls.total() / steps <= MOST_CALLS, calls.most_common(30)
