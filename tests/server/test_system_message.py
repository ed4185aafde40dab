"""`--system`: a default system message, in all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from parrot import ASK, END, parrot
from servers import Running, serving

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    + END
    + "{% endfor %}{% if add_generation_prompt %}"
    + ASK
    + "{% endif %}"
)
SYSTEM = "Answer like a pirate."
ASKED = [{"role": "user", "content": "Count."}]
GIVEN = {"role": "system", "content": "Be brief."}
WITHOUT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/messages": {"messages": ASKED, "max_tokens": 8},
    "/v1/responses": {"input": "Count."},
    "/api/chat": {"messages": ASKED, "stream": False},
    "/tokenize": {"messages": ASKED},
}
WITH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [GIVEN, *ASKED]},
    "/v1/messages": {"messages": ASKED, "max_tokens": 8, "system": GIVEN["content"]},
    "/v1/responses": {"input": "Count.", "instructions": GIVEN["content"]},
    "/api/chat": {"messages": [GIVEN, *ASKED], "stream": False},
    "/tokenize": {"messages": [{"role": "developer", "content": "Be brief."}, *ASKED]},
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("system")
    with serving(*parrot(folder, "One.", template=TEMPLATE), system=SYSTEM) as running:
        yield running


def prompt_tokens(running: Running, path: str, body: dict[str, Any]) -> int:
    answer = httpx.post(running.url + path, json={"model": "any", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    if path == "/tokenize":
        return int(content["count"])
    if path == "/api/chat":
        return int(content["prompt_eval_count"])
    usage = content["usage"]
    if path == "/v1/messages":  # apart from what was read from the cache
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage.get("prompt_tokens", usage.get("input_tokens")))


def expected(running: Running, *messages: dict[str, str]) -> int:
    return len(running.service.prompts.render(messages))


@pytest.mark.parametrize("path", WITHOUT)
def test_default_system_message_is_added(configured: Running, path: str) -> None:
    whole = expected(configured, {"role": "system", "content": SYSTEM}, *ASKED)
    assert prompt_tokens(configured, path, WITHOUT[path]) == whole


@pytest.mark.parametrize("path", WITH)
def test_system_message_of_request_replaces_default(configured: Running, path: str) -> None:
    whole = expected(configured, GIVEN, *ASKED)
    assert prompt_tokens(configured, path, WITH[path]) == whole
    text = configured.service.prompts.template_text([GIVEN, *ASKED])
    assert SYSTEM not in text and GIVEN["content"] in text


def test_default_system_message_is_added_once(configured: Running, tmp_path: Path) -> None:
    rendered = configured.service.prompts.template_text(ASKED)
    assert rendered.count(SYSTEM) == 1
    with serving(*parrot(tmp_path, "One.", template=TEMPLATE)) as plain:
        assert SYSTEM not in plain.service.prompts.template_text(ASKED)
        told = [{"role": "system", "content": SYSTEM}, *ASKED]
        assert plain.service.prompts.template_text(told) == rendered
