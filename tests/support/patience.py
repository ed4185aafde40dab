"""Fixtures for tests on a busy machine."""

from __future__ import annotations

import pytest

from penstock.engine import planner
from penstock.engine.offload import engine_tier
from penstock.engine.offload.engine_tier import EngineTier
from penstock.engine.schedule import restoring

SOON = 120.0
"""Seconds within which things happen, on a machine whose cores fifty others use as well."""


@pytest.fixture(autouse=True)
def whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill full chunks even if a busy machine measures a low rate."""
    monkeypatch.setattr(planner, "ALONE_SECONDS", SOON)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a tier as long as a prompt takes to compute, on any load."""
    monkeypatch.setattr(engine_tier, "LEAST_PATIENCE_SECONDS", SOON)
    monkeypatch.setattr(restoring, "ASK_SECONDS", SOON)


@pytest.fixture
def reads_all(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore all blocks of a tier even if a fast model could compute them sooner."""
    monkeypatch.setattr(EngineTier, "saved_seconds", lambda self, first, stop: float(stop > first))
    monkeypatch.setattr(EngineTier, "patience_seconds", lambda self, first, stop: SOON)
