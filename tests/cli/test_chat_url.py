"""`penstock chat --url` with our server, with other servers, and without a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from patience import SOON
from stand_in_server import stand_in

from penstock.cli.options import LOCAL_FIELDS
from penstock.cli.remote import Remote, RemoteError
from penstock.config import EngineSettings, SamplingSettings, flag_of
from penstock.errors import SettingError
from penstock_bench.models import ModelChoice
from penstock_bench.serve_model import model_folder
from penstock_bench.serve_process import RunningServer, free_port, ours, serving

ROOT = Path(__file__).parents[2]
TELL = "The code of the amber falcon is 4821."
ASK = "What is the code of the amber falcon?"
GREEDY = SamplingSettings(max_tokens=32)


def chat(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "chat", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    port = free_port()
    with model_folder(ModelChoice.EMBEDDED) as folder, serving(ours(folder, port), port) as running:
        yield running


def test_chat_with_own_server_uses_its_cache(server: RunningServer) -> None:
    lines = f"{TELL}\n{ASK}\n/stats\n/reset\n/stats\n{ASK}\n"
    done = chat("--url", server.url, "--echo", stdin=lines)
    assert done.returncode == 0, done.stderr
    noted, right, stats, forgotten, unasked, unknown = [
        line for line in done.stdout.splitlines() if not line.startswith("> ")
    ]
    assert (noted, right) == ("Noted.", "4821.")
    assert re.fullmatch(
        r"prompt \d+ tokens, \d+ cached \(\d+%\); answer \d+ tokens,.* first after .* s", stats
    )
    assert forgotten == "The conversation is forgotten."
    assert "no answers yet" in unasked
    assert unknown != "4821."


def test_long_history_is_cached_on_server(server: RunningServer) -> None:
    remote = Remote(f"{server.url}/v1/", system="Remember. " * 100)
    for _ in range(2):
        list(remote.answer(TELL, GREEDY))
    assert remote.last is not None
    assert remote.last.cached_tokens >= 192
    assert remote.last.prompt_tokens > remote.last.cached_tokens


def test_chat_works_with_any_openai_server(capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in(key="secret") as other:
        done = chat(
            "--url", f"{other.url}/v1", "--api-key", "secret", "--system", "Be brief.",
            "--temperature", "0.5", "--seed", "7", stdin="Hello!\nAgain!\n/stats\n",
        )  # fmt: skip
    assert done.stdout.splitlines()[:2] == ["message 2", "message 4"]
    assert "prompt 20 tokens, 15 cached (75%); answer 2 tokens" in done.stdout
    assert other.said[1] == ["Be brief.", "Hello!", "message 2", "Again!"]
    first = other.bodies[0]
    assert (first["model"], first["temperature"], first["seed"]) == ("counter", 0.5, 7)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("status", "answers 429: too many wait"),
        ("event", "ended the answer with an error: the engine has stopped"),
        ("cut", "closed the stream before the answer ended"),
    ],
)
def test_failed_turn_is_removed_from_history(fault: str, complaint: str) -> None:
    with stand_in(fault=fault) as other:
        remote = Remote(other.url)
        with pytest.raises(RemoteError, match=complaint):
            list(remote.answer("Hello!", GREEDY))
        assert remote.messages == []
        other.fault = None
        assert "".join(remote.answer("Hello!", GREEDY)) == "message 1"
        assert len(remote.messages) == 2


def test_interrupted_turn_is_removed_from_history() -> None:
    with stand_in() as other:
        remote = Remote(other.url)
        with closing(remote.answer("Hello!", GREEDY)) as pieces:
            next(pieces)
        assert remote.messages == []


def test_failed_turn_ends_piped_chat_with_one_line_error() -> None:
    with stand_in(fault="status") as other:
        done = chat("--url", other.url, stdin="Hello!\nAgain!\n")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ") and len(done.stderr.splitlines()) == 1
    assert len(other.bodies) == 1


def test_missing_server_gives_one_line_error() -> None:
    done = chat("--url", f"http://127.0.0.1:{free_port()}", stdin="Hello!\n")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no server answers at http://127.0.0.1:" in line


def test_missing_api_key_is_named_in_error() -> None:
    with stand_in(key="secret") as other, pytest.raises(RemoteError, match=r"401.*--api-key"):
        Remote(other.url)


def test_incompatible_server_is_named_in_error() -> None:
    with stand_in(fault="page") as other, pytest.raises(RemoteError, match="OpenAI-compatible"):
        Remote(other.url)


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://localhost", "", "http://"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(SettingError, match="--url"):
        Remote(url)


@pytest.mark.parametrize("flag", [f"--{flag_of(EngineSettings, name)}" for name in LOCAL_FIELDS])
def test_local_cache_flags_are_refused_with_url(flag: str) -> None:
    done = chat("--url", "http://127.0.0.1:1", flag, "8")
    assert done.returncode == 2
    assert f"{flag} is the server's to decide" in done.stderr


# ---- what make run and the docs show


def test_first_run_prints_working_examples(tmp_path: Path) -> None:
    """Nothing is cached or downloaded: the real model is skipped with a message."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "first_run.py"), "--offline"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if shutil.which("curl") is None:
        assert "(not run: curl is not installed)" in done.stdout
    else:
        assert re.search(r'"content": ?"4821\."', done.stdout)
    assert "\nturquoise.\n" in done.stdout  # the openai package
    assert "\nLisbon.\n" in done.stdout  # penstock chat --url
    assert "smollm2, a real model (98 MB), is not in the cache; offline" in done.stdout
    assert not any(tmp_path.rglob("*.gguf*"))


@pytest.mark.parametrize("name", ["chat.sh", "openai_client.py"])
def test_docs_contain_examples_verbatim(name: str) -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    assert (ROOT / "examples" / name).read_text() in page
