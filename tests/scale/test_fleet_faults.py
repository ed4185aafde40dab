"""A fleet under load: replicas are killed, hang, restart and drain."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
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

FAULTS = int(os.environ.get("PENSTOCK_FAULTS", "2"))
"""Faults in all, of the four kinds in turn."""
REPLICAS = 2
CLIENTS = 6
TOKENS, STREAMED_TOKENS = 24, 160
"""Tokens of an answer; streams are longer, so that faults meet them when they have begun."""
WAIT_SECONDS = 300.0
WHOLE, LOST, ENDED, CUT = "whole", "lost", "ended by an error event", "cut"
"""Ends of a request. Lost: an error, or nothing. Cut: a part, and no error event."""
ALL = (WHOLE, LOST, ENDED, CUT)
DONE, ERROR = "data: [DONE]", "event: error"
KEYS = '[alice]\nkey = "alice-key"\n[few]\nkey = "few-key"\nrequests_per_minute = 1\n'
OPERATOR = {"x-api-key": "operator-key"}


def ask(url: str, prompt: str, *, stream: bool, tokens: int) -> tuple[str, str]:
    """Return how a request ended, and the reason if it was lost."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    where, lines = f"{url}/v1/completions", list[str]()
    try:
        with httpx.stream(
            "POST", where, json=body, headers=OPERATOR, timeout=WAIT_SECONDS
        ) as answer:
            lines.append(str(answer.status_code))
            lines += [line for line in answer.iter_lines() if line and not line.startswith(":")]
    except httpx.HTTPError as error:
        lines.append(repr(error))
    if lines[0] == "200" and (lines[-1] == DONE or (not stream and is_whole(lines, tokens))):
        return WHOLE, ""
    if not any('"text"' in line for line in lines):
        return LOST, str(lines)
    return (ENDED, "") if ERROR in lines[-2:] else (CUT, str(lines[-2:]))


def is_whole(lines: list[str], tokens: int) -> bool:
    with suppress(ValueError, LookupError):
        return bool(json.loads("".join(lines[1:]))["usage"]["completion_tokens"] == tokens)
    return False


class Load:
    """Clients that send requests until the block is left."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ends: list[tuple[str, str]] = []
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

    def goes_on(self) -> None:
        """Wait until each client has been answered."""
        count = len(self.ends) + CLIENTS
        wait_until(lambda: len(self.ends) > count, WAIT_SECONDS)

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            prompt, stream = f"the amber falcon {number} {turn}", number % 2 == 0
            tokens = STREAMED_TOKENS if stream else TOKENS
            self.ends.append(ask(self.url, prompt, stream=stream, tokens=tokens))
            turn += 1


def replicas(process: Any) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [one for one in children if "ServeReplica:penstock:replica" in " ".join(one.cmdline())]


def ready(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/ready", timeout=WAIT_SECONDS).json()
    return answer


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", headers=OPERATOR, timeout=WAIT_SECONDS).text


def sample(url: str, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", metrics(url), re.MULTILINE)
    return float(value)


def up(url: str) -> set[str]:
    """Return the names of the replicas that answer."""
    return set(re.findall(r'penstock_replica_up\{replica="(\w+)"\} 1.0', metrics(url)))


class Faults:
    """One fault at a time; each method returns once all replicas answer again."""

    def __init__(self, url: str, process: Any) -> None:
        self.url = url
        self.process = process
        self.seconds: dict[str, list[float]] = {}
        """Time to full strength, by kind of fault."""

    def cause(self, number: int) -> None:
        kinds = (self.restart, self.hang, self.kill, self.pause)
        kind = kinds[number % len(kinds)]
        wait_until(lambda: len(replicas(self.process)) == REPLICAS, WAIT_SECONDS)
        before, began = up(self.url), time.monotonic()
        assert len(before) == REPLICAS
        kind(before, replicas(self.process)[number // len(kinds) % REPLICAS])
        self.seconds.setdefault(kind.__name__, []).append(time.monotonic() - began)

    def kill(self, before: set[str], victim: psutil.Process) -> None:
        victim.kill()
        self._wait_for(lambda now: now != before)

    def hang(self, before: set[str], victim: psutil.Process) -> None:
        victim.send_signal(signal.SIGSTOP)
        self._wait_for(lambda now: now != before)
        assert not victim.is_running(), "its memory, CPUs and GPUs must be free again"

    def pause(self, before: set[str], victim: psutil.Process) -> None:
        victim.send_signal(signal.SIGSTOP)
        wait_until(lambda: len(up(self.url)) < REPLICAS, WAIT_SECONDS)
        victim.send_signal(signal.SIGCONT)
        self._wait_for(lambda now: now == before)

    def restart(self, before: set[str], _: psutil.Process) -> None:
        self.process.send_signal(signal.SIGUSR1)
        self._wait_for(lambda now: not now & before)

    def _wait_for(self, is_so: Callable[[set[str]], bool]) -> None:
        def whole() -> bool:
            now = up(self.url)
            return len(now) == REPLICAS and is_so(now)

        wait_until(whole, WAIT_SECONDS)


def test_unstarted_requests_survive_replica_faults(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS)
    flags = ("--replicas", str(REPLICAS), "--memory-limit", "80MB", "--block-size", "16")
    flags = (*flags, "--drain-timeout", "30", "--keys", str(keys), "--api-key", "operator-key")
    with in_ray(*flags) as (url, process):
        wait_until(lambda: len(up(url)) == REPLICAS, WAIT_SECONDS)
        check_keys(url, keys, process)
        faults = Faults(url, process)
        with Load(url) as load:
            for fault in range(FAULTS):
                load.goes_on()
                faults.cause(fault)
                if FAULTS > 10:
                    print(f"{fault + 1} faults", *report(load, faults), sep="\n", flush=True)
        print(f"{FAULTS} faults", *report(load, faults), sep="\n")
        ends = Counter(end for end, _ in load.ends)
        assert ends[LOST] == ends[CUT] == 0, [what for _, what in load.ends if what]
        # A stream had begun where a fault broke it; each client has one request at a time.
        assert ends[ENDED] <= FAULTS * CLIENTS
        check_drain(url, process)
    assert process.returncode == 0


def report(load: Load, faults: Faults) -> Iterator[str]:
    ends = Counter(end for end, _ in load.ends)
    yield f"{len(load.ends)} requests: " + ", ".join(f"{ends[end]} {end}" for end in ALL)
    for kind, seconds in faults.seconds.items():
        middle, most = statistics.median(seconds), max(seconds)
        yield f"{len(seconds)} x {kind}: full strength after {middle:.0f} s, {most:.0f} s at most"
    for _, what in load.ends:
        if what:
            yield what


def check_keys(url: str, keys: Path, process: Any) -> None:
    """Check that keys are counted across replicas and reloaded on SIGHUP."""

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
    """Check that open answers finish, and new requests get 503."""
    ends: list[str] = []

    def run(number: int) -> None:
        ends.append(ask(url, f"falcon {number}", stream=number % 2 == 0, tokens=200)[0])

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
    assert ends == 8 * [WHOLE]
    process.communicate(timeout=WAIT_SECONDS)
