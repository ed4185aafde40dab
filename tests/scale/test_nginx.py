"""examples/nginx.conf with other ports, run by the installed nginx."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from server_processes import STOP_SECONDS, Process, serving, wait_until

CONFIG = Path(__file__).parent.parent.parent / "examples" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
END_OF_ANSWER = 2
"""The embedded model's token."""
ENDLESS = {
    "prompt": "the amber falcon",
    "max_tokens": 400,
    "stream": True,
    "logit_bias": {str(END_OF_ANSWER): -100},
}
KEYS = [f"session {number}" for number in range(12)]

pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx")


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextmanager
def balanced(folder: Path, *ports: int) -> Iterator[str]:
    """Run nginx with the example config for two ports; yield its URL."""
    port = free_port()
    config = CONFIG.read_text()
    for old, new in zip((8080, 8081, 8082), (port, *ports), strict=True):
        assert f"127.0.0.1:{old}" in config
        config = config.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    temporary = "".join(
        f"{kind}_temp_path {folder / kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off; worker_processes 1; pid {folder / 'pid'}; error_log stderr warn;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{config}\n}}\n"
    )
    assert NGINX is not None
    running = subprocess.Popen((NGINX, "-p", str(folder), "-c", str(main)))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: running.poll() is not None or listens(port), 10)
        assert running.poll() is None, "nginx has ended"
        yield url
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(STOP_SECONDS)


def listens(port: int) -> bool:
    with socket.socket() as own:
        return own.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[str, Process, Process]]:
    """Return nginx with two servers."""
    with (
        serving() as first,
        serving() as second,
        balanced(tmp_path, first.port, second.port) as url,
    ):
        yield url, first, second


def ask(url: str, key: str | None, **more: object) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "What is the code of the amber falcon?"}],
        "max_tokens": 2,
        **more,
        **({"prompt_cache_key": key} if key is not None else {}),
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def place(url: str, servers: tuple[Process, ...], key: str | None, **more: object) -> int:
    """Return the number of the server that answers."""
    before = [server.stats()["requests"] for server in servers]
    ask(url, key, **more)
    after = [server.stats()["requests"] for server in servers]
    (which,) = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return which


def test_cache_key_sticks_to_server_until_it_stops(
    two: tuple[str, Process, Process],
) -> None:
    url, first, second = two
    servers = (first, second)
    places = {key: place(url, servers, key) for key in KEYS}
    assert set(places.values()) == {0, 1}
    assert places == {key: place(url, servers, key) for key in KEYS}
    # Neither the length of a body nor what its texts say hides the key at its end.
    padding = 'say "prompt_cache_key": "other" ' * 25_000
    for key in KEYS[:4]:
        assert place(url, servers, key, padding=padding) == places[key]
    # Without a key a client stays together.
    alone = {place(url, servers, None, user=str(i)) for i in range(4)}
    assert len(alone) == 1
    # A text that speaks of a key is none.
    for key in KEYS[:6]:
        talk = [{"role": "user", "content": f'"prompt_cache_key": "{key}"'}]
        assert {place(url, servers, None, messages=talk)} == alone

    first.stop()
    for key in KEYS:
        assert ask(url, key).json()["choices"]
    moved = sum(1 for where in places.values() if where == 0)
    assert moved > 0
    with serving(port=first.port) as again:
        returning = next(key for key, where in places.items() if where == 0)
        wait_until(lambda: place(url, (again, second), returning) == 0, 30)
        assert {key: place(url, (again, second), key) for key in KEYS} == places


def test_draining_server_gets_no_new_requests(two: tuple[str, Process, Process]) -> None:
    """Open streams continue, new requests go to the other server, without errors."""
    url, first, second = two
    places = {key: place(url, (first, second), key) for key in KEYS}
    (key, *_) = [key for key, where in places.items() if where == 0]
    body = {**ENDLESS, "prompt_cache_key": key}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        next(lines)
        first.running.send_signal(signal.SIGTERM)
        for other in KEYS:
            assert ask(url, other).json()["choices"]
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_anthropic_user_id_is_used_as_cache_key(two: tuple[str, Process, Process]) -> None:
    url, first, _ = two

    def where(user: str) -> int:
        before = first.stats()["requests"]
        body = {
            "model": "recall",
            "max_tokens": 1,
            "metadata": {"user_id": user},
            "messages": [{"role": "user", "content": "hi"}],
        }
        answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return 0 if first.stats()["requests"] != before else 1

    places = {key: where(key) for key in KEYS}
    assert set(places.values()) == {0, 1}
    assert places == {key: where(key) for key in KEYS}


def test_tokens_are_streamed_without_buffering(two: tuple[str, Process, Process]) -> None:
    """The first event arrives before the answer ends."""
    url, *_ = two
    came: list[float] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as stream:
        for line in stream.iter_lines():
            if line:
                came.append(time.monotonic())
    took = came[-1] - came[0]
    assert len(came) > 20
    assert took > 0.1
    assert (
        max(b - a for a, b in pairwise(came)) < took / 2
    )  # a proxy that holds back gives all of it at once
