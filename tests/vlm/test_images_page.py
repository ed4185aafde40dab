"""Images dropped on the page, or pasted into its draft, are in the prompt of the answer."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from browsers import opened, say
from servers import serving
from tiny_image_models import Pair, picture

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
TOKENS = 12
TRANSFER = """([target, kind, files]) => {
    const carried = new DataTransfer();
    for (const [type, text] of files) {
        const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
        carried.items.add(new File([bytes], "picture", { type }));
    }
    const options = { bubbles: true, cancelable: true };
    const event = kind === "drop"
        ? new DragEvent(kind, { ...options, dataTransfer: carried })
        : new ClipboardEvent(kind, { ...options, clipboardData: carried });
    document.getElementById(target).dispatchEvent(event);
}"""


def transfer(page: Any, target: str, kind: str, *files: tuple[str, bytes]) -> None:
    """Drop or paste files, given as a MIME type and bytes, on an element."""
    coded = [[media_type, base64.b64encode(data).decode()] for media_type, data in files]
    page.evaluate(TRANSFER, [target, kind, coded])


def words(text: str) -> str:
    """Return the letters of a text, whatever Markdown makes of its marks."""
    return "".join(re.findall(r"\w", text))


def test_dropped_and_pasted_images_are_in_prompt(browser: Any, tmp_path: Path) -> None:
    pair = Pair.of("qwen2_vl", tmp_path / "model")
    loaded = pair.loaded
    files = [picture(1), picture(2, 112, 84, "JPEG"), picture(3)]
    engine = {"memory_limit": "400MB", "block_size": 16}
    model = loaded.model, loaded.tokenizer

    def answer_to(marks: str, given: list[bytes]) -> str:
        prompt = f"<|start|>user\n{marks}What is it?<|end|>\n<|start|>assistant\n"
        return words(loaded.tokenizer.decode(pair.own_answer(prompt, given, TOKENS)))

    with (
        serving(*model, engine=engine, temperature=0.0, max_tokens=TOKENS) as running,
        opened(browser, running.url) as page,
    ):
        expect(page.locator("#state")).to_have_text("live")
        transfer(page, "chat", "drop", ("image/png", files[0]), ("image/jpeg", files[1]))
        expect(page.locator("#pictures img")).to_have_count(2)
        transfer(page, "draft", "paste", ("image/png", files[2]))
        expect(page.locator("#pictures img")).to_have_count(3)
        transfer(page, "draft", "paste", ("image/svg+xml", b"<svg/>"))
        expect(page.locator("#hint")).to_have_text("PNG, JPEG, GIF and WebP images are read.")
        page.locator("#pictures button").nth(0).click()
        expect(page.locator("#pictures img")).to_have_count(2)
        text = words(say(page, "What is it?").locator(".text").inner_text())
        expect(page.locator("#pictures")).to_be_hidden()
        expect(page.locator(".message.user img")).to_have_count(2)
    assert text and answer_to("IMAGEIMAGE", files[1:]).startswith(text)
    assert not answer_to("IMAGEIMAGE", files[:2]).startswith(text), "another image, another answer"
