"""A server shared by most server tests, and a browser for tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import CHROMIUM, FLAGS
from patience import SOON
from servers import recall_server, told  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, controlled by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    playwright.expect.set_options(timeout=SOON * 1_000)
    with playwright.sync_playwright() as started:
        settings = {"executable_path": CHROMIUM, "args": FLAGS, "timeout": SOON * 1_000}
        launched = started.chromium.launch(**settings)
        yield launched
        launched.close()


@pytest.fixture
def shots(pytestconfig: pytest.Config) -> Path:
    """Return the folder of screenshots."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("page")
