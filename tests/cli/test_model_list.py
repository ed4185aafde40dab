"""`penstock models` and `pull`, with a local server in place of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from run_command import SCRIPT, Done, run

from penstock.cli.model_list import machine_gb
from penstock.memory.arithmetic import default_limit_bytes
from penstock.models.recommended import RECOMMENDED
from penstock.recall import MODEL_PATH

NAME = "qwen3.5-0.8b"
SOURCE = RECOMMENDED[NAME].source
COMMIT = "0" * 40


class StandInHub:
    """A hub with the embedded model under the name of a recommended one."""

    def __init__(self) -> None:
        self.files = {file.name: file.read_bytes() for file in MODEL_PATH.iterdir()}
        self.requests = 0
        self.gets: Counter[str] = Counter()
        self.broken: str | None = None
        """File whose first half alone is sent."""
        self.cuts = 0
        """How often; 100 are more than a client tries again."""
        self.begins: list[int] = []
        """First bytes that were asked for of the broken file."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[StandInHub, dict[str, str]]]:
    """Return the stand-in hub, and the environment of a command that uses it."""
    state = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            state.requests += 1
            if self.path.startswith(f"/api/models/{SOURCE}"):
                tree = [
                    {"type": "file", "path": name, "size": len(raw), "oid": name}
                    for name, raw in state.files.items()
                ]
                siblings = [{"rfilename": name} for name in state.files]
                about = {"id": SOURCE, "sha": COMMIT, "siblings": siblings}
                raw = json.dumps(tree if "/tree/" in self.path else about).encode()
                self.send(200, {"Content-Type": "application/json"}, raw, body=body)
                return
            name = self.path.rpartition("/")[2]
            if not self.path.startswith(f"/{SOURCE}/resolve/") or name not in state.files:
                self.send(404, {"X-Error-Code": "RepoNotFound"}, b"", body=body)
                return
            raw = state.files[name]
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            begin = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(raw) - 1}/{len(raw)}"
            if body:
                state.gets[name] += 1
            if body and name == state.broken:
                state.begins.append(begin)
                if state.cuts:
                    state.cuts -= 1
                    # No new byte at later tries: the client gives up after some of them.
                    half = raw[begin : len(raw) // 2]
                    self.send(206 if begin else 200, headers, half, size=len(raw) - begin)
                    self.close_connection = True
                    return
            self.send(206 if begin else 200, headers, raw[begin:], body=body)

        def send(
            self,
            code: int,
            headers: dict[str, str],
            raw: bytes,
            *,
            size: int | None = None,
            body: bool = True,
        ) -> None:
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(raw) if size is None else size))
            self.end_headers()
            if body:
                with suppress(ConnectionError):
                    self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="test-hub", daemon=True)
    thread.start()
    yield (
        state,
        {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hub"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        },
    )
    server.shutdown()
    server.server_close()
    thread.join()


def listed(environment: dict[str, str]) -> list[str]:
    done = run("models", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return [model["name"] for model in json.loads(done.stdout)["models"] if model["downloaded"]]


def test_pulled_model_is_usable_offline(hub: tuple[StandInHub, dict[str, str]]) -> None:
    state, environment = hub
    assert listed(environment) == []
    done = run("pull", NAME, **environment)
    assert done.returncode == 0, done.stderr
    assert f"penstock serve {NAME}" in done.stdout
    assert listed(environment) == [NAME]
    assert state.gets["model.safetensors"] == 1
    answer = run("--offline", "generate", "Hello", "--model", NAME, **environment)
    assert answer.returncode == 0, answer.stderr
    assert run("--offline", "plan", NAME, "--json", **environment).returncode == 0
    assert run("--offline", "pull", NAME, **environment).returncode == 0
    table = run("models", **environment).stdout
    (row,) = [line for line in table.splitlines() if line.startswith(NAME)]
    assert row.split()[1:6] == ["yes", "4", "GB", "0.6", "GB"]


@pytest.mark.parametrize(
    "command", [("generate", "Hello", "--model", NAME), ("serve", NAME), ("doctor", NAME)]
)
def test_offline_mode_asks_hub_for_no_model(
    command: tuple[str, ...], hub: tuple[StandInHub, dict[str, str]]
) -> None:
    state, environment = hub
    line = refusal(run("--offline", *command, **environment))
    assert "run once without --offline: penstock pull" in line
    assert state.requests == 0


def test_failed_pull_keeps_completed_files(hub: tuple[StandInHub, dict[str, str]]) -> None:
    state, environment = hub
    state.broken, state.cuts = "model.safetensors", 100
    done = run("pull", NAME, **environment)
    assert done.returncode == 2
    assert f"run penstock pull {NAME} again" in done.stderr.splitlines()[-1]
    assert listed(environment) == []  # its config is here, its weights are not
    state.cuts = 0
    assert run("pull", NAME, **environment).returncode == 0
    assert listed(environment) == [NAME]
    assert state.gets["config.json"] == 1


def test_interrupted_pull_resumes_inside_file(hub: tuple[StandInHub, dict[str, str]]) -> None:
    state, environment = hub
    state.files["large.txt"] = bytes(24 << 20)  # the hub's client writes 10 MB at a time
    state.broken, state.cuts = "large.txt", 1
    assert run("pull", NAME, **environment).returncode == 0
    assert state.begins == [0, 10 << 20]


def refusal(done: Done[str]) -> str:
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


def test_pull_errors_suggest_remedy(hub: tuple[StandInHub, dict[str, str]]) -> None:
    _, environment = hub
    missing = refusal(run("pull", "owner/missing", **environment))
    assert f"{environment['HF_ENDPOINT']} has no model owner/missing" in missing
    assert "penstock models lists names" in refusal(run("pull", "missing", **environment))
    assert "--offline" in refusal(run("--offline", "pull", NAME, **environment))
    closed = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    unreached = "http://127.0.0.1:9 cannot be reached"
    pulled = refusal(run("pull", NAME, **closed))
    assert unreached in pulled and f"run penstock pull {NAME} again" in pulled
    assert "Error:" not in pulled


def test_serve_without_model_lists_downloaded_models(
    hub: tuple[StandInHub, dict[str, str]],
) -> None:
    _, environment = hub
    run("pull", NAME, **environment)
    expected = f"others   downloaded are {NAME}: penstock serve {NAME}"
    for model, is_said in (([], True), ([NAME], False)):
        assert (expected in banner_of(model, environment)) == is_said


def banner_of(model: list[str], environment: dict[str, str]) -> list[str]:
    """Return the banner of a server, and stop it."""
    command = [SCRIPT, "serve", *model, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as server:
        assert server.stdout is not None
        first = server.stdout.readline()  # they are flushed together
        server.terminate()
        return [first.rstrip(), *server.stdout.read().splitlines()]


def test_recommended_models_are_sorted_and_fit_their_machines() -> None:
    sizes = [model.size_bytes for model in RECOMMENDED.values()]
    assert sizes == sorted(sizes)
    assert len({model.source for model in RECOMMENDED.values()}) == len(sizes)
    for size in sizes:
        mac_bytes = int(machine_gb(size) * 0.75 * 2**30)
        assert default_limit_bytes(mac_bytes) > size
