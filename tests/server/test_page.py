"""The page in a real browser: headless Chromium.

Screenshots lie in pytest's cache (`.pytest_cache/d/page`). With `PENSTOCK_SCREENSHOT=1` the one
that README shows is taken again, as `docs/page.png`, with those of docs/watching.md. One of them
needs smollm2, which is fetched if it is not in the cache.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsers import opened, say
from patience import SOON
from servers import Running, serving

from penstock.models.loading import load_all
from penstock_bench.recall import Dialogue, dialogue

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

ROOT = Path(__file__).parent.parent.parent
PHONE = {"width": 390, "height": 844}
KEY = "a-key-for-tests"


@pytest.fixture
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def long_prompt(told: Dialogue) -> str:
    return " ".join(message["content"] for message in told.messages)


def test_page_shows_chat_memory_tree_and_explanation(
    browser: Any, server: Running, told: Dialogue, shots: Path
) -> None:
    with opened(browser, server.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#model")).to_have_text("recall")
        expect(page.locator("#welcome")).to_contain_text("recalls facts that it is told")
        expect(page.locator("#tree-empty")).to_be_visible()
        expect(page.locator("#chart canvas")).to_be_visible()
        used = page.locator("#used").inner_text()

        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill(long_prompt(told))
        assert say(page, "The code of the amber falcon is 4821.").inner_text().startswith("Noted.")
        answer = say(page, "What is the code of the amber falcon?")
        expect(answer).to_contain_text("4821")
        expect(answer.locator(".cost")).to_contain_text(
            re.compile(r"[1-9]\d* of \d+ prompt tokens from the cache")
        )

        boxes = page.get_by_role("treeitem")
        expect(boxes).not_to_have_count(0)
        expect(page.locator("#used")).not_to_have_text(used)
        expect(page.locator("#hit")).to_have_text(re.compile(r"[1-9]\d?\s%"))
        expect(page.locator("#tree-sum")).to_contain_text("tokens")

        rows = page.locator("#rows tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("done")
        page.screenshot(path=shots / "wide.png")
        rows.first.get_by_role("button").click()
        why = page.get_by_role("dialog")
        expect(why).to_contain_text("Served from the cache")
        expect(why.locator(".reason")).not_to_be_empty()
        page.screenshot(path=shots / "explanation.png")
        page.keyboard.press("Escape")
        expect(why).to_be_hidden()


def test_edited_message_starts_branch(browser: Any, server: Running, told: Dialogue) -> None:
    with opened(browser, server.url) as page:
        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill(long_prompt(told))
        say(page, "The colour of the brave otter is green. " * 8)
        boxes = page.get_by_role("treeitem")
        expect(boxes).not_to_have_count(0)
        before = boxes.count()
        page.get_by_role("button", name="Edit").click()
        expect(page.locator(".message")).to_have_count(0)
        page.get_by_label("Your message").fill("The colour of the brave otter is black. " * 8)
        expect(page.locator("#hint")).to_contain_text("are in the cache already")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant")).to_have_count(1)
        expect(boxes).not_to_have_count(before)


def test_tree_is_keyboard_accessible(browser: Any, server: Running, told: Dialogue) -> None:
    _ask(server.url, told, range(3))
    with opened(browser, server.url) as page:
        boxes = page.get_by_role("treeitem")
        expect(boxes.nth(1)).to_be_visible()
        assert page.locator("[role=treeitem][tabindex='0']").count() == 1
        page.locator("[role=treeitem][tabindex='0']").focus()
        focused = page.locator("[role=treeitem]:focus")
        first = focused.get_attribute("aria-label")
        page.keyboard.press("ArrowRight")
        assert focused.get_attribute("aria-level") == "2"
        page.keyboard.press("ArrowLeft")
        assert focused.get_attribute("aria-label") == first
        page.keyboard.press("Enter")
        leaf = page.locator("#leaf")
        expect(leaf).to_contain_text("Bytes")
        leaf.get_by_role("button", name="Show its first words").click()
        expect(leaf.locator("blockquote")).not_to_be_empty()


def test_page_asks_for_key(browser: Any, told: Dialogue) -> None:
    with serving(api_key=KEY) as running, opened(browser, running.url) as page:
        wanted = page.get_by_role("dialog", name="This server wants a key")
        expect(wanted).to_be_visible()
        page.get_by_label("API key").fill("another")
        page.keyboard.press("Enter")
        expect(wanted).to_contain_text("not the key")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("live")
        assert say(page, "The code of the amber falcon is 4821.").inner_text().startswith("Noted.")
        page.reload()
        expect(page.locator("#state")).to_have_text("live")  # the tab knows the key
        assert KEY not in page.content()
        page.faults[:] = [said for said in page.faults if "401" not in said]


def test_page_shows_dead_engine(browser: Any) -> None:
    with serving() as running, opened(browser, running.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        running.service.engine.close()
        expect(page.locator("#state")).to_have_text(re.compile("^server not"))
        page.faults.clear()  # the browser tells each 503


def test_page_shows_dead_server_and_grays_out_figures(browser: Any, server: Running) -> None:
    with opened(browser, server.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#board")).not_to_have_class(re.compile("stale"))
        server.server.should_exit = True
        expect(page.locator("#state")).to_have_text("server not reachable")
        expect(page.locator("#board")).to_have_css("filter", "grayscale(1)")
        page.faults.clear()  # the browser tells each attempt


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_phone_screen(
    browser: Any, told: Dialogue, shots: Path, scheme: str, tmp_path: Path
) -> None:
    with serving(engine={"ssd_cache_dir": tmp_path, "ssd_cache_limit": "1GB"}) as server:
        _ask(server.url, told, range(3))
        _check_phone_layout(browser, server, shots, scheme)


def _check_phone_layout(browser: Any, server: Running, shots: Path, scheme: str) -> None:
    phone = {
        "viewport": PHONE,
        "color_scheme": scheme,
        "device_scale_factor": 2,
        "has_touch": True,
        "is_mobile": True,
    }
    with opened(browser, server.url, **phone) as page:
        expect(page.get_by_role("treeitem").first).to_be_visible()
        say(page, "What is the code of the amber falcon?")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"]
        for box in page.get_by_role("treeitem").all():
            size = box.bounding_box()
            assert size["width"] >= 56 and size["height"] >= 26, "a finger meets it"
        for bar in page.locator("#rows .meter").all():
            assert bar.bounding_box()["width"] >= 60
        page.locator("[data-term=nodes]").tap()
        expect(page.locator("#memory-meaning")).to_contain_text("boxes of the prefix tree")
        for name in ("Chat", "Memory", "Tree", "Requests"):
            expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()
        page.screenshot(path=shots / f"phone-{scheme}.png", full_page=True)
        assert _is_dark(page) == (scheme == "dark")


def _is_dark(page: Any) -> bool:
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", background)[:3]) < 200


def test_page_escapes_text_and_blocks_foreign_scripts(browser: Any, server: Running) -> None:
    with opened(browser, server.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        said = "<img src=x onerror='window.broken = true'>"
        say(page, said)
        expect(page.locator(".message.user .text")).to_have_text(said)
        with pytest.raises(playwright.Error):
            page.add_script_tag(content="window.broken = true")
        assert page.evaluate("window.broken") is None
        assert any("Content Security Policy" in fault for fault in page.faults)
        page.faults.clear()


def test_api_docs_page_renders(browser: Any, server: Running, shots: Path) -> None:
    with opened(browser, f"{server.url}/docs") as page:
        operations = page.locator(".opblock")
        expect(operations.first).to_be_visible()
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
        expect(operations).to_have_count(sum(map(len, paths.values())))
        page.locator(".opblock", has_text="/health").get_by_role("button").first.click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table")).to_contain_text('"status": "ok"')
        page.screenshot(path=shots / "interfaces.png")


def test_page_theme_can_be_chosen(browser: Any, server: Running) -> None:
    with opened(browser, server.url, color_scheme="light") as page:
        expect(page.locator("#state")).to_have_text("live")
        assert not _is_dark(page)
        page.get_by_role("button", name="Light or dark").click()
        assert _is_dark(page)
        page.reload()
        assert _is_dark(page)


@pytest.mark.skipif("PENSTOCK_SCREENSHOT" not in os.environ, reason="takes a minute")
def test_docs_screenshot_of_page_is_taken(browser: Any, shots: Path, tmp_path: Path) -> None:
    """Agents that share prompts, more than memory holds, and a chat."""
    still = {"reduced_motion": "reduce", "viewport": {"width": 1440, "height": 1150}}
    engine = {"memory_limit": "90MB", "ssd_cache_dir": tmp_path, "ssd_cache_limit": "1GB"}
    with serving(engine=engine) as running, _agents(running):
        for scheme, seconds in (("light", 48), ("dark", 3)):
            with opened(browser, running.url, **still, color_scheme=scheme) as page:
                page.wait_for_timeout(seconds * 1_000)
                page.get_by_text("Settings").click()
                page.get_by_label("System prompt").fill(long_prompt(dialogue(3, tokens=900)))
                page.get_by_text("Settings").click()
                for text in (
                    "The code of the amber falcon is 4821.",
                    "The owner of the silent otter is Clara.",
                    "What is the code of the amber falcon?",
                ):
                    say(page, text)
                page.get_by_label("Your message").fill("Who is the owner of the silent otter?")
                expect(page.locator("#hint")).to_contain_text("are in the cache already")
                shared = page.locator(".node.pinned", has_text=re.compile("[2-9]×"))
                expect(shared.nth(1)).to_be_visible()
                page.mouse.move(0, 0)
                page.screenshot(path=shots / f"wide-{scheme}.png")
                page.screenshot(path=shots / f"whole-{scheme}.png", full_page=True)
        phone = {"viewport": PHONE, "color_scheme": "dark", "has_touch": True, "is_mobile": True}
        with opened(browser, running.url, **phone) as page:
            expect(page.get_by_role("treeitem").first).to_be_visible()
            page.get_by_role("button", name="Tell it eight facts").click()
            expect(page.locator(".message .cost")).to_contain_text("prompt tokens")
            page.evaluate("scrollTo(0, 0)")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            page.screenshot(path=shots / "phone.png", full_page=True)
    for shot, name in (("wide-light", "page"), ("wide-dark", "page-dark"), ("phone", "page-phone")):
        shutil.copy(shots / f"{shot}.png", ROOT / "docs" / f"{name}.png")


@pytest.mark.skipif("PENSTOCK_SCREENSHOT" not in os.environ, reason="takes a minute")
def test_docs_screenshot_of_conversation_is_taken(browser: Any) -> None:
    """Two turns with a real model, and an unsent third."""
    loaded = load_all("smollm2", weights_dtype="float32")
    still = {"reduced_motion": "reduce", "viewport": {"width": 1440, "height": 900}}
    limit = {"memory_limit": "1500MB"}
    serve = serving(loaded.model, loaded.tokenizer, engine=limit, name="smollm2")
    with serve as running, opened(browser, running.url, **still) as page:
        say(page, "Write a Python function that adds two numbers. Show the code.")
        say(page, "Now list three good names for it.")
        page.get_by_label("Your message").fill("Which one is the shortest?")
        expect(page.locator("#hint")).to_contain_text("are in the cache already")
        page.screenshot(path=ROOT / "docs" / "page-chat.png")


def _ask(url: str, told: Dialogue, questions: range) -> None:
    for question in questions:
        body = {"model": "recall", "messages": told.ask(told.questions[question]), "max_tokens": 8}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SOON).raise_for_status()


@contextmanager
def _agents(running: Running) -> Iterator[None]:
    """Keep six conversations going; three share a prompt and switch to another later."""
    (end,) = running.service.tokenizer.eos_token_ids
    stop = threading.Event()
    began = time.monotonic()

    def talk(number: int) -> None:
        with httpx.Client(base_url=running.url, timeout=SOON) as http:
            for turn in range(10_000):
                epoch = int((time.monotonic() - began) / 13)
                told = dialogue(20 + number % 2 + 2 * epoch, tokens=2_600, facts=12)
                asked = told.questions[(number + turn) % len(told.questions)]
                note = f"The code of the amber falcon is {number}{turn % 3}. " * 24
                messages = [*told.messages, {"role": "user", "content": note}]
                messages += [{"role": "assistant", "content": "Noted."}]
                body = {
                    "model": "recall",
                    "messages": [*messages, {"role": "user", "content": asked.text}],
                    "max_tokens": 40 + 20 * (number % 3),
                    "temperature": 1.0,
                    "logit_bias": {str(end): -100},  # or an answer is three tokens
                }
                if stop.is_set() or http.post("/v1/chat/completions", json=body).is_error:
                    return
                stop.wait(0.3 * number)

    with ThreadPoolExecutor(6) as pool:
        for number in range(6):
            pool.submit(talk, number)
        try:
            yield
        finally:
            stop.set()
