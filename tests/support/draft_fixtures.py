"""Fixtures of tests in which heads and drafters propose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_families

from penstock.engine.model.proposals import NgramProposer, Proposal
from penstock.engine.model.shared_text import SharedProposer
from penstock.engine.model.step_costs import StepCosts


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A busy machine measures anything; here a step takes the same whatever it checks."""
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)
    monkeypatch.setattr(StepCosts, "draft_ratio", lambda *_: 0.0)
    monkeypatch.setattr(StepCosts, "saved_seconds", lambda *_: 1e9)
    with tiny_families.uncompiled():
        yield


@pytest.fixture
def only_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known text proposes nothing."""
    for proposer in (NgramProposer, SharedProposer):
        monkeypatch.setattr(proposer, "propose", lambda *_: Proposal([]))
