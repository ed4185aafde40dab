"""Two `penstock serve` processes on one store share prefixes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from redis_server import RedisServer

from penstock.engine.offload.conversation_ends import LINGER_SECONDS
from penstock.tiers.record import FORMAT
from penstock_bench.recall import dialogue

SECRET = "open-sesame"
SOON = 60.0
BLOCK, RECORD = 32, 320
"""Tokens of a block, and of a record of blocks."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, requirepass=SECRET)
    yield server
    server.close()


@contextmanager
def started(url: str, log: Path) -> Iterator[str]:
    """Start a server on a free port; yield its URL once it is printed."""
    with log.open("w") as out:
        process = subprocess.Popen(
            (sys.executable, "-m", "penstock", "serve", "--port", "0"),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PENSTOCK_REMOTE_CACHE": url},
        )
    try:
        until = time.monotonic() + SOON
        while (found := re.search(r"http://\S+", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield found[0]
        process.terminate()
        assert process.wait(SOON) == 0
    finally:
        process.kill()
        process.wait(SOON)


def asked(url: str, messages: list[dict[str, str]]) -> tuple[str, float]:
    """Return an answer, and the cached share of the prompt."""
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SOON).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached / usage["prompt_tokens"]


def write(
    store: RedisServer, records: int, url: str, messages: list[dict[str, str]], expected: str
) -> None:
    """Send requests until this number of records is in the store.

    Cheap blocks are written when they are asked for again, the end of a conversation when it has
    lingered.
    """
    until = time.monotonic() + SOON
    while len(store.names()) < records:
        assert asked(url, messages)[0] == expected
        assert time.monotonic() < until
        time.sleep(LINGER_SECONDS + 1.0)


def sample(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=SOON).text
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


def damaged(log: Path) -> list[str]:
    """Return the blocks that a server's log reports as damaged."""
    return re.findall(r"block (\w+) of the remote cache is damaged", log.read_text())


def block_of(name: str) -> str:
    """Return a record's block as it appears in log lines."""
    return Path(name).name[:12]


def flip(raw: bytes) -> bytes:
    return raw[:-100] + bytes([raw[-100] ^ 4]) + raw[-99:]


def another_version(raw: bytes) -> bytes:
    return raw.replace(FORMAT.encode(), b"penstock-block-0")


def test_prompt_of_one_server_is_cached_for_other(store: RedisServer, tmp_path: Path) -> None:
    told = dialogue(7, tokens=1_200, facts=4)
    messages = told.ask(told.questions[0])
    with started(store.url, tmp_path / "a.log") as a, started(store.url, tmp_path / "b.log") as b:
        expected, _ = asked(a, messages)
        tokens = httpx.get(f"{a}/v1/cache/stats").json()["stats"]["held_tokens"]
        records = -(-(tokens // BLOCK) // (RECORD // BLOCK))
        write(store, records, a, messages, expected)
        text, cached = asked(b, messages)
        assert text == expected
        assert cached >= 0.9
        assert sample(b, "penstock_restored_tokens_total") > 0
        assert sample(b, "penstock_remote_up") == 1
        assert sample(b, 'penstock_remote_blocks_total{outcome="read"}') > 0
        assert httpx.get(f"{b}/v1/cache/stats").json()["tiers"]["remote"]["state"] == "on"
        shown = subprocess.run(
            (sys.executable, "-m", "penstock", "top", "--once", "--url", b),
            capture_output=True,
            text=True,
            timeout=SOON,
        )
        assert re.search(r"remote .*blocks read", shown.stdout), shown
        everything = httpx.get(f"{b}/v1/cache/stats").text + httpx.get(f"{b}/metrics").text
        firsts = set()
        for damage in (flip, another_version):
            short = min(store.names(), key=lambda name: len(store.client.get(name)))
            for name in store.names():
                store.client.set(name, damage(store.client.get(name)))
            before = len(damaged(tmp_path / "b.log"))
            httpx.delete(f"{b}/v1/cache", timeout=SOON).raise_for_status()
            assert asked(b, messages) == (expected, 0.0), damage.__name__
            first, *others = damaged(tmp_path / "b.log")[before:]
            firsts.add(first)
            # Records of one size are read together, up to the first that is damaged. The short last
            # one is read by itself, unless the others' fault is known before that begins.
            assert others in ([], [block_of(short)])
            store.client.flushall()
            httpx.delete(f"{b}/v1/cache", timeout=SOON).raise_for_status()
            write(store, records, b, messages, expected)
        assert len(firsts) == 1, "the first record of the prompt, both times"
        lines = damaged(tmp_path / "b.log")
        assert sample(b, 'penstock_remote_blocks_total{outcome="damaged"}') == len(lines)
        httpx.delete(f"{b}/v1/cache", timeout=SOON).raise_for_status()
        text, cached = asked(b, messages)
        assert text == expected and cached >= 0.9
        store.send(signal.SIGKILL)
        httpx.delete(f"{b}/v1/cache", timeout=SOON).raise_for_status()
        assert asked(b, messages) == (expected, 0.0)
        assert sample(b, "penstock_remote_up") == 0
    said = (tmp_path / "a.log").read_text() + (tmp_path / "b.log").read_text()
    assert f"remote   redis://127.0.0.1:{store.port}/0" in said
    assert SECRET not in said + shown.stdout + everything
