"""Random hostile bodies for a server, for a while; its memory and its answers must hold.

    python tools/hostile.py --minutes 60

A server of the embedded model gets bodies that are too large, too deep, too many, half sent or half
true. Several senders work at once, each a process of its own, because making such bodies takes
longer than reading them. Beside them a client asks a short question again and again. It exits with
1 unless all of this holds:

- The server's resident memory stays below its memory limit and 150 MB, sampled ten times a second.
- The short question takes at most two seconds longer than it does without the others.
- The server still answers in the end, and no answer was 500.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import psutil
import typer

MEGABYTE = 1_000_000
LIMIT_BYTES = 400 * MEGABYTE
SPARE_BYTES = 150 * MEGABYTE
"""Resident bytes above the memory limit that are allowed: Python, MLX and libraries themselves."""
LATE_SECONDS = 2.0
"""Seconds that a short answer may take longer than alone."""
SENDERS = 4
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SHORT = {"prompt": "The code", "max_tokens": 1}


@dataclass
class Seen:
    """Results of a run. Two threads write to it, each its own figure."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Ends of hostile requests."""
    short_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


# ---- hostile bodies


def long_text(random: Random) -> bytes:
    """Return a body with a text of up to 15 MB, in one of several scripts."""
    unit = random.choice(["a", "word ", "\n", "0123 ", "é", "🦫", "\\u0000", " ", "x\n\n"])
    return _prompt(unit * (random.choice([10_000, 300_000, 5_000_000, 15_000_000]) // len(unit)))


def many_messages(random: Random) -> bytes:
    """Return a conversation of many short messages."""
    count = random.choice([100, 16_384, 100_000])
    roles = ("user", "assistant", "system", "tool", "developer")
    messages = [{"role": random.choice(roles), "content": "x"} for _ in range(count)]
    return _json({"model": "any", "max_tokens": 1, "messages": messages, "input": messages})


def many_prompts(random: Random) -> bytes:
    """Return many prompts, as texts or as tokens."""
    one: object = random.choice(["x", [1, 2, 3], 7, ["x"]])
    return _json({"prompt": [one] * random.choice([200, 100_000, 1_000_000]), "max_tokens": 1})


def deep(random: Random) -> bytes:
    """Return brackets within brackets."""
    depth = random.choice([50, 1_000, 1_000_000])
    return b'{"messages": ' + b"[" * depth + b"]" * random.choice([0, depth]) + b"}"


def schemas(random: Random) -> bytes:
    """Return a schema that is circular, huge, or has a costly pattern."""
    wide = {f"p{n}": {"type": "string"} for n in range(random.choice([10, 400, 5_000]))}
    schema = random.choice(
        [
            {"$ref": "#"},
            {"type": "object", "properties": wide},
            {"type": "string", "pattern": "(a+)+" * 20 + "$"},
            {"type": "array", "minItems": 100_000, "items": {"$ref": "#"}},
            {"anyOf": [{"const": "x" * n} for n in range(1, 300)]},
        ]
    )
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    more = {"response_format": form} if random.random() < 0.5 else {"tools": [tool]}
    return _json({**body, **more, "tool_choice": "required" if "tools" in more else None})


def numbers(random: Random) -> bytes:
    """Return numbers that are too large, too small, or none."""
    huge = random.choice(["1e999", "-1", "9" * 5_000, "NaN", "0.1", "null", "true", "[]"])
    name = random.choice(["max_tokens", "n", "seed", "top_k", "temperature", "logprobs"])
    return f'{{"prompt": "x", "messages": [], "max_tokens": 2, "{name}": {huge}}}'.encode()


def long_answers(random: Random) -> bytes:
    """Ask for more than there is room for; answers that are right to run would be a queue."""
    body = {"prompt": "x", "max_tokens": random.choice([64, 10**6, 2**31 - 1])}
    return _json({**body, "n": random.choice([1, 129, 10**6]), "stream": random.random() < 0.5})


def rubbish(random: Random) -> bytes:
    """Return bytes that are no JSON."""
    return random.randbytes(random.choice([0, 10, 100_000, 5_000_000]))


BODIES: tuple[Callable[[Random], bytes], ...] = (
    *(long_text, many_messages, many_prompts, deep, schemas, numbers, long_answers, rubbish),
)


def _prompt(text: str) -> bytes:
    message = {"role": "user", "content": text}
    body = {"model": "any", "max_tokens": 2, "prompt": text, "input": text, "messages": [message]}
    kept = ("prompt", "messages", "input")[len(text) % 3]
    return _json({name: body[name] for name in ("model", "max_tokens", kept)})


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


# ---- senders


def attack(url: str, seed: int, until: float) -> Counter[str]:
    """Send hostile bodies until the time is over; return how they ended.

    Some are cut off, some clients leave early.
    """
    os.nice(10)  # senders would be other machines: they give way to the server
    random, statuses = Random(seed), Counter[str]()
    address = urlsplit(url)
    with httpx.Client(base_url=url, timeout=20.0, trust_env=False) as http:
        while time.monotonic() < until:
            body, path = random.choice(BODIES)(random), random.choice(PATHS)
            if random.random() < 0.1:
                _half(address.hostname or "", address.port or 0, path, body)
                statuses["half"] += 1
                continue
            headers = {"content-type": "application/json"}
            patience = random.choice([0.2, 20.0])
            try:
                answer = http.post(path, content=body, headers=headers, timeout=patience)
                statuses[str(answer.status_code)] += 1
            except httpx.TimeoutException:
                statuses["left"] += 1
            except httpx.TransportError as error:
                statuses[type(error).__name__] += 1
    return statuses


def _half(host: str, port: int, path: str, body: bytes) -> None:
    """Send a half of a body, and leave."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, port), 10.0) as connection:
        connection.settimeout(5.0)
        try:
            size = f"Content-Length: {len(body) + 1}\r\n\r\n"
            connection.sendall((head + size).encode() + body[: len(body) // 2])
        except OSError:  # the server has closed it, which is its right
            return


def ask_short(url: str, until: float, seen: Seen) -> None:
    """Ask a short question once a second, and note how long its answer takes."""
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        while time.monotonic() < until:
            seen.short_seconds.append(short_seconds(http))
            time.sleep(1.0)


def short_seconds(http: httpx.Client) -> float:
    """Return the seconds until the short question is answered, or refused for want of a place."""
    began = time.monotonic()
    while True:
        answer = http.post("/v1/completions", json=SHORT)
        if answer.status_code == 200:
            return time.monotonic() - began
        if answer.status_code not in (429, 503):
            raise SystemExit(f"a short question was answered with {answer.status_code}")
        time.sleep(0.1)


def watch(process: psutil.Process, until: float, seen: Seen) -> None:
    """Note the largest resident memory."""
    while time.monotonic() < until and process.is_running():
        seen.peak_bytes = max(seen.peak_bytes, process.memory_info().rss)
        time.sleep(0.1)


# ---- the run


def main(
    minutes: Annotated[float, typer.Option(help="Minutes of hostile bodies.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the bodies.")] = 0,
) -> None:
    """Send random hostile bodies to a server; see that its memory and its answers hold."""
    flags = ("--port", "0", "--memory-limit", f"{LIMIT_BYTES // MEGABYTE}MB", "--max-tokens", "64")
    with subprocess.Popen(
        (sys.executable, "-m", "penstock", "serve", *flags), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            failures = _run(server, minutes * 60.0, seed)
        finally:
            server.send_signal(signal.SIGKILL)
    for failure in failures:
        print(f"failed: {failure}")
    sys.exit(1 if failures else 0)


def _run(server: subprocess.Popen[str], seconds: float, seed: int) -> list[str]:
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    if found is None:
        return ["the server did not start"]
    threading.Thread(target=server.stdout.read, daemon=True).start()
    url, seen = found[0], Seen()
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        alone = sorted(short_seconds(http) for _ in range(10))[-1]
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=watch, args=(psutil.Process(server.pid), until, seen)),
            threading.Thread(target=ask_short, args=(url, until, seen)),
        ]
        for thread in threads:
            thread.start()
        with ProcessPoolExecutor(SENDERS, mp_context=get_context("spawn")) as senders:
            seeds = [seed * SENDERS + number for number in range(SENDERS)]
            for statuses in senders.map(attack, [url] * SENDERS, seeds, [until] * SENDERS):
                seen.statuses += statuses
        for thread in threads:
            thread.join()
        short_seconds(http)
    return _judge(seen, alone)


def _judge(seen: Seen, alone: float) -> list[str]:
    """Print the figures; return the failures."""
    most = LIMIT_BYTES + SPARE_BYTES
    waits = sorted(seen.short_seconds)
    slowest = waits[-1] if waits else float("inf")
    print(f"hostile requests: {dict(seen.statuses)} on {os.cpu_count()} processors")
    print(f"resident at most {seen.peak_bytes / 1e6:.0f} MB of {most / 1e6:.0f} MB allowed")
    late = sum(wait > alone + LATE_SECONDS for wait in waits)
    middle = waits[len(waits) // 2] if waits else 0.0
    print(
        f"short answers: {len(waits)}, alone {alone:.2f} s, median {middle:.2f} s, slowest "
        f"{slowest:.2f} s, {late} late"
    )
    failures = []
    if seen.peak_bytes > most:
        failures.append(f"{seen.peak_bytes / 1e6:.0f} MB were resident")
    if late or not waits:
        failures.append(f"{late} of {len(waits)} short answers were late")
    if seen.statuses["500"]:
        failures.append(f"{seen.statuses['500']} answers were 500")
    return failures


if __name__ == "__main__":
    typer.run(main)
