"""Access, disclosure and logs: no prompt, key or path is leaked."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from core_parts import wrap_model
from engine_faults import Faulty
from patience import SOON
from pydantic import ValidationError
from servers import Running, serving, wait_until

from penstock.errors import EngineStopped
from penstock.server.anthropic.anthropic_forms import CountRequest, MessagesRequest
from penstock.server.cache_routes import ExplainRequest
from penstock.server.openai.openai_forms import ChatRequest, CompletionRequest
from penstock.server.openai.responses import ResponsesRequest
from penstock.server.problems import problem_of

KEY = "correct-horse-battery-staple"
PROMPT = "the vault opens at midnight"
OPEN = {("GET", "/"), ("GET", "/health"), ("GET", "/ready")}
"""Answered without a key, besides the page's files."""


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with serving(api_key=KEY) as running:
        yield running


def routes(running: Running) -> list[tuple[str, str]]:
    """Return each method and path in the server's OpenAPI document."""
    headers = {"authorization": f"Bearer {KEY}"}
    paths = httpx.get(f"{running.url}/openapi.json", headers=headers).json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    more = [("GET", "/docs"), ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/nothing")]
    return [*found, *more]


def ask(running: Running, method: str, path: str, **headers: str) -> httpx.Response:
    url = running.url + path.replace("{model_id}", "recall")
    with httpx.stream(method, url, headers=headers, json={}, timeout=SOON) as answer:
        if answer.status_code != 200:  # the live stream does not end
            answer.read()
        return answer


# ---- keys


def test_every_route_requires_key(locked: Running) -> None:
    looked_at = routes(locked)
    assert ("POST", "/v1/messages") in looked_at
    assert ("DELETE", "/v1/cache") in looked_at
    for method, path in looked_at:
        answer = ask(locked, method, path)
        if (method, path) in OPEN:
            assert answer.status_code == 200, path
            continue
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        if path.startswith("/api/"):  # Ollama's errors are a text
            assert "API key" in error
        else:
            assert error["type"] == "authentication_error"
        assert KEY not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": ""},
        {"x-api-key": KEY[1:]},
        {"x-api-key": f"Bearer {KEY}"},
        {"cookie": f"x-api-key={KEY}"},
        {"api-key": KEY},
    ],
)
def test_wrong_key_is_401(locked: Running, headers: dict[str, Any]) -> None:
    for path in ("/v1/models", "/v1/cache/tree?text=1", "/metrics"):
        answer = httpx.get(f"{locked.url}{path}", headers=headers, params=None)
        assert answer.status_code == 401
    assert httpx.get(f"{locked.url}/v1/models?api_key={KEY}").status_code == 401


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_valid_key_is_accepted_on_every_route(locked: Running, name: str) -> None:
    headers = {name: f"Bearer {KEY}" if name == "authorization" else KEY}
    for method, path in routes(locked):
        assert ask(locked, method, path, **headers).status_code not in (401, 403), path


def test_official_clients_send_key(locked: Running) -> None:
    messages: Any = [{"role": "user", "content": "Hello!"}]
    for key, refused in ((KEY, False), ("wrong", True)):
        theirs = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0)
        ours = anthropic.Anthropic(base_url=locked.url, api_key=key, max_retries=0)
        asked: Any = {"model": "recall", "messages": messages, "max_tokens": 4}
        with theirs, ours:
            if refused:
                with pytest.raises(openai.AuthenticationError):
                    theirs.chat.completions.create(**asked)
                with pytest.raises(anthropic.AuthenticationError):
                    ours.messages.create(**asked)
            else:
                assert theirs.chat.completions.create(**asked).choices
                assert ours.messages.create(**asked).content


