"""Sessions over HTTP: saved by name, resumed by another server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import serving

from penstock_bench.recall import Dialogue


@contextmanager
def server(folder: Path, sessions: Path | None, **engine: Any) -> Iterator[httpx.Client]:
    """Serve the embedded model with a cold tier."""
    cold = {"ssd_cache_dir": folder, **engine}
    with (
        serving(engine=cold, session_dir=sessions) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        yield http


def ask(http: httpx.Client, messages: list[Any]) -> tuple[str, int]:
    body = http.post("/v1/chat/completions", json={"messages": messages}).raise_for_status().json()
    usage = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["message"]["content"], usage["cached_tokens"]


def test_session_resumes_on_other_server(tmp_path: Path, told: Dialogue, reads_all: None) -> None:
    sessions = tmp_path / "sessions"
    question = told.ask(told.questions[0])
    with server(tmp_path / "one", sessions) as http:
        text, cached = ask(http, question)
        assert cached == 0
        saved = http.post("/v1/sessions/morning/save", json={"messages": question})
        assert saved.raise_for_status().json()["tokens"] >= 4 * 64
        again = http.post("/v1/sessions/morning/save", json={"messages": question}).json()
        assert again == saved.json(), "it may be replaced"
        (listed,) = http.get("/v1/sessions").json()["sessions"]
        assert (listed["name"], listed["nbytes"]) == ("morning", again["nbytes"])
    assert (sessions / "morning.tar").stat().st_mode & 0o077 == 0
    with server(tmp_path / "other", sessions) as http:
        loaded = http.post("/v1/sessions/morning/load", json={}).raise_for_status().json()
        assert loaded == again
        assert ask(http, question) == (text, again["tokens"])
        assert http.delete("/v1/sessions/morning").json() == {"name": "morning"}
        assert http.get("/v1/sessions").json() == {"sessions": []}
        assert http.post("/v1/sessions/morning/load", json={}).status_code == 404


@pytest.mark.parametrize("token", [3_025, 2**40, 2**120])
def test_unknown_tokens_are_refused(tmp_path: Path, token: int) -> None:
    with server(tmp_path / "one", tmp_path / "sessions") as http:
        refused = http.post("/v1/sessions/a/save", json={"prompt": [5, token]})
        assert refused.status_code == 400
        assert f"token {token}" in refused.json()["error"]["message"]


@pytest.mark.parametrize("other", [{"max_kv_size": 2_048}, {"block_size": 128}], ids=str)
def test_session_of_other_settings_is_refused(
    tmp_path: Path, told: Dialogue, other: dict[str, int]
) -> None:
    sessions = tmp_path / "sessions"
    question = told.ask(told.questions[0])
    with server(tmp_path / "one", sessions) as http:
        ask(http, question)
        http.post("/v1/sessions/a/save", json={"messages": question}).raise_for_status()
    with server(tmp_path / "other", sessions, **other) as http:
        refused = http.post("/v1/sessions/a/load", json={})
        assert refused.status_code == 400
        assert "fingerprint" in refused.json()["error"]["message"]
        assert ask(http, question)[1] == 0


def test_damaged_session_is_refused(tmp_path: Path, told: Dialogue) -> None:
    sessions = tmp_path / "sessions"
    question = told.ask(told.questions[0])
    with server(tmp_path / "one", sessions) as http:
        text, _ = ask(http, question)
        http.post("/v1/sessions/a/save", json={"messages": question}).raise_for_status()
    file = sessions / "a.tar"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    (sessions / "b.tar").write_bytes(b"no tar at all" * 100)
    with server(tmp_path / "other", sessions) as http:
        assert "damaged" in http.post("/v1/sessions/a/load", json={}).json()["error"]["message"]
        assert http.post("/v1/sessions/b/load", json={}).status_code == 400
        assert ask(http, question)[0] == text


def test_invalid_session_error_has_no_path(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    sessions.mkdir(mode=0o700)
    (sessions / "zeros.tar").write_bytes(bytes(20_480))
    (sessions / "text.tar").write_bytes(b"no tar at all" * 100)
    (sessions / "device.tar").symlink_to("/dev/zero")
    (sessions / "nowhere.tar").symlink_to(tmp_path / "nowhere")
    os.mkfifo(sessions / "pipe.tar")
    with server(tmp_path / "one", sessions) as http:
        listed = http.get("/v1/sessions").raise_for_status().json()["sessions"]
        assert [one["name"] for one in listed] == ["text", "zeros"]
        for name in ("zeros", "text"):
            refused = http.post(f"/v1/sessions/{name}/load", json={})
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert f"{name}.tar is not a session file" in message and str(tmp_path) not in message
        for name in ("device", "nowhere", "pipe"):
            assert http.post(f"/v1/sessions/{name}/load", json={}).status_code == 404


def test_session_name_is_not_a_path(tmp_path: Path) -> None:
    with server(tmp_path / "one", tmp_path / "sessions") as http:
        for name in ("..", "a/b", ".hidden", "a" * 65, "%2e%2e%2fa", "a.b"):
            for answer in (
                http.post(f"/v1/sessions/{name}/save", json={"prompt": "a"}),
                http.post(f"/v1/sessions/{name}/load", json={}),
                http.delete(f"/v1/sessions/{name}"),
            ):
                assert answer.status_code in (400, 404, 405, 422)
    assert list(tmp_path.rglob("*.tar")) == []


@pytest.mark.parametrize("folder", ["cache", "block"])
def test_error_keeps_words_that_equal_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with server(Path(folder), Path("sessions")) as http:
        nothing = http.post("/v1/sessions/a/save", json={"prompt": [5] * 66})
        message = nothing.json()["error"]["message"]
        assert message.startswith("no block of this prompt of 66 tokens is cached. Only whole")


def test_missing_prompt_or_session_dir_is_reported(tmp_path: Path) -> None:
    with server(tmp_path / "one", tmp_path / "sessions") as http:
        nothing = http.post("/v1/sessions/a/save", json={"prompt": "never asked"})
        assert nothing.status_code == 400
        assert "no block of this prompt" in nothing.json()["error"]["message"]
    with server(tmp_path / "one", None) as http:
        assert "--session-dir" in http.get("/v1/sessions").json()["error"]["message"]
