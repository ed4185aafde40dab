"""The hint that a router derives from a request equals the engine's prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import Running

from penstock.server.hints import hint_of

TALK = [
    {"role": "user", "content": "The code of the amber falcon is 4821. " * 12},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the code of the amber falcon?"},
]
TOOL = {"name": "open_door", "description": "Opens a door.", "parameters": {"type": "object"}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TALK, "prompt_cache_key": "a"}),
    "chat with parts": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "developer", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "falcon " * 200}]},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
    ),
    "text": ("/v1/completions", {"prompt": "the amber falcon " * 60, "cache_salt": "tenant"}),
    "several texts": ("/v1/completions", {"prompt": ["the amber falcon " * 60, "another"]}),
    "tokens": ("/v1/completions", {"prompt": [5] * 200}),
    "lists of tokens": ("/v1/completions", {"prompt": [[5] * 200, [6] * 10]}),
    "responses": ("/v1/responses", {"input": "falcon " * 200, "instructions": "Be short."}),
    "messages": (
        "/v1/messages",
        {"model": "recall", "max_tokens": 2, "system": "Be short.", "messages": TALK},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_routing_hint_matches_engine_prompt(name: str, recall_server: Running) -> None:
    path, body = REQUESTS[name]
    service = recall_server.service
    service.engine.clear()
    hint = hint_of(path, json.dumps(body).encode(), service.prompts)
    assert hint is not None
    assert hint.cache_key == body.get("prompt_cache_key")
    assert hint.salt == body.get("cache_salt", "")
    assert service.engine.explain(hint.tokens, hint.salt).held_tokens == 0
    answer = httpx.post(recall_server.url + path, json={"max_tokens": 2, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    # All of its whole blocks are held by now, and what is not the same prompt would differ early.
    held = service.engine.explain(hint.tokens, hint.salt).held_tokens
    assert held == len(hint.tokens) // 64 * 64 > 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b'{"messages": []}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "x"}]}]}'),
        ("/v1/completions", b'{"prompt": []}'),
        ("/v1/completions", b'{"prompt": ""}'),
        ("/v1/completions", b'{"prompt": "\\ud800"}'),
        ("/v1/messages", b'{"messages": "hi"}'),
        ("/v1/responses", b'{"input": []}'),
        ("/v1/models", b"{}"),
        ("/v1/cache/explain", b'{"prompt": "hi"}'),
    ],
)
def test_invalid_request_has_no_routing_hint(
    path: str, body: bytes, recall_server: Running
) -> None:
    assert hint_of(path, body, recall_server.service.prompts) is None
