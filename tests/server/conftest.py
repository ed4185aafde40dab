"""The server that most tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import CHROMIUM, FLAGS, SECONDS
from servers import MODEL_NAME, Running, serve_in_thread, serving, settings, wait_until

from penstock.recall import Dialogue, dialogue

__all__ = ["MODEL_NAME", "Running", "serve_in_thread", "serving", "settings", "wait_until"]


@pytest.fixture(scope="module")
def recall_server() -> Iterator[Running]:
    """One server of the embedded model for the tests of a file that leave it as it was.

    It is gone before the next file: other tests count what MLX holds in this process.
    """
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def told() -> Dialogue:
    """A conversation with facts, whose questions the embedded model answers."""
    return dialogue(7, tokens=600, facts=4)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    playwright.expect.set_options(timeout=SECONDS * 1_000)
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def shots(pytestconfig: pytest.Config) -> Path:
    """The folder of screenshots."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("page")
