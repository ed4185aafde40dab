"""Middleware before all routes; start, drain and shutdown of a server."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import SOON
from servers import Running, serving, wait_until

from penstock import load
from penstock.recall import MODEL_PATH
from penstock.server.body_scan import BodyScan
from penstock_bench.recall import Dialogue

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 20_000,
    "logit_bias": {"300": 100},
    "stream": True,
}


def ask(running: Running, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    return httpx.post(f"{running.url}{CHAT}", json=body, timeout=SOON, **more)


# ---- keys, origins, hosts


def test_missing_api_key_is_401() -> None:
    with serving(api_key="secret") as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secre"}):
            refused = ask(running, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert ask(running, headers=headers).status_code == 200
        for path in ("/health", "/ready"):
            assert httpx.get(running.url + path).status_code == 200
        closed = ("/metrics", "/v1/models", "/v1/cache/stats", "/v1/cache/tree", "/openapi.json")
        for path in (
            *closed,
            "/v1/live",
            "/page/../v1/models",
            "/docs",
            "/docs/files/swagger-ui.css",
        ):
            assert httpx.get(running.url + path).status_code == 401, path
        assert httpx.delete(f"{running.url}/v1/cache").status_code == 401
        refused = httpx.post(f"{running.url}/v1/messages", json={})
        assert refused.json()["error"]["type"] == "authentication_error"
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret") as api:
            assert api.models.list().data
        stranger = openai.OpenAI(base_url=f"{running.url}/v1", api_key="other", max_retries=0)
        with stranger as api, pytest.raises(openai.AuthenticationError):
            api.models.list()


def test_non_ascii_api_key_is_401() -> None:
    with serving(api_key="secret") as running:
        refused = ask(running, headers={b"x-api-key": "sécret".encode()})
        assert refused.status_code == 401


def test_cors_allows_only_named_origins() -> None:
    with serving(api_key="secret", cors_origin=("https://a.example",)) as running:
        asking = {"Access-Control-Request-Method": "POST", "Origin": "https://a.example"}
        answer = httpx.options(running.url + CHAT, headers=asking)
        assert answer.status_code == 200, "the browser asks without the key"
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(running.url + CHAT, headers={**asking, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        failed = ask(running, headers={"Origin": "https://a.example"})
        assert failed.status_code == 401
        assert "access-control-allow-origin" in failed.headers, "or a page could not read why"


def test_foreign_host_is_refused_without_key(recall_server: Running) -> None:
    """As DNS rebinding would send."""
    assert ask(recall_server, headers={"Host": "evil.example"}).status_code == 403
    assert ask(recall_server, headers={"Host": "localhost:1"}).status_code == 200


# ---- bodies


def test_oversized_body_is_413() -> None:
    with serving(max_body_bytes=2_000) as running:
        fits = {"messages": [{"role": "user", "content": "a" * 1_000}], "max_tokens": 1}
        assert httpx.post(running.url + CHAT, json=fits).status_code == 200
        fits["messages"] = [{"role": "user", "content": "a" * 2_000}]
        refused = httpx.post(running.url + CHAT, json=fits)
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "body_too_large"

        def pieces() -> Any:  # sent without saying how much it will be
            for _ in range(100):
                yield b"a" * 1_000

        try:
            refused = httpx.post(running.url + CHAT, content=pieces())
        except httpx.WriteError:  # the connection may be closed before all is sent
            return
        assert refused.status_code == 413


def test_incomplete_body_times_out() -> None:
    with serving(body_timeout_seconds=0.2) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{".encode()
            )
            connection.settimeout(10)
            assert b" 408 " in connection.recv(1_000)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[" * 100_000, "too_deep"),
        (b'{"a":' * 100_000, "too_deep"),
        (b"{", "invalid_json"),
        (b"", None),
        (b"\xff\xfe", None),
        (b"null", None),
        (b"[]", None),
        (b"1" * 10_000, None),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_invalid_body_is_400(recall_server: Running, content: bytes, code: Any) -> None:
    answer = httpx.post(
        recall_server.url + CHAT, content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    if code is not None:
        assert answer.json()["error"]["code"] == code


JSON = st.recursive(
    st.none() | st.text('[]{}\\"a') | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner),
)


def scanned(body: bytes, size: int) -> BodyScan:
    """Scan a body that arrives in parts of a size."""
    scan = BodyScan()
    for start in range(0, len(body), size):
        scan.add(body[start : start + size])
    return scan


@given(JSON, st.integers(1, 9))
def test_scanned_json_depth_matches_parsed_value(value: Any, size: int) -> None:
    def depth(of: Any) -> int:
        if isinstance(of, dict):
            of = list(of.values())
        return 1 + max(map(depth, of), default=0) if isinstance(of, list) else 0

    assert scanned(json.dumps(value).encode(), size).depth == depth(value)


TEXT = st.text(st.sampled_from('a\\"[é€🦫'), max_size=12)


@given(st.lists(TEXT), st.booleans(), st.integers(1, 9))
def test_body_cost_is_independent_of_chunks(texts: list[str], ascii_only: bool, size: int) -> None:
    body = json.dumps(texts, ensure_ascii=ascii_only).encode()
    cost = scanned(body, size).cost
    assert cost == scanned(body, len(body)).cost
    text = "".join(texts)
    width = 4 if max(text, default="") > "\uffff" else 1 if body.isascii() and text.isascii() else 2
    assert cost[1] >= len(body) + width * len(body)


@pytest.mark.parametrize(
    ("body", "cost"),
    [
        (b'"' + b"a" * 98 + b'"', (500, 200)),
        (b"[[],[]]", (291, 270)),
        ('"' + "é" * 49 + '"', (800, 300)),
        (rb'"\u20ac"', (64, 24)),
        (rb'"\ud83e\uddab"', (196, 70)),
    ],
)
def test_body_cost_counts_values_and_depth(body: bytes | str, cost: tuple[int, int]) -> None:
    assert scanned(body.encode() if isinstance(body, str) else body, 5).cost == cost


@pytest.mark.parametrize("piece", [b"a", b"\\n", b"a\\\\", b'\\"'])
def test_scanning_long_string_takes_no_memory(piece: bytes) -> None:
    body = b"[]" * 100 + b'"' + piece * 1_000_000 + b'"' + b"[" * 3
    tracemalloc.start()
    try:
        assert scanned(body, 65_536).depth == 3
        assert tracemalloc.get_traced_memory()[1] < 4 * 65_536
    finally:
        tracemalloc.stop()


# ---- errors, ids, documents


def test_unknown_path_gives_json_error(recall_server: Running) -> None:
    missing = httpx.get(f"{recall_server.url}/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    missing = httpx.get(f"{recall_server.url}/v1/messages/nothing")
    assert missing.json()["type"] == "error"
    wrong = httpx.get(recall_server.url + CHAT)
    assert wrong.status_code == 405
    assert "error" in wrong.json()


def test_every_response_has_request_id(recall_server: Running) -> None:
    first, second = (ask(recall_server).headers["x-request-id"] for _ in range(2))
    assert first != second
    given_id = ask(recall_server, headers={"x-request-id": "mine-1"})
    assert given_id.headers["x-request-id"] == "mine-1"
    strange = ask(recall_server, headers={"x-request-id": "a b"})
    assert strange.headers["x-request-id"] != "a b"
    assert "server" not in strange.headers


def test_openapi_document_lists_routes_and_error_codes(recall_server: Running) -> None:
    document = httpx.get(f"{recall_server.url}/openapi.json").json()
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/models", "/health", "/ready"):
        assert path in document["paths"]
    chat = document["paths"][CHAT]["post"]
    assert {"400", "401", "413", "429", "503"} <= set(chat["responses"])
    assert "text/event-stream" in chat["responses"]["200"]["content"]


def test_error_of_unknown_path_or_method_lists_alternatives(
    recall_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    missing = httpx.get(f"{recall_server.url}/v1/moderations")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert "/openapi.json" in missing.json()["error"]["message"]
    wrong = httpx.get(f"{recall_server.url}{CHAT}")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    refused = httpx.post(f"{recall_server.url}/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 404
    assert caplog.text == "", "what is refused is no fault of the server"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"max_tokens": "many"}, "invalid_type"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({"messages": "Hello!"}, "invalid_type"),
        ({"messages": None}, "missing_required_parameter"),
    ],
)
def test_wrong_type_and_wrong_value_have_different_codes(
    recall_server: Running, changed: dict[str, Any], code: str
) -> None:
    body = {**LONG, **changed}
    error = httpx.post(f"{recall_server.url}{CHAT}", json=body).json()["error"]
    assert (error["code"], error["param"]) == (code, next(iter(changed)))


@pytest.mark.parametrize(
    ("path", "changed", "words"),
    [
        (CHAT, {"tools": [5]}, "tools.0: Input should be an object"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content: Input should be a valid"),
        (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        (CHAT, {"tool_choice": "required"}, "tool_choice: no tool is offered"),
        ("/v1/responses", {"input": ["a"]}, "input.0: Input should be a valid dict"),
        ("/v1/responses", {"input": 5}, "input: Input should be a valid string"),
        ("/v1/responses", {"input": "a", "background": True}, "background is not supported; leave"),
    ],
)
def test_validation_error_names_location(
    recall_server: Running, path: str, changed: dict[str, Any], words: str
) -> None:
    error = httpx.post(f"{recall_server.url}{path}", json={**LONG, **changed}).json()["error"]
    assert words in error["message"]
    assert error["code"] in ("invalid_type", "invalid_value", "unsupported_parameter")


def test_docs_page_loads_no_files_from_other_hosts(recall_server: Running) -> None:
    page = httpx.get(f"{recall_server.url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "http:" not in page.text and "https:" not in page.text and '"//' not in page.text
    assert '"validatorUrl": null' in page.text
    assert "http" not in page.headers["content-security-policy"]
    named = re.findall(r"""(?:href|src)="([^"]+)"|url: '([^']+)'""", page.text)
    assert len(named) == 4
    for name in map("".join, named):
        answer = httpx.get(f"{recall_server.url}/{name}")
        assert (answer.status_code, bool(answer.content)) == (200, True), name
    assert httpx.get(f"{recall_server.url}/docs/files/../../app.py").status_code == 404
    assert httpx.get(f"{recall_server.url}/redoc").status_code == 404


