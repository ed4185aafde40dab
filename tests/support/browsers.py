"""The page in Debian's headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from patience import SOON

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WIDE = {"width": 1440, "height": 1000}
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


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


@contextmanager
def opened(browser: Any, url: str, home: str = "", **options: Any) -> Iterator[Any]:
    """Open the page with an empty profile; fail at the end if the page had errors.

    Args:
        home: the server's address, where the page comes later.
    """
    context = browser.new_context(**{"viewport": WIDE, **options})
    page = context.new_page()
    home = str(httpx.URL(home or url).copy_with(path="/"))
    faults: list[str] = []
    foreign: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda asked: None if asked.url.startswith((home, "data:")) else foreign.append(asked.url),
    )
    page.faults = faults
    page.set_default_timeout(SOON * 1_000)
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert foreign == [], "the page works without a network"
    assert faults == []


def say(page: Any, text: str, seconds: float = SOON) -> Any:
    """Send a chat message and return the answer's bubble once it is complete."""
    from playwright.sync_api import expect

    answers = page.locator(".message.assistant")
    before = answers.count()
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(before + 1)
    sent = page.get_by_role("button", name="Send")
    expect(sent).to_be_visible(timeout=seconds * 1_000)
    return answers.nth(before)
