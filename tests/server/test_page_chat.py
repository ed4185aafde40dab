"""The page's chat in a real browser: reasoning, Markdown, failed turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import opened, say
from parrot import ASK, parrot
from servers import Running, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

KEY = "a-key-for-tests"
MARKDOWN = """Here it **is**:

```python
print("a < b")
```

| name | size |
|---|--:|
| one | 1 |

- [a page](https://example.org/)
- [a trap](javascript:window.broken=true)

<img src="https://example.org/x.png" onerror="window.broken = true">
![picture](https://example.org/y.png)
"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model reasons, and answers in Markdown."""
    folder = tmp_path_factory.mktemp("thinker")
    pieces = ("<think>", "I wonder. ", "</think>", MARKDOWN)
    model, tokenizer = parrot(folder, *pieces, marks=("<think>", "</think>"))
    with serving(model, tokenizer) as running:
        yield running


def sent_bodies(page: Any) -> list[dict[str, Any]]:
    """Record the bodies of the page's chat requests from now on."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda asked: (
            bodies.append(json.loads(asked.post_data)) if "completions" in asked.url else None
        ),
    )
    return bodies


def test_reasoning_is_collapsed_and_resent_in_history(browser: Any, thinker: Running) -> None:
    with opened(browser, thinker.url) as page:
        bodies = sent_bodies(page)
        answer = say(page, "Well?")
        thoughts = answer.locator(".thoughts")
        expect(thoughts).to_be_hidden()
        answer.get_by_text("Reasoned for").click()
        expect(thoughts).to_have_text("I wonder.")
        say(page, "And now?")
        _, first, _ = bodies[1]["messages"]
        assert first["reasoning_content"] == "I wonder. " and "print" in first["content"]


def test_question_can_be_sent_before_model_is_known(browser: Any, thinker: Running) -> None:
    with opened(browser, "about:blank", home=thinker.url) as page:
        page.route("**/v1/live", lambda route: None)  # its figures never come
        page.goto(thinker.url)
        expect(say(page, "Well?").locator("pre")).to_have_text('print("a < b")')


def test_markdown_is_rendered_without_scripts(browser: Any, thinker: Running) -> None:
    with opened(browser, thinker.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        answer = say(page, "Is **this** bold?")
        expect(page.locator(".message.user .text")).to_have_text("Is **this** bold?")
        expect(answer.locator("strong")).to_have_text("is")
        expect(answer.locator("pre")).to_have_text('print("a < b")')
        expect(answer.locator("td")).to_have_text(["one", "1"])
        expect(answer.locator("a")).to_have_count(1)
        assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
        expect(answer).to_contain_text("[a trap](javascript:window.broken=true)")
        expect(answer.locator("img")).to_have_count(0)
        expect(answer).to_contain_text("onerror=")
        answer.get_by_role("button", name="Copy", exact=True).click()
        expect(answer.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == 'print("a < b")'
        assert page.evaluate("window.broken") is None


def test_failed_turn_is_left_out_of_next_request(browser: Any, recall_server: Running) -> None:
    with opened(browser, recall_server.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        bodies = sent_bodies(page)
        page.route("**/v1/chat/completions", lambda route: route.abort())
        failed = say(page, "The code of the silent otter is 1.")
        expect(failed).to_contain_text("The server is not reachable.")
        page.unroute("**/v1/chat/completions")
        say(page, "The code of the amber falcon is 4821.")
        assert [message["content"] for message in bodies[1]["messages"]] == [
            "The code of the amber falcon is 4821."
        ]
        failed.get_by_role("button", name="Try again").click()
        answers = page.locator(".message.assistant")
        expect(answers).to_have_count(1)
        expect(answers).to_contain_text("Noted.")
        page.faults.clear()  # the browser tells the request that was cut


def test_error_message_has_remedy_in_full_sentence(browser: Any, tmp_path: Path) -> None:
    model, tokenizer = parrot(tmp_path, "Yes", context=64)
    with serving(model, tokenizer) as running, opened(browser, running.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        failed = say(page, "falcon " * 100)
        expect(failed).to_contain_text("Shorten the prompt. This turn is not sent along.")
        page.faults.clear()  # the browser tells the refusal


def test_end_of_answer_is_visible_on_phone(browser: Any) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with serving() as running, opened(browser, running.url, **phone) as page:
        page.get_by_role("button", name="Tell it eight facts").click()
        page.get_by_role("button", name="What is the code of the amber falcon?").click()
        expect(page.locator(".message .cost").nth(1)).to_contain_text("prompt tokens")
        page.get_by_label("Your message").fill("A draft of several lines. " * 8)
        left = (
            "({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight"
        )
        log = page.locator("#log")
        for _ in range(100):  # the page's policy forbids what `wait_for_function` would evaluate
            if log.evaluate(left) < 2:
                break
            page.wait_for_timeout(50)
        assert log.evaluate(left) < 2
        running.server.should_exit = True
        expect(page.locator("#state")).to_have_text("server not reachable")
        edge = "(name) => document.querySelector(name).getBoundingClientRect()"
        assert page.evaluate(edge, ".brand")["right"] <= page.evaluate(edge, "#state")["left"]
        expect(page.locator(".brand .name")).to_be_visible()
        page.faults.clear()  # the browser tells each attempt


def test_second_turn_of_example_hits_cache(browser: Any) -> None:
    with serving(engine={"block_size": 32}) as running, opened(browser, running.url) as page:
        page.get_by_role("button", name="Tell it eight facts").click()
        costs = page.locator(".message .cost")
        expect(costs.first).to_contain_text(re.compile(r"^0 of \d+ prompt tokens"))
        page.get_by_role("button", name="What is the code of the amber falcon?").click()
        expect(page.locator(".message.assistant").nth(1)).to_contain_text("4821.")
        expect(costs.nth(1)).to_contain_text(re.compile(r"^[6-9]\d of \d+ prompt tokens"))


def test_footer_links_work_with_key(browser: Any) -> None:
    with serving(api_key=KEY) as running, opened(browser, running.url) as page:
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("live")
        for link, text in (
            ("Metrics", "penstock_engine_up"),
            ("Stats", "hit_rate"),
            ("API", "POST /v1/chat/completions"),
        ):
            page.get_by_role("link", name=link).click()
            sheet = page.get_by_role("dialog", name=link)
            expect(sheet).to_contain_text(text)
            page.keyboard.press("Escape")
            expect(sheet).to_be_hidden()
        page.faults[:] = [said for said in page.faults if "401" not in said]


def test_memory_terms_show_explanations_on_click(browser: Any, recall_server: Running) -> None:
    with opened(browser, recall_server.url) as page:
        meaning = page.locator("#memory-meaning")
        for word in ("Weights", "Buffers", "Index"):
            page.get_by_role("button", name=word).click()
            expect(meaning).to_contain_text(re.compile(rf"{word.lower()}.*\.$", re.IGNORECASE))
        page.get_by_role("button", name="Index").click()
        expect(meaning).to_be_hidden()
        page.get_by_role("button", name="preempted").press("Enter")
        expect(page.locator("#queue-meaning")).to_contain_text("make room for another")


def test_chart_scale_follows_usage_or_limit(browser: Any, recall_server: Running) -> None:
    with opened(browser, recall_server.url) as page:
        chart = page.locator("#chart")
        expect(chart).to_have_attribute("aria-label", re.compile(r"drawn up to [3-7]\d\.\d\sMB"))
        page.get_by_label("Up to the limit").check()
        expect(chart).to_have_attribute("aria-label", re.compile(r"drawn up to 212\sMB"))


def test_eviction_candidates_have_contrast_in_dark_theme(
    browser: Any, recall_server: Running
) -> None:
    with opened(browser, recall_server.url, color_scheme="dark") as page:
        cold = _luminance(page, "document.querySelector('.keys .cold')")
        card = _luminance(page, "document.querySelector('#tree')")
        assert (cold + 0.05) / (card + 0.05) > 2.5


def _luminance(page: Any, element: str) -> float:
    """Return the relative luminance of an element's background, 0 to 1, after WCAG 2."""
    text = page.evaluate(f"getComputedStyle({element}).backgroundColor")
    shares = [int(part) / 255 for part in re.findall(r"\d+", text)[:3]]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_long_prompt_shows_prefill_progress(browser: Any) -> None:
    """Afterwards the line shows what the answer cost."""
    watch = """() => {
      window.costs = [];
      const look = () => document.querySelectorAll(".cost").forEach((one) =>
        window.costs.push(one.textContent));
      new MutationObserver(look).observe(document.getElementById("log"),
        { childList: true, subtree: true, characterData: true });
    }"""
    with serving(engine={"prefill_chunk": 64}) as running, opened(browser, running.url) as page:
        page.evaluate(watch)
        answer = say(page, "The code of the amber falcon is seven. " * 60 + "What is it?")
        expect(answer.locator(".cost")).to_contain_text("prompt tokens from the cache")
        costs = page.evaluate("window.costs")
    read = [re.match(r"reading the prompt: ([\d,]+) of ([\d,]+) tokens", one) for one in costs]
    shown = [[int(number.replace(",", "")) for number in one.groups()] for one in read if one]
    assert len(shown) >= 3
    assert all(0 <= done < total for done, total in shown)
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert "reading" not in costs[-1]


def test_truncated_answer_continues_with_model_sampling(browser: Any, tmp_path: Path) -> None:
    model, tokenizer = parrot(tmp_path, "One, ", "two, ", "three, ", "four.")
    with serving(model, tokenizer) as running, opened(browser, running.url) as page:
        bodies = sent_bodies(page)
        expect(say(page, "Count.").locator(".text")).to_have_text("One, two, three, four.")
        expect(page.locator("#log .starter")).to_have_count(0)
        page.locator(".settings summary").click()
        page.fill("#max-tokens", "2")
        cut = say(page, "Again.")
        expect(cut.locator(".text")).to_have_text("One, two,")
        expect(cut.locator(".cost")).to_contain_text("cut at its length")
        page.get_by_role("button", name="Continue").click()
        expect(cut.locator(".text")).to_have_text("One, two, three, four.")
        expect(page.locator(".message")).to_have_count(4)
    assert not {"temperature", "max_tokens"} & set(bodies[0])
    assert bodies[2]["continue_final_message"] is True
    assert bodies[2]["messages"][-1] == {"role": "assistant", "content": "One, two, "}


def test_model_without_template_continues_text(browser: Any, tmp_path: Path) -> None:
    model, tokenizer = parrot(tmp_path, "One, ", "two, ", "three, ", "four.")
    tokenizer._tokenizer.chat_template = None
    tokenizer.has_chat_template = False
    with serving(model, tokenizer) as running, opened(browser, running.url) as page:
        expect(page.locator("#welcome")).to_contain_text("has no chat template")
        bodies = sent_bodies(page)
        page.locator(".settings summary").click()
        page.fill("#max-tokens", "3")
        answer = say(page, ASK)
        expect(answer.locator(".text")).to_have_text("One, two, three,")
        page.get_by_role("button", name="Continue").click()
        expect(answer.locator(".text")).to_have_text("One, two, three, four.")
    assert [body["prompt"] for body in bodies] == [ASK, f"{ASK}One, two, three, "]


def test_images_are_refused_if_model_has_no_vision(browser: Any, thinker: Running) -> None:
    paste = """() => {
        const files = new DataTransfer();
        files.items.add(new File(["x"], "x.png", { type: "image/png" }));
        const pasted = new ClipboardEvent("paste", { clipboardData: files, bubbles: true });
        document.getElementById("draft").dispatchEvent(pasted);
    }"""
    with opened(browser, thinker.url) as page:
        expect(page.locator("#state")).to_have_text("live")
        page.evaluate(paste)
        expect(page.locator("#hint")).to_have_text("This model reads no images.")
        expect(page.locator("#pictures")).to_be_hidden()
