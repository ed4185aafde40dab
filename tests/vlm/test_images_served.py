"""Images over HTTP: three APIs, tool results, errors, and text requests."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from servers import Running, serving
from tiny_image_models import Pair, picture

from penstock.models.source_choice import choose_source
from penstock.server.hints import hint_of
from penstock.server.prompts import Prompts

TOKENS = 6
LIMIT = {"memory_limit": "400MB", "block_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images") / "qwen2_vl"


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair.of("qwen2_vl", folder)


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Running]:
    loaded = pair.loaded
    with serving(loaded.model, loaded.tokenizer, engine=LIMIT, temperature=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chat_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def block(data: bytes) -> dict[str, Any]:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(data).decode(),
    }
    return {"type": "image", "source": source}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(http: httpx.Client, content: Any, **more: Any) -> httpx.Response:
    messages = more.pop("messages", [{"role": "user", "content": content}])
    body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **more}
    return http.post("/v1/chat/completions", json=body)


def expected(pair: Pair, prompt: str, files: list[bytes]) -> str:
    tokens = pair.own_answer(prompt, files, TOKENS)
    return str(pair.loaded.tokenizer.decode(tokens)).lstrip()


def turn(words: str, role: str = "user") -> str:
    return f"<|start|>{role}\n{words}<|end|>\n"


ASK = "<|start|>assistant\n"


def test_chat_places_images_in_order_of_parts(pair: Pair, http: httpx.Client) -> None:
    files = [picture(1), picture(2, 112, 84, "JPEG")]
    content = [text("Look: "), chat_part(files[0]), text(" and "), chat_part(files[1]), text("?")]
    found = chat(http, content).json()
    assert found["choices"][0]["message"]["content"] == expected(
        pair, turn("Look: IMAGE and IMAGE?") + ASK, files
    )
    again = chat(http, content).json()
    assert again["choices"] == found["choices"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 16 * 16


def test_three_apis_render_same_image_prompt(pair: Pair, http: httpx.Client) -> None:
    file = picture(3)
    prompt = turn("What is IMAGE?") + ASK
    wanted = expected(pair, prompt, [file])
    content: Any = [text("What is "), chat_part(file), text("?")]
    assert chat(http, content).json()["choices"][0]["message"]["content"] == wanted
    content = [
        {"type": "input_text", "text": "What is "},
        {"type": "input_image", "image_url": url(file)},
        {"type": "input_text", "text": "?"},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": TOKENS}
    found = http.post("/v1/responses", json=body).json()
    assert wanted.startswith(found["output"][0]["content"][0]["text"])
    assert found["usage"]["input_tokens_details"]["cached_tokens"] > 0
    content = [text("What is "), block(file), text("?")]
    body = {"model": "recall", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    said = http.post("/v1/messages", json=body).json()
    assert wanted.startswith(said["content"][0]["text"])
    assert said["usage"]["cache_read_input_tokens"] > 0
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == found["usage"]["input_tokens"]


def test_next_turn_reuses_all_image_and_answer_tokens(http: httpx.Client) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [text("Look "), chat_part(picture(4)), text(" there.")]}
    ]
    first = chat(http, None, messages=messages).json()
    said = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    usage = chat(http, None, messages=messages).json()["usage"]
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 1


def test_images_in_tool_results_are_read(pair: Pair, http: httpx.Client) -> None:
    file = picture(5)
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": [text("There: "), chat_part(file)]},
    ]
    plain = chat(http, None, messages=[*messages[:2], {**messages[2], "content": "There: "}]).json()
    found = chat(http, None, messages=messages).json()
    assert found["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    results = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [text("There: "), block(file)],
                }
            ],
        },
    ]
    body = {"model": "recall", "messages": results, "max_tokens": TOKENS}
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert counted.get("input_tokens", counted) == found["usage"]["prompt_tokens"]


def test_image_markers_in_text_are_not_images(pair: Pair, http: httpx.Client) -> None:
    file = picture(6)
    marks = "<|vision_start|><|image_pad|><|vision_end|>"
    found = chat(http, [text(f"{marks} not "), chat_part(file)])
    assert found.status_code == 200
    alone = chat(http, marks)
    assert alone.status_code == 200


def bomb(side: int) -> bytes:
    """Return a PNG whose header claims side x side pixels, with a few bytes of data."""

    def piece(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    size = side.to_bytes(4, "big")
    head = piece(b"IHDR", size + size + bytes((8, 2, 0, 0, 0)))
    body = piece(b"IDAT", zlib.compress(bytes(10_000)))
    return b"\x89PNG\r\n\x1a\n" + head + body + piece(b"IEND", b"")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (chat_part(bomb(50_000)), "50,000 by 50,000 pixels"),
        (chat_part(bomb(300)), "cannot be read"),
        (chat_part(b"<svg/>"), "PNG, JPEG, GIF and WebP"),
        (chat_part(picture(1)[:-40]), "cannot be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}, "--allow-remote"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "data URL"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}, "video_url"),
        ({"type": "input_audio", "input_audio": {"data": "aGk="}}, "input_audio"),
    ],
    ids=["huge", "short", "vector", "cut", "no-base64", "remote", "file", "video", "audio"],
)
def test_unsupported_content_gives_one_line_error(
    part: dict[str, Any], said: str, http: httpx.Client
) -> None:
    refused = chat(http, [text("Look: "), part])
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert said in message and "\n" not in message and len(message) < 400
    assert chat(http, "Hello").status_code == 200


def test_broken_image_in_history_does_not_end_conversation(http: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": [text("Look: "), chat_part(b"no image")]},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "And now?"},
    ]
    assert chat(http, None, messages=messages).status_code == 200


def test_private_addresses_are_refused(pair: Pair) -> None:
    loaded = pair.loaded
    with (
        serving(loaded.model, loaded.tokenizer, engine=LIMIT, allow_remote_images=True) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        for address in ("http://127.0.0.1:9/a.png", f"{running.url}/v1/models", "http://[::1]/a"):
            part = {"type": "image_url", "image_url": {"url": address}}
            refused = chat(client, [text("Look: "), part])
            assert refused.status_code == 400
            assert "not a public address" in refused.json()["error"]["message"]


def test_explanation_distinguishes_images(http: httpx.Client) -> None:
    def asked(file: bytes) -> dict[str, Any]:
        content = [text("Explain "), chat_part(file), text(" at length, with all that is there.")]
        return {"messages": [{"role": "user", "content": content}]}

    http.post("/v1/chat/completions", json={**asked(picture(7)), "max_tokens": 20})
    same, other = (
        http.post("/v1/cache/explain", json=asked(file)).json() for file in (picture(7), picture(8))
    )
    assert same["held_tokens"] == same["prompt_tokens"] // 16 * 16
    assert other["held_tokens"] < same["held_tokens"]
    assert other["prompt_tokens"] == same["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_routing_hint_of_image_matches_engine_prompt(
    path: str, folder: Path, server: Running, http: httpx.Client
) -> None:
    """A router has no weights, and finds the blocks that a replica has of images."""
    _, reader = choose_source(str(folder))
    prompts = Prompts(server.service.prompts.tokenizer, images=reader.image_reader(str(folder)))

    def body(file: bytes) -> dict[str, Any]:
        if path == "/v1/messages":
            message = {"role": "user", "content": [text(f"Via {path}: "), block(file)]}
            return {"model": "recall", "max_tokens": 2, "messages": [message]}
        if path == "/v1/responses":
            words = {"type": "input_text", "text": f"Via {path}: "}
            parts = [words, {"type": "input_image", "image_url": url(file)}]
            return {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2}
        message = {"role": "user", "content": [text(f"Via {path}: "), chat_part(file)]}
        return {"messages": [message], "max_tokens": 2}

    first, other = (body(picture(seed, 200, 160)) for seed in (51, 52))
    hint, another = (hint_of(path, json.dumps(sent).encode(), prompts) for sent in (first, other))
    assert hint is not None and another is not None
    assert http.post(path, json=first).status_code == 200
    explain = server.service.engine.explain
    assert explain(hint.tokens, hint.salt).held_tokens == len(hint.tokens) // 16 * 16 > 32
    assert explain(another.tokens, another.salt).held_tokens < 32
