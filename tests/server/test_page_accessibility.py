"""Accessibility of the page: axe reports no violations, and the keyboard reaches all controls.

axe-core is in the package axe-playwright-python.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from browsers import opened, say
from servers import serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

ROLES = """document.querySelectorAll("dialog").forEach((dialog) =>
    dialog.setAttribute("role", "dialog"))"""
"""Axe asks for the names of explicit dialogs alone."""
FACT = "The code of the amber falcon is 4821."


def violations(page: Any) -> list[str]:
    """Return axe's violations on a page, one line per element."""
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 375])
def test_page_has_no_axe_violations(browser: Any, scheme: str, width: int) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    how = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    how |= {"bypass_csp": True, "reduced_motion": "reduce"}  # axe is a script from elsewhere
    with serving() as running, opened(browser, running.url, **how) as page:
        page.add_script_tag(content=axe)
        page.evaluate(ROLES)
        expect(page.locator("#state")).to_have_text("live")
        assert violations(page) == []
        page.get_by_text("Settings").click()
        say(page, FACT)
        page.get_by_role("treeitem").first.click()
        expect(page.locator("#leaf")).to_be_visible()
        page.locator("[data-term=nodes]").click()
        assert violations(page) == []
        page.get_by_role("button", name="History").click()
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.locator("#rows").get_by_role("button").first.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert violations(page) == []
        # The title itself is filled again by each status of the server.
        page.evaluate("document.getElementById('why').removeAttribute('aria-labelledby')")
        assert violations(page) != [], "a dialog without a name is found"


def test_keyboard_focus_reaches_all_controls_and_returns(browser: Any) -> None:
    with serving() as running, opened(browser, running.url) as page:
        say(page, FACT)
        page.keyboard.press("Escape")
        page.locator(".skip").focus()
        expect(page.locator(".skip")).to_be_in_viewport()
        reached = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.id || document.activeElement.name")
            )
        order = ["theme", "show-kept", "clear-chat", "log", "draft", "send", "whole"]
        assert [name for name in reached if name in order][: len(order)] == order
        page.locator("#show-kept").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="History")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#show-kept")).to_be_focused()


def test_streamed_answer_is_announced_once(browser: Any) -> None:
    seen = """() => {
      window.busy = [];
      new MutationObserver((changes) => changes.forEach(({ target }) =>
        window.busy.push(target.getAttribute("aria-busy"))))
        .observe(document.getElementById("log"), { subtree: true, attributeFilter: ["aria-busy"] });
    }"""
    with serving() as running, opened(browser, running.url) as page:
        page.evaluate(seen)
        answer = say(page, FACT)
        assert page.get_by_role("log").get_attribute("aria-live") == "polite"
        assert page.evaluate("window.busy")[-1] == "false"
        expect(answer).to_have_attribute("aria-busy", "false")
