"""Requests that made other servers grow, swap or refuse, on models of which the limit holds two.

Written anew from the reports that each test names.
"""

from __future__ import annotations

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
from test_pool_process import LIMIT_BYTES, NAMES, PROCESS_BYTES, resident_bytes, table

FACT = "The code of the amber falcon is 4821."
QUESTION = "What is the code of the amber falcon?"
LONG_WORDS = 1_200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    flags = ("--models", str(table(tmp_path_factory.mktemp("models"))), "--max-queue", "1000")
    with serving(*flags, "--memory-limit", str(LIMIT_BYTES)) as process:
        yield process


@contextmanager
def bounded(server: Process) -> Iterator[None]:
    """Check that the process stays within the limit, and no request is left."""
    ended, most = threading.Event(), [0]
    process = psutil.Process(server.running.pid)
    watching = threading.Thread(target=resident_bytes, args=(process, ended, most))
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    assert 0 < max(most) < LIMIT_BYTES + PROCESS_BYTES
    listed = httpx.get(f"{server.url}/v1/models", timeout=SOON).json()["data"]
    assert not any(model["open_requests"] for model in listed)


def ask(server: Process, model: str, number: int, words: int = LONG_WORDS) -> httpx.Response:
    """Ask a question behind a text that no other number shares."""
    text = " ".join(f"The code of the quiet dolphin is {number}." for _ in range(words // 8))
    messages = [{"role": "system", "content": text}]
    messages.append({"role": "user", "content": f"{FACT} {QUESTION}"})
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=10 * SOON)


def test_seven_long_requests_do_not_add_up(server: Process) -> None:
    """Ollama #16698: 24 GB became 75 in seven requests."""
    with bounded(server):
        assert [ask(server, "one", n).status_code for n in range(1_000, 1_007)] == [200] * 7


def test_prefixes_of_a_model_make_room_for_another(server: Process) -> None:
    """Ollama #18131, MTPLX #144: prefixes in a bound of their own push a machine into swap."""
    with bounded(server):
        for number in range(2_000, 2_008):
            for name in NAMES[:2]:
                assert ask(server, name, number, 400).status_code == 200


def test_models_in_turn_stay_within_one_limit(server: Process) -> None:
    """mlx-lm #1807: two models of 16 and 8 GB took over 30."""
    with bounded(server):
        for number in range(3_000, 3_006):
            assert ask(server, NAMES[number % 3], number).status_code == 200


def test_requests_are_answered_after_one_that_cannot_fit(server: Process) -> None:
    """omlx #3858, #2179: a guard refused everything for 27 hours after one large request."""
    with bounded(server):
        refused = ask(server, "one", 4_000, 100_000)
        assert refused.status_code == 400 and "tokens" in refused.json()["error"]["message"]
        for name in NAMES:
            assert ask(server, name, 4_001, 200).status_code == 200


def test_unloaded_models_leave_no_bytes(server: Process) -> None:
    """omlx #1833: the footprint of what was unloaded still counted."""
    with bounded(server):
        assert ask(server, "one", 5_000).status_code == 200
        for name in NAMES:
            httpx.post(f"{server.url}/v1/models/{name}/unload", json={}, timeout=SOON)
        metrics = httpx.get(f"{server.url}/metrics", timeout=SOON).text
        (weights,) = (
            line
            for line in metrics.splitlines()
            if line.startswith('penstock_memory_used_bytes{kind="weights"')
        )
        assert float(weights.split()[-1]) == 0
        assert ask(server, "two", 5_001).status_code == 200


def test_repeated_conversation_is_written_once(tmp_path: Path) -> None:
    """MTPLX #144: 7 TB were written in a week. The folder's index notes each use of a record."""
    disk = tmp_path / "disk"
    flags = ["--memory-limit", str(LIMIT_BYTES), "--ssd-cache-dir", str(disk)]

    def records_after(requests: int) -> set[tuple[str, int]]:
        """Return names and times of the records once the model that was asked is unloaded."""
        for _ in range(requests):
            assert ask(server, "one", 6_000, 400).status_code == 200
        unload = f"{server.url}/v1/models/one/unload"
        httpx.post(unload, json={}, timeout=SOON).raise_for_status()
        return {(file.name, file.stat().st_mtime_ns) for file in disk.rglob("*.safetensors")}

    with serving("--models", str(table(tmp_path)), *flags) as server:
        written = records_after(1)
        assert written
        process = psutil.Process(server.running.pid)
        before = process.io_counters().write_chars
        assert records_after(5) == written
        assert process.io_counters().write_chars - before < 1_000_000
