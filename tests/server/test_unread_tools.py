"""Tools that a chat template does not render, in all APIs, and continued answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from parrot import ASK, END, parrot
from servers import Running, serving

PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if not (loop.last and continue_final_message) %}"
    + END
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + ASK
    + "{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TALK = [{"role": "user", "content": "Count."}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "tools": [FUNCTION]},
    "/v1/responses": {"input": "Count.", "tools": [{"type": "function", **FUNCTION["function"]}]},
    "/v1/messages": {
        "messages": TALK,
        "max_tokens": 8,
        "tools": [{"name": "look", "input_schema": SCHEMA}],
    },
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template renders no tools."""
    folder = tmp_path_factory.mktemp("plain")
    with serving(*parrot(folder, "One, ", "two, ", "three.", template=PLAIN)) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(running.url + path, json={"model": "any", **body}, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_tools_in_system_message_are_listed_in_header(
    plain: Running, path: str, stream: bool
) -> None:
    answer = post(plain, path, **REQUESTS[path], stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-penstock-tools-in-system"] == "look"
    without = {name: value for name, value in REQUESTS[path].items() if name != "tools"}
    assert "x-penstock-tools-in-system" not in post(plain, path, **without).headers


def test_required_call_uses_described_format(plain: Running) -> None:
    parameters = {"type": "object", "properties": {"text": {"enum": ["otter"]}}}
    parameters |= {"required": ["text"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    body = {"messages": TALK, "tools": [tool], "tool_choice": "required", "max_tokens": 200}
    answer = post(plain, "/v1/chat/completions", **body)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"text": "otter"}


def test_tools_without_template_are_refused_if_configured(tmp_path: Path) -> None:
    model = parrot(tmp_path, "One.", template=PLAIN)
    with serving(*model, tools_without_template="refuse") as running:
        for path, body in REQUESTS.items():
            answer = post(running, path, **body)
            assert answer.status_code == 400
            assert "--tools-without-template" in answer.json()["error"]["message"]
            without = {name: value for name, value in body.items() if name != "tools"}
            assert post(running, path, **without).status_code == 200


def test_tools_rendered_by_template_are_not_in_header(tmp_path: Path) -> None:
    with serving(*parrot(tmp_path, "One.")) as running:
        for path, body in REQUESTS.items():
            assert "x-penstock-tools-in-system" not in post(running, path, **body).headers


def test_continue_final_message_continues_assistant_text(plain: Running) -> None:
    begun = [*TALK, {"role": "assistant", "content": "One, "}]
    path = "/v1/chat/completions"
    answer = post(plain, path, messages=begun, continue_final_message=True)
    assert answer.json()["choices"][0]["message"]["content"] == "two, three."
    anew = post(plain, path, messages=begun)
    assert anew.json()["choices"][0]["message"]["content"] == "One, two, three."


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": TALK, "continue_final_message": True},
        {"messages": [*TALK, {"role": "assistant", "content": ""}], "continue_final_message": True},
        {"messages": TALK, "add_generation_prompt": False},
    ],
)
def test_continuation_without_assistant_message_is_400(
    plain: Running, wrong: dict[str, Any]
) -> None:
    answer = post(plain, "/v1/chat/completions", **wrong)
    assert answer.status_code == 400
    named = "continue_final_message" if "continue_final_message" in wrong else "add_generation"
    assert named in answer.json()["error"]["message"]
