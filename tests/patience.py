"""A fixture for tests of what is read from a tier, on a machine whose cores others use as well."""

from __future__ import annotations

import pytest

from penstock.engine.offload import engine_tier, restoring

SOON = 30.0
"""Seconds within which things happen, on a busy machine."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a tier, whatever else runs: what it has is read, and not computed again."""
    monkeypatch.setattr(engine_tier, "LEAST_PATIENCE_SECONDS", SOON)
    monkeypatch.setattr(restoring, "ASK_SECONDS", SOON)
