"""Conversations saved in the browser, and actions on an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from browsers import opened, say
from parrot import parrot
from servers import Running, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

FACT = "The code of the amber falcon is 4821."
QUESTION = "What is the code of the amber falcon?"


def sent(page: Any) -> list[dict[str, Any]]:
    """Record the bodies of all requests from now on."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda asked: asked.post_data and bodies.append(json.loads(asked.post_data)))
    return bodies


def rows(page: Any) -> Any:
    return page.locator("#kept-list li")


def test_conversations_are_saved_listed_and_deleted(
    browser: Any, recall_server: Running, shots: Any
) -> None:
    with opened(browser, recall_server.url) as page:
        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        say(page, FACT)
        page.reload()
        expect(page.locator(".message.user .text")).to_have_text(FACT)  # the tab's last one
        expect(page.locator(".message.assistant")).to_contain_text("Noted.")
        expect(page.locator(".message .cost")).to_contain_text("prompt tokens from the cache")
        bodies = sent(page)
        expect(say(page, QUESTION)).to_contain_text("4821")
        (body,) = [body for body in bodies if "stream" in body]
        assert [message["role"] for message in body["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
        assert {name for message in body["messages"] for name in message} == {"role", "content"}

        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        say(page, "The owner of the silent otter is Clara.")
        page.get_by_role("button", name="History").click()
        titles = rows(page).locator(".link")
        expect(titles).to_have_text(["The owner of the silent otter is Clara.", FACT])
        page.screenshot(path=shots / "kept.png")
        titles.nth(1).click()
        expect(page.locator(".message.user .text")).to_have_text([FACT, QUESTION])
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name=f"Delete {FACT}").click()
        expect(titles).to_have_text(["The owner of the silent otter is Clara."])
        page.get_by_role("button", name="Delete all").click()
        expect(rows(page)).to_have_count(0)
        page.keyboard.press("Escape")
        expect(page.locator(".message")).to_have_count(0)  # it was deleted, too
        assert page.evaluate("localStorage.getItem('penstock-conversations')") == "[]"


def test_long_title_of_conversation_ends_with_ellipsis(
    browser: Any, recall_server: Running
) -> None:
    with opened(browser, recall_server.url) as page:
        say(page, f"{FACT} {QUESTION}")
        page.get_by_role("button", name="History").click()
        expect(rows(page).locator(".link").first).to_have_text(f"{FACT} {QUESTION}"[:59] + "…")


def test_conversation_is_not_saved_if_option_is_off(browser: Any, recall_server: Running) -> None:
    with opened(browser, recall_server.url) as page:
        page.get_by_role("button", name="History").click()
        page.get_by_label("Keep conversations").uncheck()
        expect(page.locator("#kept-note")).to_contain_text("New ones are not kept")
        page.keyboard.press("Escape")
        say(page, FACT)
        assert page.evaluate("localStorage.getItem('penstock-conversations')") is None
        page.reload()
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator(".message")).to_have_count(0)
        expect(page.locator("#keeps")).not_to_be_checked()


def test_number_of_saved_conversations_is_bounded(browser: Any, recall_server: Running) -> None:
    old = """([number, length]) => localStorage.setItem("penstock-conversations", JSON.stringify(
      Array.from({ length: number }, (_, row) => ({ id: `${row}`, title: `${row}`, at: row,
        model: "recall", system: "", messages: [{ role: "user", content: "x".repeat(length) }] }))))
    """
    for number, length, most in ((60, 10, 50), (9, 300_000, 7)):
        with opened(browser, recall_server.url) as page:
            page.evaluate(old, [number, length])
            say(page, FACT)
            kept = page.evaluate("localStorage.getItem('penstock-conversations')")
            titles = [conversation["title"] for conversation in json.loads(kept)]
            assert titles == [FACT, *map(str, range(most - 1))]
            assert len(kept) <= 2_000_000


def test_answer_can_be_copied_and_regenerated(browser: Any, tmp_path: Any) -> None:
    model, tokenizer = parrot(tmp_path, "One, ", "**two**, ", "three.")
    with serving(model, tokenizer) as running, opened(browser, running.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        bodies = sent(page)
        answer = say(page, "Count.")
        answer.get_by_role("button", name="Copy answer").click()
        expect(answer.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "One, **two**, three."
        say(page, "Again.")
        page.locator(".message.assistant").first.get_by_role("button", name="Regenerate").click()
        expect(page.locator(".message")).to_have_count(2)
        expect(page.locator(".message.assistant .cost")).to_contain_text("prompt tokens")
        streams = [body for body in bodies if "stream" in body]
        assert streams[2] == streams[0]


def test_sampling_settings_are_sent(browser: Any, recall_server: Running) -> None:
    wanted = {
        "temperature": 0.5,
        "max_tokens": 4,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "seed": 0,
    }
    names = {"max_tokens": "Longest answer"}
    with opened(browser, recall_server.url) as page:
        bodies = sent(page)
        page.get_by_text("Settings").click()
        for name, value in wanted.items():
            label = names.get(name, name.replace("_", " ").capitalize())
            page.get_by_label(label, exact=True).fill(str(value))
        say(page, FACT)
        (body,) = [body for body in bodies if "stream" in body]
        assert wanted.items() <= body.items()


def test_stopped_answer_is_saved_when_new_chat_begins(browser: Any, tmp_path: Any) -> None:
    pieces = [f"{number}, " for number in range(400)]
    model, tokenizer = parrot(tmp_path, *pieces)
    with serving(model, tokenizer) as running, opened(browser, running.url) as page:
        page.get_by_label("Your message").fill("Count.")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .text")).to_contain_text("3, ")
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_role("button", name="History").click()
        rows(page).get_by_role("button", name="Count.", exact=True).click()
        expect(page.locator(".message.assistant .text")).to_contain_text("3, ")
