"""Attacks without a key: silent, flooding and slow sockets against a real process.

Real sockets to a real process; its memory and its open files are what the system says of them.
"""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import httpx
import psutil
import pytest
from patience import SOON
from servers import Running, serving, wait_until

from penstock.server.connections import PIECE_BYTES, PIPELINED, SPARE_PLACES, Connection

KEY = "correct-horse-battery-staple"
MEGABYTE = 10**6
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@dataclass(frozen=True)
class Process:
    """A server in a separate process."""

    popen: subprocess.Popen[str]
    port: int

    @property
    def rss(self) -> int:
        """Bytes of its resident memory."""
        return int(psutil.Process(self.popen.pid).memory_info().rss)


@contextmanager
def process(*flags: str, files: tuple[int, int] | None = None) -> Iterator[Process]:
    """Start a server with these open-file limits (soft, hard)."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)

    popen = subprocess.Popen(
        (sys.executable, "-m", "penstock", "serve", "--port", "0", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )
    try:
        assert popen.stdout is not None and popen.stderr is not None
        line = popen.stdout.readline()
        found = re.search(r"http://[^:]+:(\d+)", line)
        assert found, popen.stderr.read()
        yield Process(popen, int(found[1]))
    finally:
        popen.kill()
        popen.communicate()


def connect(port: int, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=SOON)
    made.sendall(sent)
    return made


def read(peer: socket.socket) -> bytes:
    """Return what arrives until the server closes."""
    found = b""
    with suppress(ConnectionError):
        while part := peer.recv(65_536):
            found += part
    return found


def ask(port: int, sent: bytes) -> bytes:
    with connect(port) as peer:
        with suppress(ConnectionError):  # it may have answered and closed before all was sent
            peer.sendall(sent)
        return read(peer)


def healthy(port: int) -> bool:
    return ask(port, HEALTH).startswith(b"HTTP/1.1 200")


def is_open(peer: socket.socket) -> bool:
    """Return whether a silent connection is still open."""
    peer.setblocking(False)
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


# ---- many


@pytest.mark.parametrize("files", [(1_024, 1_024), (512, 4_096)])
def test_idle_connections_leave_room_for_health(
    files: tuple[int, int],
) -> None:
    """Each takes an open file: without a cap none is left to read the machine's memory."""
    with process(files=files) as server, ExitStack() as stack:
        group = [stack.enter_context(connect(server.port)) for _ in range(2_100)]
        until = time.monotonic() + 4.0  # it looks once a second
        while time.monotonic() < until:
            assert healthy(server.port)
            assert server.popen.poll() is None
            time.sleep(0.2)
        open_now = sum(map(is_open, group))
        assert 0 < open_now <= min(1_000, files[1]) + SPARE_PLACES
        assert psutil.Process(server.popen.pid).num_fds() < files[1] - 30


def test_excess_connection_gets_503_or_is_closed() -> None:
    with serving(max_connections=4) as running, ExitStack() as stack:
        port = running.server.port
        for _ in range(4):
            stack.enter_context(connect(port))
        wait_until(lambda: len(running.server.server_state.connections) == 4)
        refused = ask(port, MODELS + b"\r\n")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"4 connections are open" in refused and b"retry-after" in refused
        for path in (b"/health", b"/ready"):
            assert b" 200 " in ask(port, HEALTH.replace(b"/health", path))[:20]
        more = [stack.enter_context(connect(port)) for _ in range(SPARE_PLACES + 10)]
        wait_until(lambda: sum(map(is_open, more)) <= SPARE_PLACES)
        assert healthy(port)
        stack.close()
        wait_until(lambda: not running.server.server_state.connections)
        assert httpx.get(f"{running.url}/v1/models").status_code == 200


def test_lowered_connection_limit_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    with process("--max-connections", "5000", files=(1_024, 1_024)) as server:
        server.popen.terminate()
        _, said = server.popen.communicate(timeout=SOON)
        assert "limiting connections to 704 instead of --max-connections 5000" in said
        assert "1024 files" in said


