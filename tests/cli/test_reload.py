"""SIGHUP: the files of --config and --models of a running server are read again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from patience import SOON
from server_processes import Process, wait_until

from penstock.cli.reload import reload_on_hangup
from penstock.recall import MODEL_PATH
from penstock.server.problems import REQUEST_ID


@contextmanager
def serving(out: Path, log: Path, *flags: str) -> Iterator[Process]:
    """Serve the embedded model, with standard output and error in files."""
    command = (sys.executable, "-m", "penstock", "serve", "--port", "0", *flags)
    with out.open("w") as stdout, log.open("w") as stderr:
        running = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
    try:
        wait_until(lambda: re.search(r"http://\S+", out.read_text()), SOON)
        yield Process(re.findall(r"http://\S+", out.read_text())[0], running)
    finally:
        running.kill()
        running.wait(SOON)


def words(url: str, model: str | None = None) -> int:
    """Return the length of an answer that may have any."""
    body = {"prompt": "The code of", "ignore_eos": True, "model": model}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SOON).json()
    tokens: int = answer["usage"]["completion_tokens"]
    return tokens


@pytest.mark.slow
def test_sighup_reloads_changeable_settings(tmp_path: Path) -> None:
    file, log = tmp_path / "serve.toml", tmp_path / "log"
    file.write_text('max-tokens = 3\ntemperature = 0.5\nmemory-limit = "200MB"\n')
    flags = ("--config", str(file), "--temperature", "0", "--log-format", "json")
    with serving(tmp_path / "out", log, *flags) as made:
        assert words(made.url) == 3
        file.write_text(
            'max-tokens = 5\ntemperature = 0.9\nmemory-limit = "150MB"\nmax-batch-size = 2\n'
        )
        made.running.send_signal(signal.SIGHUP)
        wait_until(lambda: made.stats()["limit_bytes"] == 150_000_000, SOON)
        assert words(made.url) == 5
        file.write_text("max-tokens = 0\n")
        made.running.send_signal(signal.SIGHUP)
        wait_until(lambda: "keeping the previous settings" in log.read_text(), SOON)
        assert words(made.url) == 5
        wait_until(lambda: log.read_text().count("request ended") == 3, SOON)
        refused = httpx.post(f"{made.url}/v1/completions", json={"max_tokens": -2}, timeout=SOON)
        wait_until(lambda: "error response" in log.read_text(), SOON)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    messages = [line["message"] for line in lines]
    (line,) = [line for line in lines if line["message"] == "error response"]
    assert (line["path"], line["status"]) == ("/v1/completions", refused.status_code)
    assert line["request_id"] == refused.headers["x-request-id"]
    assert "--max-tokens is now 5" in messages
    assert "--memory-limit is now 150MB" in messages
    assert "the change of --max-batch-size takes effect after a restart" in messages
    assert not any("temperature" in message for message in messages), "a flag stays above the file"


def table(tmp_path: Path, **settings: str) -> Path:
    """Write a --models file: models by name, with lines of settings."""
    file = tmp_path / "models.toml"
    blocks = [
        f'[[model]]\npath = "{MODEL_PATH}"\nname = "{name}"\n{lines}\n'
        for name, lines in settings.items()
    ]
    file.write_text("\n".join(blocks))
    return file


def test_sighup_reloads_settings_of_several_models(tmp_path: Path) -> None:
    common, log = tmp_path / "serve.toml", tmp_path / "log"
    common.write_text('max-tokens = 3\nmemory-limit = "200MB"\n')
    models = table(tmp_path, loaded="max-tokens = 2", plain="", away="")
    flags = ("--models", str(models), "--config", str(common), "--log-format", "json")

    def reload() -> None:
        before = log.read_text().count('"--max-tokens is now')
        made.running.send_signal(signal.SIGHUP)
        wait_until(lambda: log.read_text().count('"--max-tokens is now') > before, SOON)

    with serving(tmp_path / "out", log, *flags) as made:
        assert [words(made.url, name) for name in ("loaded", "plain")] == [2, 3]
        table(tmp_path, loaded="max-tokens = 4", plain="max-batch-size = 2", new="")
        common.write_text('max-tokens = 6\nmemory-limit = "150MB"\n')
        reload()
        assert [words(made.url, name) for name in ("loaded", "plain", "away")] == [4, 6, 6]
        wait_until(lambda: "--memory-limit is now 150MB" in log.read_text(), SOON)
        limit = "penstock_memory_limit_bytes 1.5e+08"
        wait_until(lambda: limit in httpx.get(f"{made.url}/metrics").text, SOON)
        models.write_text("[[model]]\n")
        common.write_text("max-tokens = 5\n")
        reload()
        assert [words(made.url, name) for name in ("loaded", "plain", "away")] == [4, 5, 5]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    messages = [line["message"] for line in lines]
    assert "max-tokens of loaded is now 4" in messages
    changes = [line for line in lines if " is now " in line["message"]]
    assert {line["level"] for line in changes} == {"info"}
    assert not any("request_id" in line for line in changes)
    later = [message for message in messages if "after a restart" in message]
    assert later == [
        "the changes to away, new, plain in --models take effect after a restart",
        "the change of --memory-limit takes effect after a restart",
    ]
    assert any("--models was not reloaded (" in text for text in messages)


def test_reload_is_outside_the_request_it_interrupts() -> None:
    before = signal.getsignal(signal.SIGHUP)
    token = REQUEST_ID.set("of another")
    names: list[str | None] = []
    try:
        reload_on_hangup(lambda: names.append(REQUEST_ID.get()))
        signal.raise_signal(signal.SIGHUP)
    finally:
        REQUEST_ID.reset(token)
        signal.signal(signal.SIGHUP, before)
    assert names == [None]