def raw(running: Running, line: str, *headers: str) -> bytes:
    """Send a request line unchanged, which clients would normalize."""
    head = "\r\n".join([line, "Host: localhost", "Connection: close", *headers, "", ""])
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=SOON) as peer:
        peer.sendall(head.encode("latin-1"))
        found = b""
        while part := peer.recv(65_536):
            found += part
    return found


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/page/../v1/models",
        "/page/%2e%2e/v1/cache/tree?text=1",
        "/page/..%2fv1/models",
        "/./v1/models",
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "/V1/models",
        "/v1/models/",
        "/v1/models%00",
        "http://localhost/v1/models",
        "/page/../../app.py",
        "/page/..%2f..%2fapp.py",
        "/page/%2e%2e/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/../openai.py",
        "/page/..\\openai.py",
    ],
)
def test_path_spelling_does_not_bypass_key(locked: Running, path: str) -> None:
    found = raw(locked, f"GET {path} HTTP/1.1")
    assert found.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404", b"HTTP/1.1 400")), found[:200]
    assert b"import" not in found
    assert b"root:" not in found


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "get", "DELETE"])
def test_method_does_not_bypass_key(locked: Running, method: str) -> None:
    for path in ("/v1/cache", "/v1/models", "/page/app.js"):
        found = raw(locked, f"{method} {path} HTTP/1.1")
        status = int(found.split(b" ", 2)[1])
        assert status >= 400 or (method == "HEAD" and path.startswith("/page/"))


def test_keys_are_compared_in_constant_time() -> None:
    from penstock.server import access, app

    sources = [Path(module.__file__).read_text() for module in (access, app)]
    assert "hmac.compare_digest(key.sha256, digest)" in sources[0]
    for source in sources:
        assert not re.search(r"[!=]=\s*(digest|key\.sha256)|(digest|key\.sha256)\s*[!=]=", source)


# ---- foreign pages and hosts


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8080", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("127.0.0.1@evil.example", 400),
        ("[::1].evil.example", 400),
        ("[::1]evil.example:80", 400),
        ("localhost:80:80", 400),
        ("localhost evil.example", 400),
        ("", 400),
    ],
)
def test_without_key_only_local_hosts_are_served(
    recall_server: Running, host: str, status: int
) -> None:
    answer = httpx.get(f"{recall_server.url}/v1/models", headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", [], 400),
        ("1.1", ["localhost", "evil.example"], 400),
        ("1.1", ["localhost", "localhost"], 400),
        ("1.0", ["localhost", "evil.example"], 400),
        ("1.1", ["localhost"], 200),
        ("1.0", [], 200),
    ],
)
def test_duplicate_host_header_is_refused(
    recall_server: Running, version: str, hosts: list[str], status: int
) -> None:
    lines = [f"GET /v1/models HTTP/{version}", *(f"Host: {host}" for host in hosts)]
    with socket.create_connection(("127.0.0.1", recall_server.server.port), timeout=30) as peer:
        peer.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        assert peer.recv(4_096).startswith(f"HTTP/1.1 {status} ".encode())


def test_cross_origin_reads_need_allowed_origin(recall_server: Running) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models")):
        answer = httpx.request(method, f"{recall_server.url}{path}", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    with serving(cors_origin=("https://good.example",)) as running:
        for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
            answer = httpx.options(
                f"{running.url}/v1/chat/completions", headers={**headers, "origin": origin}
            )
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


SIMPLE = (
    None,
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=a",
)
"""What a page may send anywhere without being allowed to."""


def test_cross_origin_writes_are_refused(recall_server: Running) -> None:
    acts = [(method, path) for method, path in routes(recall_server) if method != "GET"]
    assert ("POST", "/v1/sessions/{name}/load") in acts
    for method, path in acts:
        for kind in SIMPLE:
            headers = {} if kind is None else {"content-type": kind}
            answer = httpx.request(
                method,
                recall_server.url + path.replace("{name}", "a"),
                headers={**headers, "origin": "https://evil.example"},
                content=b"{}",
                timeout=SOON,
            )
            asked_first = method == "DELETE" and kind is None  # a browser does
            assert answer.status_code == 415 or asked_first, (method, path, kind)
            if not asked_first:
                error = answer.json()["error"]
                message = error if path.startswith("/api/") else error["message"]
                assert "application/json" in message


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON"])
def test_json_content_types_are_accepted(recall_server: Running, kind: str) -> None:
    answer = httpx.post(
        f"{recall_server.url}/v1/completions",
        headers={"content-type": kind},
        content=b'{"prompt": "a", "max_tokens": 1}',
        timeout=SOON,
    )
    assert answer.status_code == 200


def test_tenants_are_isolated() -> None:
    prompt = PROMPT * 40
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "a"}
    with serving() as running:
        url = f"{running.url}/v1"
        httpx.post(f"{url}/completions", json=body, timeout=SOON).raise_for_status()
        for salt, held in (("a", True), ("b", False), (None, False)):
            asked = {"prompt": prompt, "cache_salt": salt}
            found = httpx.post(f"{url}/cache/explain", json=asked, timeout=SOON).json()
            assert (found["held_tokens"] > 0) is held
            if not held:
                assert found["held_text"] is None