def test_importing_mlx_lm_does_not_lower_file_limit() -> None:
    """mlx-lm sets the limit to 2,048 of at most 4,096, which fails where not allowed."""
    asked = (
        "import resource; from penstock import open_files; import penstock.models.mlx_lm; "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), open_files.limit())"
    )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # lower once mlx-lm was imported here
    for hard in (600, 5_000 if most == resource.RLIM_INFINITY else min(5_000, most)):

        def limit(hard: int = hard) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))

        told = subprocess.run(
            [sys.executable, "-c", asked], capture_output=True, text=True, preexec_fn=limit
        )
        assert told.stdout.split() == [str(hard)] * 3, told.stderr


# ---- slow


@pytest.fixture(scope="module")
def quick() -> Iterator[Running]:
    """A server with an API key and short timeouts."""
    with serving(
        api_key=KEY,
        head_timeout_seconds=1.0,
        keep_alive_seconds=1,
        body_timeout_seconds=1.0,
        send_timeout_seconds=1.0,
    ) as running:
        yield running


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
SLOW = {
    "silent": (b"", b""),
    "an endless line": (b"GET /", b"a"),
    "slow headers": (MODELS, b"a: b\r\n"),
    "a slow header": (MODELS + b"a: ", b"b"),
    "half a head": (MODELS, b""),
    "empty lines": (b"", b"\r\n"),
    "no body, without the key": (POST + b"Content-Length: 9999\r\n\r\n", b""),
    "a slow body, without the key": (POST + b"Content-Length: 9999\r\n\r\n", b"a"),
    "slow chunks, without the key": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    "a slow trailer": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
    "empty lines after an answer": (HEALTH.replace(b"close", b"keep-alive"), b"\r\n"),
    "half a second request": (HEALTH.replace(b"close", b"keep-alive") + MODELS, b"a: b\r\n"),
}


@pytest.mark.parametrize("name", SLOW)
def test_idle_connections_are_closed(quick: Running, name: str) -> None:
    begin, dribble = SLOW[name]
    with connect(quick.server.port, begin) as peer:
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < SOON:
                peer.sendall(dribble)
                peer.settimeout(0.1)
                try:
                    if not peer.recv(65_536):
                        break
                except TimeoutError:
                    continue
        assert time.monotonic() - began < SOON - 1.0
    wait_until(lambda: not quick.server.server_state.connections)


def test_slow_request_gets_408(quick: Running) -> None:
    assert ask(quick.server.port, MODELS).startswith(b"HTTP/1.1 408")
    assert ask(quick.server.port, b"") == b""
    of_ollama = ask(quick.server.port, MODELS.replace(b"/v1/models", b"/api/tags"))
    assert b'{"error":"the headers did not arrive' in of_ollama


def test_connection_with_unread_response_is_closed(quick: Running) -> None:
    """The rest of the response waits in this process's buffers."""
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        peer.connect(("127.0.0.1", quick.server.port))
        page = b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with suppress(ConnectionError, TimeoutError):
            peer.settimeout(1.0)
            for _ in range(2_000):
                peer.sendall(page)
        wait_until(lambda: not quick.server.server_state.connections, SOON)


def test_connection_is_kept_alive(quick: Running) -> None:
    with httpx.Client(base_url=quick.url) as http:
        for _ in range(3):
            assert http.get("/health").status_code == 200
            time.sleep(0.5)
        assert len(quick.server.server_state.connections) == 1


def test_pipelined_requests_are_all_answered(quick: Running) -> None:
    """More than may wait are parsed when there is room, also those split over packets."""
    for count in (4, PIPELINED + 2, 5_000):
        sent = HEALTH.replace(b"close", b"keep-alive") * (count - 1) + HEALTH
        assert ask(quick.server.port, sent).count(b"HTTP/1.1 200") == count
    wait_until(lambda: not quick.server.server_state.connections)


