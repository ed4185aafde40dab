"""Lone surrogates in bodies become U+FFFD, without failing the request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import Running

from penstock.server.half_pairs import whole_pairs_in

CHAT = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": "cut HALF so"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": {"model": "any", "max_tokens": 2, "prompt": "cut HALF so"},
    "/v1/responses": {"model": "any", "max_output_tokens": 16, "input": "cut HALF so"},
    "/tokenize": {"prompt": "cut HALF so"},
}
HALVES = (rb"\ud83d", rb"\uDE00", b"\xed\xa0\xbd", b"\xed\xb8\x80")


def post(running: Running, path: str, body: bytes) -> Any:
    kind = {"Content-Type": "application/json"}
    answer = httpx.post(f"{running.url}{path}", content=body, headers=kind, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", BODIES)
def test_lone_surrogate_becomes_replacement_character(path: str, recall_server: Running) -> None:
    body = json.dumps(BODIES[path]).encode()
    told = [
        post(recall_server, path, body.replace(b"HALF", half)) for half in (*HALVES, rb"\ufffd")
    ]
    for key in ("usage", "tokens"):
        assert all(one.get(key) == told[-1].get(key) for one in told)


@pytest.mark.parametrize(
    "body",
    [rb'"\ud83e\udd8a"', rb'"\\ud83d"', rb'"\\\\ud83d"', "\U0001f98a\ud7ff".encode(), rb'"\u00ed"'],
)
def test_surrogate_pairs_and_escapes_are_unchanged(body: bytes) -> None:
    assert whole_pairs_in(body) == body


def test_every_lone_surrogate_is_replaced_separately() -> None:
    assert whole_pairs_in(rb'"\ud83d\ud83e\udd8a\udd8a"') == rb'"\ufffd\ud83e\udd8a\ufffd"'
    assert whole_pairs_in(rb'"\\\ud83d"') == rb'"\\\ufffd"'
