"""A server shared by most server tests, and a browser for tests of the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsers import browser  # noqa: F401 - a fixture
from servers import recall_server, told  # noqa: F401 - fixtures


@pytest.fixture
def shots(pytestconfig: pytest.Config) -> Path:
    """Return the folder of screenshots."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("page")