# ---- the end


def test_health_and_ready_routes_return_ok(recall_server: Running) -> None:
    for path in ("/health", "/ready"):
        answer = httpx.get(recall_server.url + path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_draining_server_finishes_open_requests(told: Dialogue) -> None:
    with serving() as running, httpx.Client(timeout=SOON) as api:
        body = {**LONG, "max_tokens": 300}
        with api.stream("POST", running.url + CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.server.drain()
            ready = httpx.get(f"{running.url}/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            assert httpx.get(f"{running.url}/health").status_code == 200, "it still lives"
            refused = ask(running)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            rest = list(lines)
        assert "data: [DONE]" in rest
        wait_until(lambda: running.server.should_exit)


def test_drain_times_out() -> None:
    with serving(drain_timeout_seconds=0.3) as running, httpx.Client(timeout=SOON) as api:
        with api.stream("POST", running.url + CHAT, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            started = time.monotonic()
            running.server.drain()
            rest = [line for line in lines if line]
            assert time.monotonic() - started < SOON
        assert rest[-2] == "event: error"
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down"
        assert "data: [DONE]" not in rest


def test_slow_reader_is_served_during_drain() -> None:
    body = {**LONG, "max_tokens": 400, "n": 2, "logprobs": True, "top_logprobs": 20}
    with serving(max_unread=100_000) as running:
        listener = running.server.servers[0].sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        content = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            peer.connect(("127.0.0.1", running.server.port))
            peer.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(lambda: running.service.open_requests == 1)
            running.server.drain()
            wait_until(lambda: running.service.engine.stats().running == 0, 30)
            time.sleep(0.3)  # the engine has drained: nobody but this reader is waited for
            assert not running.server.should_exit
            peer.settimeout(30)
            found = b""
            while b"data: [DONE]" not in found:
                part = peer.recv(65_536)
                assert part, "it was cut off"
                found += part
        wait_until(lambda: running.server.should_exit)


MANY = {"model": "any", "max_tokens": 20_000, "messages": LONG["messages"]}
OPEN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**LONG, "stream": False}),
    "messages": ("/v1/messages", MANY),
    "responses": ("/v1/responses", {"input": "Hello!", "max_output_tokens": 20_000}),
    "chat stream": (CHAT, LONG),
    "messages stream": ("/v1/messages", {**MANY, "stream": True}),
}
"""A request of each kind that is open when a server is told to stop."""


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_fails_open_requests(sig: signal.Signals) -> None:
    bodies = {"Content-Type": "application/json", "Content-Length": "9"}
    model, tokenizer = load(MODEL_PATH)
    tokenizer.eos_token_ids = {tokenizer.vocab_size}  # no answer ends by itself
    with serving(model, tokenizer) as running, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(OPEN)))
        answers = {
            name: pool.submit(httpx.post, running.url + path, json=body, timeout=30)
            for name, (path, body) in OPEN.items()
        }
        unread = stack.enter_context(socket.create_connection(("127.0.0.1", running.server.port)))
        lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", *map(": ".join, bodies.items())]
        unread.sendall("\r\n".join([*lines, "", "{"]).encode())
        try:
            wait_until(lambda: running.service.engine.stats().running == len(OPEN))
        finally:
            for _ in range(2):
                running.server.handle_exit(sig, None)
        ended = {name: answer.result() for name, answer in answers.items()}
        unread.settimeout(30)
        assert b"HTTP/1.1 503" in unread.recv(65_536)
    for name, answer in ended.items():
        assert answer.status_code == (200 if "stream" in name else 503), name
        last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
        error = json.loads(last)["error"]
        of_anthropic = name.startswith("messages")
        assert error.get("code") == (None if of_anthropic else "shutting_down"), name
        assert error["type"] == ("overloaded_error" if of_anthropic else "server_error"), name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_death_during_drain_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "penstock")
    with serving() as running:
        with httpx.stream("POST", running.url + CHAT, json=LONG, timeout=SOON) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.server.drain()
            running.service.engine._later(lambda core: setattr(core, "step", None))
            assert "event: error" in list(lines)
        wait_until(lambda: running.server.dead)  # which makes the exit code 1
        wait_until(lambda: running.server.should_exit)