# ---- what a wrong body may cost

MANY = 300_000
WRONG: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"messages": [7] * MANY},
        {"messages": [{"role": "user", "content": [7] * MANY}]},
        {"messages": [{"role": "user", "tool_calls": [7] * MANY}]},
        *({"messages": [], field: [7] * MANY} for field in ("stop", "tools", "modalities")),
        {"messages": [], "logit_bias": {str(number): "" for number in range(MANY)}},
    ],
    "/v1/completions": [
        {"prompt": [None] * MANY},
        {"prompt": [[""] * MANY]},
        {"prompt": [[""]] * MANY},
        {"prompt": "a", "stop": [7] * MANY},
    ],
    "/v1/responses": [
        *({"input": "a", field: [7] * MANY} for field in ("input", "tools", "include")),
        {"input": "a", "metadata": {str(number): 7 for number in range(MANY)}},
    ],
    "/v1/messages": [
        {"messages": [7] * MANY},
        {"messages": [{"role": "user", "content": [7] * MANY}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "", "content": [7] * MANY}],
                }
            ]
        },
        *({"messages": [], field: [7] * MANY} for field in ("system", "tools", "stop_sequences")),
    ],
    "/v1/cache/explain": [
        {"messages": [7] * MANY},
        {"messages": [], "tools": [7] * MANY},
        {"prompt": [""] * MANY},
    ],
}
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [ChatRequest],
    "/v1/completions": [CompletionRequest],
    "/v1/responses": [ResponsesRequest],
    "/v1/messages": [MessagesRequest, CountRequest],
    "/v1/cache/explain": [ExplainRequest],
}


@pytest.mark.parametrize("path", WRONG)
def test_validation_errors_are_bounded(path: str) -> None:
    """An error per value would take a hundred times the body's memory."""
    for body in WRONG[path]:
        for form in BODIES[path]:
            with pytest.raises(ValidationError) as refused:
                form.model_validate(body)
            assert refused.value.error_count() < 20


def fewer(value: Any) -> Any:
    """Return a body with at most 1,000 entries per list and object, which fits the pool."""
    if isinstance(value, dict):
        return {key: fewer(value[key]) for key in list(value)[:1_000]}
    return [fewer(item) for item in value[:1_000]] if isinstance(value, list) else value


def test_body_of_invalid_values_is_400(recall_server: Running) -> None:
    for path, bodies in WRONG.items():
        refused = httpx.post(f"{recall_server.url}{path}", json=fewer(bodies[0]), timeout=SOON)
        assert refused.status_code == 400, path
        assert len(refused.content) < 1_000


def test_body_of_too_many_values_is_413(recall_server: Running) -> None:
    body = WRONG["/v1/chat/completions"][0]
    refused = httpx.post(f"{recall_server.url}/v1/chat/completions", json=body, timeout=SOON)
    assert refused.status_code == 413
    assert len(refused.content) < 1_000


def test_engine_error_text_is_not_disclosed() -> None:
    problem = problem_of(EngineStopped(f"the engine's thread has died: KeyError: {PROMPT}"))
    assert (problem.status, problem.code) == (503, "engine_stopped")
    assert PROMPT not in problem.message


# ---- logs


