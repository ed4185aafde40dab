"""Failures of memory that users reported of other servers of several models, asked for here.

Reports: Ollama 18131 and 16698, omlx 1833, 2179 and 3858, MTPLX 144, mlx-lm 1807.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import SOON
from server_processes import Process, serving
from test_pool_process import LIMIT_BYTES, NAMES, PROCESS_BYTES, table

ONE_BYTES = 55_000_000
"""Limit that holds one model."""
SENTENCE = "The code of the amber falcon is {}."
LINE_TOKENS = 12
"""Tokens of a sentence, approximately."""


def told(tokens: int, first: int) -> list[dict[str, str]]:
    """Return a conversation of about so many tokens, and a question about its last sentence."""
    lines = [SENTENCE.format(first + number) for number in range(max(1, tokens // LINE_TOKENS))]
    text = " ".join([*lines, "What is the code of the amber falcon?"])
    return [{"role": "user", "content": text}]


def ask(server: Process, model: str, tokens: int, first: int = 1_000) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "messages": told(tokens, first), "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=10 * SOON)


def figure(server: Process, pattern: str, **query: str) -> float:
    """Return the sum of a metric's values."""
    text = httpx.get(f"{server.url}/metrics", params=query, timeout=SOON).text
    return sum(map(float, re.findall(rf"^penstock_{pattern}(?:{{.*}})? (\S+)$", text, re.M)))


@contextmanager
def within(server: Process, limit_bytes: int) -> Iterator[None]:
    """Check the resident memory of a server's process, every 50 ms."""
    process, ended, most = psutil.Process(server.running.pid), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.05):
            most.append(process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    assert max(most) < limit_bytes + PROCESS_BYTES


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[Process]:
    """A server of three models whose limit holds two."""
    models = table(tmp_path_factory.mktemp("models"))
    flags = ["--memory-limit", str(LIMIT_BYTES), "--ssd-cache-dir", str(disk)]
    with serving("--models", str(models), *flags) as running:
        yield running


def test_long_conversations_with_two_models_stay_within_limit(server: Process) -> None:
    """Ollama 18131: 8 GiB of prefixes a model, and 10 GB of swap."""
    with within(server, LIMIT_BYTES):
        for number in range(8):
            assert ask(server, NAMES[number % 2], 1_500, 1_000 * (number + 1)).status_code == 200


def test_seven_growing_requests_stay_within_limit(server: Process) -> None:
    """Ollama 16698: from 24 to 75 GB in seven requests."""
    with within(server, LIMIT_BYTES):
        for number in range(1, 8):
            assert ask(server, "three", 350 * number).status_code == 200


def test_requests_are_answered_after_refusals(server: Process) -> None:
    """omlx 3858 and 2179: a guard that refused everything from then on."""
    for _ in range(3):
        refused = ask(server, "one", 80_000)
        assert refused.status_code == 413
        assert re.search(r"needs at least [\d.]+ MB to be read", refused.text)
        for name in NAMES:
            assert ask(server, name, 100).status_code == 200


def test_unloaded_models_free_their_memory(server: Process) -> None:
    """omlx 1833: a footprint that stayed after the model had gone."""
    for name in NAMES[:2]:
        assert ask(server, name, 100).status_code == 200
    loaded = figure(server, "memory_used_bytes")
    for name in NAMES:
        unload = f"{server.url}/v1/models/{name}/unload"
        httpx.post(unload, json={}, timeout=SOON).raise_for_status()
    assert figure(server, "memory_used_bytes") < 0.5 * loaded
    assert ask(server, "three", 100).status_code == 200


def test_repeated_conversation_is_written_once(server: Process, disk: Path) -> None:
    """MTPLX 144: 7 TB written in a week. Each use of a record is noted in the folder's index."""

    def records_after(requests: int) -> set[tuple[str, int]]:
        """Return names and times of the records once a model that was asked has gone."""
        for _ in range(requests):
            assert ask(server, "one", 800, 9_000).status_code == 200
        unload = f"{server.url}/v1/models/one/unload"
        httpx.post(unload, json={}, timeout=SOON).raise_for_status()
        files = disk.rglob("*.safetensors")
        return {(file.name, file.stat().st_mtime_ns) for file in files}

    before = records_after(0)
    once = records_after(1)
    assert once > before
    process = psutil.Process(server.running.pid)
    written = process.io_counters().write_chars
    assert records_after(5) == once
    assert process.io_counters().write_chars - written < 1_000_000


def test_two_models_that_do_not_fit_together_take_turns(tmp_path: Path) -> None:
    """mlx-lm 1807: above 30 GB for models of 16 and 8."""
    flags = ("--models", str(table(tmp_path)), "--memory-limit", str(ONE_BYTES))
    with serving(*flags) as server, within(server, ONE_BYTES):
        for number in range(6):
            assert ask(server, NAMES[number % 2], 300).status_code == 200
        assert figure(server, "memory_used_bytes") <= ONE_BYTES
