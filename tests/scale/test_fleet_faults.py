"""A fleet under load whose replicas are killed, hang, and drain."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray_fleet import in_ray
from server_processes import wait_until

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.slow,
]

FAULTS = int(os.environ.get("PENSTOCK_FAULTS", "6"))
"""Kills and hangs; PENSTOCK_FAULTS=200 is for a night."""
CLIENTS = 6
TOKENS = 24
WAIT_SECONDS = 600.0
ENDED, BROKEN, WHOLE = "data: [DONE]", "event: error", "whole"
KEYS = '[alice]\nkey = "alice-key"\n[few]\nkey = "few-key"\nrequests_per_minute = 1\n'
OPERATOR = {"x-api-key": "operator-key"}


def ask(url: str, prompt: str, *, stream: bool, tokens: int = TOKENS) -> str:
    """Return how the answer to a request has ended."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    where = f"{url}/v1/completions"
    if not stream:
        answer = httpx.post(where, json=body, headers=OPERATOR, timeout=WAIT_SECONDS)
        right = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == tokens
        return WHOLE if right else f"{answer.status_code} {answer.text}"
    with httpx.stream("POST", where, json=body, headers=OPERATOR, timeout=WAIT_SECONDS) as answer:
        lines = [line for line in answer.iter_lines() if line]
        if answer.status_code == 200 and lines[-1] == ENDED:
            return ENDED
        begun = any('"text"' in line for line in lines)
        return BROKEN if begun and lines[-2] == BROKEN else f"{answer.status_code} {lines}"


class Load:
    """Clients that ask all the time, until it is left."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ends: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            try:
                prompt = f"the amber falcon {number} {turn}"
                self.ends.append(ask(self.url, prompt, stream=number % 2 == 0))
            except Exception as error:  # noqa: BLE001 - counted, and the test fails of it
                self.ends.append(repr(error))
            turn += 1


def replicas(process: Any) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [one for one in children if "ServeReplica:penstock:replica" in " ".join(one.cmdline())]


def ready(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/ready", timeout=WAIT_SECONDS).json()
    return answer


def sample(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", headers=OPERATOR, timeout=WAIT_SECONDS).text
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_unstarted_requests_survive_replica_faults(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS)
    flags = ("--replicas", "2", "--memory-limit", "80MB", "--block-size", "16")
    flags = (*flags, "--drain-timeout", "30", "--keys", str(keys), "--api-key", "operator-key")
    with in_ray(*flags) as (url, process):

        def whole() -> bool:
            state = ready(url)
            return (state["status"], state["replicas"], state["ejected"]) == ("ok", 2, 0)

        wait_until(whole, WAIT_SECONDS)
        check_keys(url, keys, process)
        with Load(url) as load:
            for fault in range(FAULTS):
                wait_until(whole, WAIT_SECONDS)
                count = len(load.ends)
                wait_until(lambda count=count: len(load.ends) > count + CLIENTS, WAIT_SECONDS)
                running = replicas(process)
                victim = running[fault % len(running)]
                victim.send_signal(signal.SIGSTOP if fault % 2 else signal.SIGKILL)
                wait_until(lambda: not whole(), WAIT_SECONDS)
            wait_until(whole, WAIT_SECONDS)
        ends = Counter(load.ends)
        print(FAULTS, "faults:", dict(ends))
        # A stream had begun where a fault broke it; each client has one request at a time.
        assert set(ends) <= {WHOLE, ENDED, BROKEN}, ends
        assert ends[BROKEN] <= FAULTS * CLIENTS
        assert sample(url, "penstock_door_ejections_total") >= FAULTS
        metrics = httpx.get(f"{url}/metrics", headers=OPERATOR, timeout=WAIT_SECONDS).text
        assert len(set(re.findall(r'penstock_engine_up\{replica="(\w+)"\} 1.0', metrics))) == 2
        check_drain(url, process)
    assert process.returncode == 0


def check_keys(url: str, keys: Path, process: Any) -> None:
    """The door counts for all replicas, and reads the file again on SIGHUP."""

    def status(key: str) -> int:
        body = {"prompt": "the amber falcon", "max_tokens": 1}
        headers = {"x-api-key": key}
        where = f"{url}/v1/completions"
        return httpx.post(where, json=body, headers=headers, timeout=WAIT_SECONDS).status_code

    assert [status("few-key"), status("few-key"), status("few-key")] == [200, 429, 429]
    assert [status("alice-key"), status("bob-key")] == [200, 401]
    assert httpx.get(f"{url}/metrics", headers={"x-api-key": "alice-key"}).status_code == 403
    assert sample(url, 'penstock_key_refused_total{key="few"}') == 2
    assert sample(url, 'penstock_key_tokens_total{key="alice"}') > 1
    keys.write_text(KEYS.replace("alice", "bob"))
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: status("bob-key") == 200)
    assert status("alice-key") == 401


def check_drain(url: str, process: Any) -> None:
    """Open answers end, and new requests get the API's 503."""
    ends: list[str] = []

    def run(number: int) -> None:
        ends.append(ask(url, f"falcon {number}", stream=number % 2 == 0, tokens=200))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: ready(url)["open_requests"] == len(threads), WAIT_SECONDS)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: ready(url)["status"] == "draining", WAIT_SECONDS)
    refused = httpx.post(f"{url}/v1/messages", json={}, headers=OPERATOR, timeout=WAIT_SECONDS)
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "overloaded_error"
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert Counter(ends) == {WHOLE: 4, ENDED: 4}
    process.communicate(timeout=WAIT_SECONDS)