SECRETS = (PROMPT, "midnight", KEY, "wrong-key", "a-salt", "secret-path")
PATHS = re.compile(r"site-packages|\.py\b|/src/|Traceback")
"""What would tell where the server is installed."""


def misbehave(url: str, key: str) -> None:
    """Send requests that could make a server log their contents."""
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    anthropic_body = {**chat, "model": PROMPT}
    headers = {"authorization": f"Bearer {key}", "x-request-id": PROMPT}
    wrong = {"authorization": "Bearer wrong-key", "user-agent": PROMPT}
    with httpx.Client(base_url=url, timeout=SOON) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"):
            for stream in (False, True):
                body = {**anthropic_body, "prompt": PROMPT, "input": PROMPT, "stream": stream}
                client.post(path, json=body, headers=headers)
                client.post(path, json=body, headers=wrong)
                client.post(path, json={**body, "max_tokens": PROMPT}, headers=headers)
                client.post(path, json={**body, "max_tokens": 10**9}, headers=headers)
            broken = f'{{"prompt": "{PROMPT}'.encode()
            typed = {**headers, "content-type": "application/json"}
            client.post(path, content=broken, headers=typed)
            client.post(path, content=b"\xff" + broken, headers=typed)
            client.post(path, content=b"[" * 10_000 + broken, headers=typed)
        client.get(f"/secret-path?key={KEY}", headers=headers)
        client.get("/v1/models/secret-path", headers=headers)
        client.post("/v1/completions", json={"prompt": PROMPT, "cache_salt": "a-salt"})
        with client.stream("POST", "/v1/completions", headers=headers, json=chat):
            pass


def assert_silent(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text
    assert not PATHS.search(text)


def test_process_logs_no_prompt_or_key() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PENSTOCK_API_KEY": KEY},
    ) as running:
        try:
            assert running.stdout is not None
            banner = ""
            while not (found := re.search(r" on (http://\S+)\n", banner)):
                line = running.stdout.readline()
                assert line, banner
                banner += line
            misbehave(found[1], KEY)
            running.terminate()
            assert running.wait(SOON) == 0
            assert_silent(banner + running.stdout.read())
        finally:
            running.kill()


def test_failing_model_logs_no_prompt(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model's error text may quote its input."""

    def quotes(model: Any, tokens: Any, cache: Any) -> Any:
        raise ValueError(f"cannot compute {PROMPT}")

    with caplog.at_level(logging.WARNING), serving() as running:
        engine = running.service.engine
        faulty = engine._later(lambda core: wrap_model(core, Faulty)).result(SOON)
        faulty.arm(quotes, 1_000)
        misbehave(running.url, KEY)
        wait_until(lambda: running.service.open_requests == 0)
    written = capfd.readouterr()
    assert_silent(written.out + written.err)
    for record in caplog.records:
        if record.name.startswith(("penstock", "uvicorn", "sse_starlette")):
            assert PROMPT not in record.getMessage()
            assert record.exc_info is None


def test_responses_disclose_no_paths(recall_server: Running) -> None:
    url = recall_server.url
    answers = [
        httpx.get(f"{url}/nothing"),
        httpx.get(f"{url}/v1/models"),
        httpx.post(f"{url}/v1/messages", content=b"{"),
        httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": 7}]}),
        httpx.get(f"{url}/openapi.json"),
    ]
    for answer in answers:
        assert str(Path(__file__).parents[2]) not in answer.text
        assert not PATHS.search(answer.text)
        assert "server" not in answer.headers


def test_recent_requests_contain_no_text(recall_server: Running) -> None:
    body = {"prompt": PROMPT * 20, "max_tokens": 4}
    for _ in range(2):
        httpx.post(f"{recall_server.url}/v1/completions", json=body, timeout=SOON)
    until = time.monotonic() + SOON
    while not recall_server.service.recent and time.monotonic() < until:
        time.sleep(0.01)
    remembered = str([recent.record() for recent in recall_server.service.recent])
    assert "vault" not in remembered
    assert "prompt_tokens" in remembered
