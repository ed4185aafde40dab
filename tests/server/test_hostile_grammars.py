"""Expensive grammars are refused by every API, while short requests continue."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import psutil
import pytest
from server_processes import serving, wait_until
from servers import Running

from penstock.engine.model import constraint, grammar_trials

AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | "aa" | "b" | /[a-z]/'
MESSAGES = [{"role": "user", "content": "hi"}]
NUMBER = count(1_000_003)
"""Multiples, each of which no trial has seen."""


def hostile() -> dict[str, Any]:
    return {"type": "integer", "multipleOf": next(NUMBER)}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": schema}, "required": ["n"]}
    return {"name": "f", "parameters": parameters, **more}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, Any] = {
    "chat": lambda: (CHAT, {"messages": MESSAGES, "response_format": form(hostile())}),
    "guided_json": lambda: (CHAT, {"messages": MESSAGES, "guided_json": hostile()}),
    "guided_grammar": lambda: (
        TEXT,
        {"prompt": "a", "guided_grammar": f"start: a\na: %json {json.dumps(hostile())}"},
    ),
    "structured_outputs": lambda: (
        TEXT,
        {"prompt": "a", "structured_outputs": {"json": hostile()}},
    ),
    "responses": lambda: (
        "/v1/responses",
        {
            "input": "hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": hostile()}},
        },
    ),
    "messages": lambda: (
        "/v1/messages",
        {
            "model": "any",
            "max_tokens": 9,
            "messages": MESSAGES,
            "output_config": {"format": {"type": "json_schema", "schema": hostile()}},
        },
    ),
}


def post(server: Running, path: str, body: dict[str, Any], seconds: float = 120) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=seconds)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a trial to a tenth of a second."""
    monkeypatch.setattr(grammar_trials, "COMPILE_SECONDS", 0.1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_expensive_schema_is_400(recall_server: Running, name: str, stream: bool) -> None:
    path, body = BODIES[name]()
    before = psutil.Process().memory_info().rss
    answer = post(recall_server, path, {**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "compiling it takes more than" in message and "Ask for smaller" in message
    assert "\n" not in message
    assert psutil.Process().memory_info().rss - before < 16_000_000


@pytest.mark.parametrize("demanded", [False, True])
def test_expensive_tool_schema_is_not_enforced(recall_server: Running, demanded: bool) -> None:
    tools = [{"type": "function", "function": tool(hostile(), strict=True)}]
    choice = "required" if demanded else "auto"
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 2}
    answer = post(recall_server, CHAT, body)
    assert answer.status_code == 200
    assert answer.headers["x-penstock-unenforced"].startswith("f:")


def test_grammar_trials_per_request_are_bounded(
    recall_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "REQUEST_SECONDS", 0.05)
    tools = [
        {"type": "function", "function": {**tool(hostile(), strict=True), "name": f"f{i}"}}
        for i in range(40)
    ]
    trials = grammar_trials.grammar_trials
    known = len(trials._verdicts)
    with grammar_trials.one_request():
        for one in tools:
            text = json.dumps(one["function"]["parameters"])
            trials.verdict(f"start: a\na: %json {text}")
        assert 1 <= len(trials._verdicts) - known <= 3
    assert trials.verdict('start: "abc"').error == ""


def test_short_requests_continue_during_grammar_trials(
    recall_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(grammar_trials, "COMPILE_BYTES", 10**9)
    bodies = [BODIES["chat"]() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(post, recall_server, path, body) for path, body in bodies]
        answered = 0
        while not all(one.done() for one in asked):
            short = post(recall_server, CHAT, {"messages": MESSAGES, "max_tokens": 1})
            assert short.status_code == 200
            answered += 1
    assert answered > 1  # they wait for no trial
    assert all(one.result().status_code == 400 for one in asked)


def test_schema_of_disconnected_client_is_not_compiled(recall_server: Running) -> None:
    workers, busy = recall_server.service.workers, threading.Event()
    workers.compiling.submit(busy.wait, 60)
    trials = grammar_trials.grammar_trials
    try:
        path, body = BODIES["chat"]()
        with pytest.raises(httpx.ReadTimeout):
            post(recall_server, path, body, seconds=0.5)
        wait_until(lambda: not workers.pending)
        known = set(trials._verdicts)
    finally:
        busy.set()
    assert post(recall_server, CHAT, {"messages": MESSAGES, "max_tokens": 1}).status_code == 200
    workers.compiling.submit(int).result(60)
    assert set(trials._verdicts) == known


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constraint, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(constraint, "BURST_SECONDS", 0.02)
    return


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [False, True])
def test_slow_grammar_ends_answer_with_error(recall_server: Running, stream: bool) -> None:
    body = {"messages": MESSAGES, "guided_grammar": AMBIGUOUS, "max_tokens": 200}
    body |= {"ignore_eos": True, "stream": stream}
    answer = post(recall_server, CHAT, body)
    if stream:
        assert answer.status_code == 200
        last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert "Make it less ambiguous" in error["message"]
    other = post(recall_server, CHAT, {"messages": MESSAGES, "max_tokens": 2})
    assert other.status_code == 200


@pytest.mark.slow
def test_server_stops_during_grammar_trials() -> None:
    with serving("--memory-limit", "100MB", "--drain-timeout", "5") as server:
        with ThreadPoolExecutor(4) as pool:
            bodies = [BODIES["chat"]() for _ in range(4)]
            url = f"http://127.0.0.1:{server.port}"
            asked = [pool.submit(httpx.post, url + path, json=body) for path, body in bodies]
            child = psutil.Process(server.running.pid)
            wait_until(lambda: any(one.children() for one in child.children()))
            trials = child.children()
            server.running.terminate()
            assert server.running.wait(60) == 0
        assert all(one.done() for one in asked)
        wait_until(lambda: not any(one.is_running() for one in trials))
