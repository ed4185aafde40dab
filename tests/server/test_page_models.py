"""The page of a server of several models, in a real browser."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_adapter
from browsers import opened, say
from served_pool import ONE, serve_pool, served, spec
from servers import serving, settings
from tiny_encoders import write_encoder

from penstock.encoders.encoder import expected_bytes, load_encoder
from penstock.models.loading import load_all
from penstock.pool.open_model import PoolMember
from penstock.recall import MODEL_PATH
from penstock.server.attached_models import ServedModel

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

FACT = "The code of the amber falcon is 4821."
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HAND_OVER = """([kind, on, name, type, content]) => {
    const files = new DataTransfer();
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    files.items.add(new File([bytes], name, { type }));
    const event = kind === "paste"
        ? new ClipboardEvent(kind, { clipboardData: files, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true });
    document.getElementById(on).dispatchEvent(event);
    return event.defaultPrevented;
}"""
"""Drop or paste a file, and tell whether the page took it."""


def test_chat_uses_selected_model_and_shows_loading(browser: Any, shots: Path) -> None:
    slow = threading.Event()
    specs = [spec("first", MODEL_PATH), spec("second", MODEL_PATH, slow, pinned=True)]
    with served(specs, ONE) as address, opened(browser, address.url) as page:
        picker = page.get_by_role("combobox", name="Model")
        expect(picker.locator("option")).to_have_text(["first · away", "second · away, pinned"])
        expect(page.locator("#model")).to_have_text("no model is loaded")
        expect(say(page, FACT).locator(".cost")).to_have_text(re.compile("^first · 0 of "))
        expect(page.locator("#model")).to_have_text("first")
        expect(picker.locator("option").first).to_have_text("first · loaded")

        picker.select_option("second")
        page.get_by_label("Your message").fill("What is the code of the amber falcon?")
        page.keyboard.press("Enter")
        cost = page.locator(".message .cost").nth(1)
        expect(cost).to_have_text(re.compile(r"^second \(.+B\) is loading, .+ so far$"))
        page.screenshot(path=shots / "loading.png")
        slow.set()
        expect(cost).to_have_text(re.compile("^second · 0 of "))
        expect(page.locator(".message.assistant").nth(1)).to_contain_text("4821")
        expect(page.locator("#model")).to_have_text("second")
        expect(page.locator("#rows tr")).to_have_count(1)
        models = address.models()
        assert {name: model["state"] for name, model in models.items()} == {
            "first": "away",
            "second": "loaded",
        }


def test_typing_does_not_load_model(browser: Any) -> None:
    with served([spec("first", MODEL_PATH)], ONE) as address, opened(browser, address.url) as page:
        expect(page.get_by_role("combobox", name="Model")).to_be_visible()
        page.get_by_label("Your message").fill("The code of the amber falcon is")
        page.wait_for_timeout(1_000)  # the question about the cache would have come
        assert address.models()["first"]["state"] == "away"


def test_footer_loads_no_model(browser: Any) -> None:
    with (
        served([spec(name, MODEL_PATH) for name in ("first", "second")], ONE) as address,
        opened(browser, address.url) as page,
    ):
        expect(page.locator("#state")).to_have_text("live")
        expect(page.get_by_role("link", name="Stats")).to_be_hidden()
        for link in ("Metrics", "API"):
            page.get_by_role("link", name=link).click()
            page.go_back()
        assert {model["state"] for model in address.models().values()} == {"away"}
        page.get_by_role("combobox", name="Model").select_option("second")
        say(page, FACT)
        page.get_by_role("link", name="Stats").click()
        expect(page.locator("body")).to_contain_text('"hit_rate"')
        assert address.models()["first"]["state"] == "away"


def test_adapters_are_listed_and_answer(browser: Any, tmp_path: Path) -> None:
    folders = {name: write_adapter("embedded", tmp_path / name, n) for n, name in enumerate("ab")}
    loaded = load_all(MODEL_PATH, adapters=folders)
    with (
        serving(loaded.model, loaded.tokenizer) as running,
        opened(browser, running.url) as page,
    ):
        picker = page.get_by_role("combobox", name="Model")
        names = ["recall", "recall+a", "recall+b"]
        expect(picker.locator("option")).to_have_text([f"{name} · loaded" for name in names])
        answers = []
        for name in names[:2]:
            picker.select_option(name)
            page.get_by_role("button", name="New chat").click()
            answer = say(page, FACT)
            expect(answer.locator(".cost")).to_have_text(re.compile(rf"^{re.escape(name)} · 0 of "))
            answers.append(answer.locator(".text").inner_text())
        assert answers[0] != answers[1]
        page.get_by_label("Your message").fill("The code")
        expect(page.locator("#hint")).to_contain_text("are in the cache already")
        page.reload()
        expect(picker).to_have_value("recall+a")  # as in the kept conversation


def test_adapters_of_a_pool_are_listed(browser: Any, tmp_path: Path) -> None:
    folders = {"a": write_adapter("embedded", tmp_path / "a", 1)}
    member = PoolMember(
        name="base",
        load=lambda limit: load_all(MODEL_PATH, limit_bytes=limit, adapters=folders),
        expected_bytes=lambda limit: ONE // 2,
        settings={"block_size": 64, "max_kv_size": 4_096},
    )
    models = [ServedModel("base", settings(), adapters=("a",))]
    with serve_pool(models, [member], 2 * ONE) as address, opened(browser, address.url) as page:
        picker = page.get_by_role("combobox", name="Model")
        expect(picker.locator("option")).to_have_text(["base · away", "base+a · away"])
        # No snapshot of the choice comes before the answer.
        page.route("**/v1/live?model=*", lambda route: None)
        picker.select_option("base+a")
        cost = say(page, FACT).locator(".cost")
        expect(cost).to_have_text(re.compile(r"^base\+a · 0 of "))
        page.unroute("**/v1/live?model=*")
        expect(picker.locator("option")).to_have_text(["base · loaded", "base+a · loaded"])


def test_page_of_an_encoder_says_what_is_served(browser: Any, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "tiny").folder
    member = PoolMember(
        name="tiny",
        load=lambda limit: load_encoder(folder),
        expected_bytes=lambda limit: expected_bytes(folder, limit),
        encodes=True,
        pinned=True,
    )
    models = [ServedModel("tiny", settings(), kinds=("embedding",))]
    with serve_pool(models, [member], ONE) as address, opened(browser, address.url) as page:
        expect(page.locator("#welcome")).to_contain_text("No model here writes text")
        expect(page.locator("#welcome")).to_contain_text("tiny (embedding)")
        expect(page.locator("#composer")).to_be_hidden()
        address.several.pool.load("tiny").result()
        expect(page.locator("#model")).to_have_text("tiny")
        page.get_by_role("link", name="API").click()
        expect(page.locator(".opblock", has_text="/v1/embeddings")).to_be_visible()


def test_images_are_dropped_pasted_and_left_out(browser: Any, shots: Path) -> None:
    """The page offers images to a model of which nothing is known yet, which then refuses them."""
    with served([spec("first", MODEL_PATH)], ONE) as address, opened(browser, address.url) as page:
        expect(page.get_by_role("combobox", name="Model")).to_be_visible()
        images = page.locator("#pictures img")
        assert page.evaluate(HAND_OVER, ["drop", "chat", "a.png", "image/png", PIXEL])
        expect(images).to_have_count(1)
        assert page.evaluate(HAND_OVER, ["paste", "draft", "b.png", "image/png", PIXEL])
        expect(images).to_have_count(2)
        assert page.evaluate(HAND_OVER, ["drop", "chat", "c.txt", "text/plain", PIXEL])
        expect(page.locator("#hint")).to_have_text("PNG, JPEG, GIF and WebP images are read.")
        page.screenshot(path=shots / "pictures.png")
        page.get_by_role("button", name="Leave this image out").first.click()
        expect(images).to_have_count(1)
        expect(images).to_have_js_property("naturalWidth", 1)

        page.get_by_label("Your message").fill("What is it?")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        content = json.loads(asked.value.post_data)["messages"][0]["content"]
        url = f"data:image/png;base64,{PIXEL}"
        assert content == [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]
        expect(page.locator(".message.user img")).to_have_attribute("src", url)
        expect(page.locator(".message .cost")).to_contain_text("This turn is not sent along.")
        expect(page.locator("#pictures")).to_be_hidden()
        page.get_by_role("button", name="Edit").click()
        expect(images).to_have_count(1)
        expect(page.get_by_label("Your message")).to_have_value("What is it?")
        page.faults.clear()  # the browser tells the refusal


def test_page_of_single_model_has_no_model_picker(browser: Any, recall_server: Any) -> None:
    with opened(browser, recall_server.url) as page:
        expect(page.locator("#model")).to_have_text("recall")
        expect(page.locator("#picker")).to_be_hidden()
