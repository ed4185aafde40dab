"""Tiny models shared by the tests of pools."""

from __future__ import annotations

import pytest
from pool_models import TinyModels


@pytest.fixture(scope="session")
def measured() -> TinyModels:
    return TinyModels.measured()


@pytest.fixture
def models(measured: TinyModels) -> TinyModels:
    return TinyModels(alone=measured.alone, fixed_bytes=measured.fixed_bytes)