def test_pipelining_is_bounded(quick: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    answered = Connection.on_response_complete

    def noted(self: Connection) -> None:
        waiting.append(len(self.pipeline))
        answered(self)

    monkeypatch.setattr(Connection, "on_response_complete", noted)
    short = b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    ask(quick.server.port, HEALTH.replace(b"close", b"keep-alive") * 500 + short + HEALTH)
    assert len(waiting) > 500 and PIPELINED <= max(waiting) <= PIPELINED + PIECE_BYTES // 18


# ---- large


def endless(port: int, begin: bytes, piece: bytes, most_bytes: int = 96 * MEGABYTE) -> int:
    """Send a head without end; return the number of bytes accepted."""
    taken = 0
    with connect(port, begin) as peer, suppress(ConnectionError):
        while taken < most_bytes:
            taken += peer.send(piece)
    return taken


@pytest.fixture(scope="module")
def alone() -> Iterator[Process]:
    with process("--api-key", KEY) as made:
        yield made


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = {
    "one header": (MODELS + b"x: ", b"a" * 65_536),
    "many headers": (MODELS, b"a: b\r\n" * 10_000),
    "empty headers": (MODELS, b"a:\r\n" * 16_384),
    "a name of a header": (MODELS, b"a" * 65_536),
    "an address": (b"GET /", b"a" * 65_536),
    "empty lines": (b"", b"\r\n" * 32_768),
    "a trailer": (CHUNKED + b"0\r\nx: ", b"a" * 65_536),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000),
    "the size of a chunk": (CHUNKED + b"1;x=", b"a" * 65_536),
}


@pytest.mark.parametrize("name", LARGE)
def test_oversized_request_heads_take_no_memory(alone: Process, name: str) -> None:
    assert healthy(alone.port)
    before = alone.rss
    taken = endless(alone.port, *LARGE[name])
    assert alone.rss - before < 4 * MEGABYTE
    assert taken < 16 * MEGABYTE, "what the system holds between two sockets is taken as well"
    assert healthy(alone.port)


def test_many_incomplete_request_heads_take_little_memory(alone: Process) -> None:
    """Each connection may hold its maximum; the total is bounded too."""
    head = MODELS + b"x: " + b"a" * 60_000
    with ExitStack() as stack:
        before = alone.rss
        for _ in range(300):
            stack.enter_context(connect(alone.port, head))
        assert healthy(alone.port)
        assert alone.rss - before < 300 * 3 * 65_536


@pytest.mark.parametrize(("size", "status"), [(60_000, 401), (70_000, 431)])
def test_too_large_request_head_is_refused(alone: Process, size: int, status: int) -> None:
    head = MODELS + b"Connection: close\r\nx: " + b"a" * size + b"\r\n\r\n"
    assert ask(alone.port, head).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(("fields", "status"), [(250, 401), (300, 431)])
def test_many_headers_are_refused(alone: Process, fields: int, status: int) -> None:
    head = MODELS + b"Connection: close\r\n" + b"a: b\r\n" * fields + b"\r\n"
    assert ask(alone.port, head).startswith(f"HTTP/1.1 {status} ".encode())


def test_malformed_request_is_refused_in_json(alone: Process) -> None:
    found = ask(alone.port, b"\x16\x03\x01 nonsense\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400") and b'"error"' in found


def test_upgrade_is_ignored(alone: Process) -> None:
    for what in (b"websocket", b"h2c"):
        asked = HEALTH.replace(b"close", b"Upgrade\r\nUpgrade: " + what)
        assert ask(alone.port, asked).startswith(b"HTTP/1.1 200")


# ---- after all of it


def test_default_timeouts_close_connections(alone: Process) -> None:
    """Silent, half a head, half a body, and idle after a response."""
    begun = {
        "silent": (b"", 10.0),
        "half a head": (MODELS, 10.0),
        "half a body": (POST + b"Content-Length: 10\r\n\r\n", 6.0),
        "idle": (HEALTH.replace(b"close", b"keep-alive"), 6.0),
    }
    with ExitStack() as stack:
        group = {
            name: stack.enter_context(connect(alone.port, sent))
            for name, (sent, _) in begun.items()
        }
        began = time.monotonic()
        for name, (_, seconds) in sorted(begun.items(), key=lambda item: item[1][1]):
            group[name].settimeout(SOON)
            read(group[name])
            assert seconds - 1.0 < time.monotonic() - began < seconds + SOON / 2, name
