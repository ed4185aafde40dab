"""`penstock top` as a process against a real server."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from patience import SOON
from run_command import open_terminal
from served_pool import ONE, served, spec
from servers import Running, serving

from penstock.cli import main
from penstock.recall import MODEL_PATH
from penstock_bench.recall import Dialogue

SCRIPT = Path(sys.executable).parent / "penstock"
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def server(told: Dialogue) -> Iterator[Running]:
    with serving(api_key=KEY) as running:
        body = {"model": "recall", "messages": told.ask(told.questions[0]), "max_tokens": 8}
        headers = {"Authorization": f"Bearer {KEY}"}
        for _ in range(2):
            httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        yield running


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return subprocess.run(
        [SCRIPT, "top", *arguments],
        env=clean | {"COLUMNS": "100", "LINES": "40"} | environment,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one-line error of a refused command."""
    capsys.readouterr()
    assert main(["top", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("penstock: ")
    return line


def test_once_flag_prints_server_state(server: Running) -> None:
    done = top("--once", "--url", server.url, "--api-key", KEY)
    assert done.returncode == 0 and done.stderr == ""
    stats = server.service.engine.stats()
    assert f"{stats.hit_tokens:,} of {stats.prompt_tokens:,} prompt tokens" in done.stdout
    assert "of 200.0 MB" in done.stdout
    assert done.stdout.count("/v1/chat/completions") == 2
    assert "█" in done.stdout and "weights" in done.stdout and "nodes" in done.stdout


def test_json_flag_prints_one_object_per_line(server: Running) -> None:
    done = top("--json", "--once", PENSTOCK_URL=f"{server.url}/v1/", PENSTOCK_API_KEY=KEY)
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["stats"]["by_kind"] == server.service.engine.stats().by_kind
    assert told["requests"][-1]["cached_tokens"] > 0
    assert "tree" not in told


def test_piped_output_prints_lines_until_server_ends() -> None:
    with serving() as running:
        process = subprocess.Popen(
            [SCRIPT, "top", "--url", running.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("0 running, 0 waiting; ")
        assert "\x1b" not in first
    _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 2
    (line,) = errors.splitlines()
    assert line == f"penstock: the server at {running.url} has ended"


def test_terminal_screen_is_restored(server: Running) -> None:
    ours, theirs = open_terminal()
    process = subprocess.Popen(
        [SCRIPT, "top", "--url", server.url, "--api-key", KEY],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(theirs)
    try:
        seen = _read(ours, lambda text: text.count("hit rate") >= 2)
        assert "\x1b[?1049h" in seen  # the other screen, so that nothing is overwritten
        process.send_signal(signal.SIGINT)
        assert "\x1b[?1049l" in _read(ours, lambda text: "\x1b[?1049l" in text)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(("columns", "lines"), [(100, 40), (80, 24), (50, 15)])
def test_output_fits_small_terminals(server: Running, columns: int, lines: int) -> None:
    sizes = {"COLUMNS": str(columns), "LINES": str(lines)}
    done = top("--once", "--url", server.url, "--api-key", KEY, **sizes)
    shown = done.stdout.splitlines()
    assert len(shown) < lines and max(map(len, shown)) <= columns
    stats = server.service.engine.stats()
    assert "of 200.0 MB" in done.stdout
    assert f"hit rate {stats.hit_rate:.0%}" in done.stdout
    assert "tokens/s" in done.stdout and "running" in done.stdout and "waiting" in done.stdout
    assert done.stdout.count("/v1/chat/completions") == 2
    assert shown[0].endswith("q: quit") and "…" not in "".join(shown)


def test_q_quits_and_restores_terminal(server: Running) -> None:
    ours, theirs = open_terminal()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [SCRIPT, "top", "--url", server.url, "--api-key", KEY],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )
    try:
        _read(ours, lambda text: "hit rate" in text)
        os.write(ours, b"q")
        assert "\x1b[?1049l" in _read(ours, lambda text: "\x1b[?1049l" in text)
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _read(terminal: int, enough: object) -> str:
    text = ""
    until = time.monotonic() + 30
    while not enough(text) and time.monotonic() < until:  # type: ignore[operator]
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 65_536).decode(errors="replace")
    return text


def test_several_models_are_listed_and_one_is_watched() -> None:
    name = "second-of-the-two-models"
    with served([spec("first", MODEL_PATH), spec(name, MODEL_PATH)], 2 * ONE) as address:
        done = top("--once", "--url", address.url)
        assert f"models   first away, {name} away" in done.stdout
        assert "no model is loaded" in done.stdout.splitlines()[0]
        for model in ("first", name):
            address.answer(model)
        done = top("--once", "--url", address.url, "--model", name)
        assert re.search(rf"models   first loaded [\d.]+ MB, {name} loaded [\d.]+ MB", done.stdout)
        assert f"  {name}  " in done.stdout.splitlines()[0]
        done = top("--once", "--url", address.url, COLUMNS="50")
        assert "models   2 of 2 loaded" in done.stdout
        (line,) = top("--json", "--once", "--url", address.url).stdout.splitlines()
        assert [model["name"] for model in json.loads(line)["models"]] == ["first", name]
        done = top("--once", "--url", address.url, "--model", "third")
        assert done.returncode == 2 and f"first, {name}" in done.stderr


# ---- refusals


def test_unknown_name_for_single_model_is_refused(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    keyed = ("--url", server.url, "--api-key", KEY, "--once")
    assert "serves recall, and not other" in refused(capsys, *keyed, "--model", "other")


def test_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = refused(capsys, "--url", f"http://127.0.0.1:{port}", "--once")
    assert f"no server answers at http://127.0.0.1:{port}" in line


@pytest.mark.parametrize("key", [(), ("--api-key", "another")])
def test_wrong_key_is_reported(
    server: Running, capsys: pytest.CaptureFixture[str], key: tuple[str, ...]
) -> None:
    line = refused(capsys, "--url", server.url, "--once", *key)
    assert "--api-key" in line and KEY not in line


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://localhost", "http://"])
def test_invalid_url_is_reported(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert "--url" in refused(capsys, "--url", url)


def test_incompatible_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        line = refused(capsys, "--url", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
        thread.join()
    assert "not a penstock server" in line
