"""Several models in a separate process: many requests within a limit, and a kill during loading.

`make soak` sends 500 requests.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from patience import SOON
from server_processes import serving

from penstock.recall import MODEL_PATH

REQUESTS = int(os.environ.get("PENSTOCK_POOL_REQUESTS", "40"))
LIMIT_BYTES = 85_000_000
"""Limit that holds two of three models."""
PROCESS_BYTES = 150_000_000
"""Bytes of a process beside its limit: Python, its libraries, and their code."""
NAMES = ("one", "two", "three")
FACTS = {"falcon": "4821", "otter": "1377", "heron": "9052"}
QUESTION = {"type": "noul", "instructions": "Is it a bird?"}


def table(tmp_path: Path) -> Path:
    file = tmp_path / "models.toml"
    blocks = [
        f'[[model]]\npath = "{MODEL_PATH}"\nname = "{name}"\nmax-kv-size = 4096\n' for name in NAMES
    ]
    file.write_text("\n".join(blocks))
    return file


def request(number: int) -> tuple[str, dict[str, Any], str]:
    """Return path and body of a request, and its expected text."""
    draw = random.Random(number)
    model, animal = draw.choice(NAMES), draw.choice(list(FACTS))
    told = f"The code of the amber {animal} is {FACTS[animal]}."
    text = f"{told} What is the code of the amber {animal}?"
    asked = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": model, "max_tokens": 8}
    kind = draw.choice(("chat", "stream", "messages", "ollama", "decision"))
    if kind == "messages":
        return "/v1/messages", {**body, "messages": asked}, FACTS[animal]
    if kind == "ollama":
        return "/api/chat", {"model": model, "messages": asked, "stream": False}, FACTS[animal]
    if kind == "decision":
        decision = {"model": model, "state": text, "questions": {"bird": QUESTION}}
        return "/v1/systemone", decision, "bird"
    return "/v1/chat/completions", {**body, "messages": asked, "stream": kind == "stream"}, "data"


def resident_bytes(process: psutil.Process, ended: threading.Event, most: list[int]) -> None:
    while not ended.wait(0.05):
        most.append(process.memory_info().rss)


def test_requests_of_many_models_succeed_with_room_for_two(tmp_path: Path) -> None:
    flags = ("--models", str(table(tmp_path)), "--memory-limit", str(LIMIT_BYTES))
    with serving(*flags, "--max-queue", "1000") as server:
        process, ended, most = psutil.Process(server.running.pid), threading.Event(), [0]
        watching = threading.Thread(target=resident_bytes, args=(process, ended, most))
        watching.start()

        def ask(number: int) -> tuple[int, str, str]:
            path, body, wanted = request(number)
            answered = httpx.post(server.url + path, json=body, timeout=10 * SOON)
            return answered.status_code, answered.text, wanted

        with ThreadPoolExecutor(8) as workers:
            answers = list(workers.map(ask, range(REQUESTS)))
        ended.set()
        watching.join()
        wrong = [text for status, text, wanted in answers if status != 200]
        assert not wrong, wrong[:3]
        texts = [text for _, text, wanted in answers if wanted not in text and wanted != "data"]
        assert not texts, texts[:3]
        assert max(most) < LIMIT_BYTES + PROCESS_BYTES
        listed = httpx.get(f"{server.url}/v1/models", timeout=SOON).json()["data"]
        assert sum(model["state"] == "loaded" for model in listed) <= 2
        assert not any(model["open_requests"] for model in listed)


def test_kill_during_load_leaves_no_child_processes(tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    command = (sys.executable, "-m", "penstock", "serve", "--port", "0")
    flags = ("--models", str(table(tmp_path)), "--memory-limit", str(LIMIT_BYTES))
    for seconds in (0.5, 1.0, 1.5):
        with subprocess.Popen(
            (*command, *flags),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(place)},
        ) as server:
            time.sleep(seconds)
            children = psutil.Process(server.pid).children(recursive=True)
            server.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, SOON)
        assert not alive
