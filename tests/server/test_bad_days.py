"""Overload, slow clients, disconnects, out of memory and a dead engine.

After each of them nobody hangs, what was asked is answered in the client's own words, and the
ledger is what it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import anthropic
import httpx
import openai
import pytest
from core_parts import wrap_model
from engine_faults import Faulty, decodes, fails, runs_out_of_memory
from patience import SOON
from servers import Running, serving, slow_shutdown, wait_until

from penstock.engine.schedule import fair_shares
from penstock_bench.recall import Dialogue

GOODBYE_SECONDS = 4.0
"""How long a server answers whose engine has died."""
LEAVING = 1_000 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 50
"""Clients of the storm."""
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "model": "recall"}


def endless(running: Running, **more: Any) -> dict[str, Any]:
    """Return a completion request that does not end."""
    ends = {str(token): -100 for token in running.service.tokenizer.eos_token_ids}
    return {"prompt": "Hello", "max_tokens": 20_000, "logit_bias": ends, "stream": True, **more}


@contextmanager
def stream(running: Running, **more: Any) -> Iterator[Iterator[str]]:
    """Start an endless stream; return after its first line."""
    asked = endless(running, **more)
    url = f"{running.url}/v1/completions"
    with httpx.stream("POST", url, json=asked, timeout=SOON) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        yield lines


def post(running: Running, path: str, **more: Any) -> httpx.Response:
    body = {**CHAT, "prompt": "Hello", **more}
    return httpx.post(f"{running.url}{path}", json=body, timeout=SOON)


def kind(answer: httpx.Response) -> str:
    """Return the type of an error in the path's API format."""
    return str(answer.json()["error"]["type"])


def at_rest(running: Running) -> bool:
    """Return whether engine and server have no open request."""
    stats = running.service.engine.stats()
    sequences = stats.waiting + stats.prefilling + stats.running + stats.preempted
    return sequences == 0 and running.service.open_requests == 0


def account(running: Running) -> dict[str, int]:
    """Return the ledger of an idle server with an empty cache."""
    wait_until(lambda: at_rest(running), SOON)
    running.service.engine.clear()
    running.service.engine.check()
    return running.service.engine.stats().by_kind


@contextmanager
def unchanged(running: Running) -> Iterator[None]:
    """Check that the ledger is the same before and after, byte by byte."""
    before = account(running)
    yield
    assert account(running) == before


@pytest.fixture(scope="module")
def busy() -> Iterator[Running]:
    """A server with one slot, which is not shared in turns, and a queue of one."""
    with (
        pytest.MonkeyPatch.context() as patching,
        serving(engine={"max_batch_size": 1, "max_queue": 1}) as running,
    ):
        patching.setattr(fair_shares, "MOST_IN_TURNS", 0)
        yield running


# ---- too much


def test_full_queue_is_429_with_retry_after(busy: Running) -> None:
    with unchanged(busy), ThreadPoolExecutor(1) as pool, stream(busy):
        waiting = pool.submit(post, busy, "/v1/completions")
        wait_until(lambda: busy.service.engine.stats().waiting == 1)
        for path in PATHS:
            refused = post(busy, path)
            assert (refused.status_code, kind(refused)) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
        clients = (
            openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0),
            anthropic.Anthropic(base_url=busy.url, api_key="none", max_retries=0),
        )
        with pytest.raises(openai.RateLimitError):
            clients[0].chat.completions.create(**CHAT)  # type: ignore[call-overload]
        with pytest.raises(anthropic.RateLimitError):
            clients[1].messages.create(**CHAT)  # type: ignore[call-overload]
        for client in clients:
            client.close()
        assert not waiting.done()
        for request in list(busy.service.recent):
            assert request.state in ("waiting", "running", "done", "cancelled")
    assert waiting.result(SOON).status_code == 200  # its turn came when the stream was left


def test_cancelled_request_reports_cached_tokens() -> None:
    prompt = "The code of the amber falcon is seven. " * 20
    with serving() as running:
        post(running, "/v1/completions", prompt=prompt)
        with stream(running, prompt=prompt):
            pass
        wait_until(lambda: at_rest(running), SOON)
        first, second = list(running.service.recent)
        assert (first.state, second.state) == ("done", "cancelled")
        assert first.cached_tokens == 0
        assert second.cached_tokens >= first.prompt_tokens // 64 * 64 > 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_oversized_request_is_400_with_numbers(
    recall_server: Running, path: str, streamed: bool
) -> None:
    text = "7 " * 40_000
    prompts = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    refused = post(recall_server, path, **prompts, max_tokens=2_000_000, stream=streamed)
    assert (refused.status_code, kind(refused)) == (400, "invalid_request_error")
    assert "maximum context length is 32768 tokens" in refused.text
    if path != "/v1/messages":
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_oversized_prompt_is_400(recall_server: Running) -> None:
    refused = post(recall_server, "/v1/completions", prompt=[1] * 100_000)
    assert refused.status_code == 400
    assert "prompt is too long: 100000 tokens > 32767 maximum" in refused.text
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """A server that accepts only small bodies."""
    with serving(max_body_bytes=10_000) as running:
        yield running


def in_pieces(size: int) -> Iterator[bytes]:
    yield b'{"prompt": "'
    for _ in range(size // 1_000):
        yield b"x" * 1_000
    yield b'", "max_tokens": 1}'


@pytest.mark.parametrize("path", [*PATHS, "/v1/cache/explain", "/v1/messages/count_tokens"])
def test_oversized_body_is_413(narrow: Running, path: str) -> None:
    url = f"{narrow.url}{path}"
    headers = {"content-type": "application/json"}
    for content in (b"[" * 10_001, in_pieces(11_000)):  # with its length, and without
        refused = httpx.post(url, content=content, headers=headers, timeout=SOON)
        assert refused.status_code == 413
        assert "10,000 bytes" in refused.json()["error"]["message"]
    if path == "/v1/completions":
        served = httpx.post(url, content=in_pieces(1_000), headers=headers, timeout=SOON)
        assert served.status_code == 200


def test_invalid_content_length_is_413(narrow: Running) -> None:
    for length in (b"99999999", b"9" * 18, b"9" * 40):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length
        assert raw(narrow, head + b"\r\n\r\n").startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def raw(running: Running, sent: bytes) -> bytes:
    """Send bytes and return the response head, or what arrived before the server closed."""
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=SOON) as peer:
        peer.sendall(sent)
        found = b""
        while b"\r\n\r\n" not in found and (part := peer.recv(65_536)):
            found += part
        return found


@pytest.mark.parametrize("path", PATHS)
def test_deeply_nested_json_is_400(recall_server: Running, path: str) -> None:
    for deep in (b"[" * 5_000 + b"]" * 5_000, b'{"a":' * 3_000 + b"1" + b"}" * 3_000, b"[" * 900):
        body = b'{"messages": ' + deep + b', "prompt": ' + deep + b"}"
        headers = {"content-type": "application/json"}
        url = f"{recall_server.url}{path}"
        refused = httpx.post(url, content=body, headers=headers, timeout=SOON)
        assert refused.status_code == 400
        assert "64 nested brackets" in refused.json()["error"]["message"]


def test_brackets_in_strings_do_not_count_as_nesting(recall_server: Running) -> None:
    assert post(recall_server, "/v1/completions", prompt="[{" * 200).status_code == 200


@contextmanager
def prompts_wait(running: Running) -> Iterator[None]:
    """Block the threads that tokenize prompts."""
    go_on = threading.Event()
    for worker in (running.service.workers.short, running.service.workers.long):
        worker.submit(go_on.wait, SOON)
    try:
        yield
    finally:
        go_on.set()


def test_number_of_waiting_prompts_is_bounded(busy: Running) -> None:
    with unchanged(busy), ThreadPoolExecutor(2) as pool:
        with prompts_wait(busy):
            waiting = [pool.submit(post, busy, PATHS[0]) for _ in range(2)]
            wait_until(lambda: busy.service.workers.pending == 2)
            for path in PATHS:
                refused = post(busy, path)
                assert (refused.status_code, kind(refused)) == (429, "rate_limit_error")
                assert int(refused.headers["retry-after"]) >= 1
        assert 200 in [one.result(SOON).status_code for one in waiting]


# ---- too slow


def test_incomplete_body_is_408() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with serving(body_timeout_seconds=0.3) as running:
        assert raw(running, head + b'{"prompt"').startswith(b"HTTP/1.1 408")


@contextmanager
def stalled_reader(running: Running) -> Iterator[None]:
    """Open four endless streams without reading, until socket buffers fill."""
    small = 65_536  # bytes: by itself a socket's buffer grows to megabytes
    running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, small)
    body = json.dumps(endless(running, logprobs=20, n=4)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.connect(("127.0.0.1", running.server.port))
        peer.sendall(head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: running.service.engine.stats().requests == 4, SOON)
        yield


def test_request_of_slow_reader_is_cancelled() -> None:
    """By its unread events, before its connection is closed."""
    with serving(max_unread=50, send_timeout_seconds=300.0) as running, unchanged(running):
        stats = running.service.engine.stats
        with stalled_reader(running):
            handles = [handle for asked in running.service._open for handle in asked.handles]
            wait_until(lambda: stats().running == 0, 2 * SOON)
            assert stats().generated_tokens < 4 * 20_000
            for handle in handles:  # none if it was cancelled already
                assert handle.unread < 1_000  # 50, and what came before the cancel was seen
        wait_until(lambda: at_rest(running), SOON)
        assert post(running, "/v1/completions").status_code == 200


def test_client_that_stops_reading_is_disconnected() -> None:
    """By its connection."""
    with serving(max_unread=1_000_000, send_timeout_seconds=1.0) as running, unchanged(running):
        with stalled_reader(running):
            wait_until(lambda: at_rest(running), 2 * SOON)
            assert running.service.engine.stats().generated_tokens < 4 * 20_000
        assert post(running, "/v1/completions").status_code == 200


def test_client_reading_in_time_is_not_cancelled() -> None:
    """Negative control: as many events, but they are read."""
    with serving(max_unread=150) as running:
        asked = endless(running, max_tokens=500)
        with httpx.stream("POST", f"{running.url}/v1/completions", json=asked) as answer:
            lines = list(answer.iter_lines())
        assert [line for line in lines if line.startswith("data")][-1] == "data: [DONE]"
        assert running.service.recent[-1].completion_tokens == 500


@pytest.fixture(scope="module")
def timing_out_server() -> Iterator[Running]:
    """A server that times out every request at once."""
    with serving(request_timeout_seconds=0.001) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_request_timeout_is_504(timing_out_server: Running, path: str) -> None:
    with unchanged(timing_out_server):
        late = post(timing_out_server, path)
        assert late.status_code == 504
        assert late.headers["x-should-retry"] == "false", "it would take as long again"
        streamed = post(timing_out_server, path, stream=True)
        assert streamed.status_code == 200  # it was sent before the time was over
        assert "event: error" in streamed.text
        assert streamed.text.rstrip().split("\n")[-1].startswith("data: ")


def test_request_timeout_starts_at_arrival() -> None:
    with serving(request_timeout_seconds=0.5) as running, ThreadPoolExecutor(3) as pool:
        for path in PATHS:  # in time, sooner or later: a busy machine may be late
            wait_until(lambda path=path: post(running, path).status_code == 200)
        with prompts_wait(running):
            waiting = [pool.submit(post, running, path) for path in PATHS]
            wait_until(lambda: running.service.workers.pending == 3)
            time.sleep(0.7)
        assert [one.result(SOON).status_code for one in waiting] == [504] * 3


# ---- gone


def test_disconnected_stream_is_cancelled_at_once(recall_server: Running) -> None:
    with unchanged(recall_server):
        with stream(recall_server):
            assert recall_server.service.engine.stats().running == 1
        wait_until(lambda: recall_server.service.engine.stats().running == 0)
        assert recall_server.service.recent[-1].state == "cancelled"


def test_disconnected_request_without_stream_is_cancelled(recall_server: Running) -> None:
    asked = endless(recall_server, stream=False)
    with unchanged(recall_server), pytest.raises(httpx.TimeoutException):
        httpx.post(f"{recall_server.url}/v1/completions", json=asked, timeout=0.5)


def test_disconnect_while_queued_leaves_nothing(busy: Running) -> None:
    with unchanged(busy), stream(busy):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{busy.url}/v1/messages", json=CHAT, timeout=0.3)
        wait_until(lambda: busy.service.engine.stats().waiting == 0)
        assert busy.service.engine.stats().running == 1


async def leave(client: httpx.AsyncClient, asked: dict[str, Any], lines: int) -> None:
    """Start a stream, read a number of lines, and disconnect."""
    if lines == 0:
        with_no_answer = client.post("/v1/completions", json=asked)
        try:
            await asyncio.wait_for(with_no_answer, 0.2)
        except TimeoutError:
            return
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        async for _ in answer.aiter_lines():
            lines -= 1
            if lines <= 0:
                return


async def storm(running: Running, clients: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=300) as client:
        words = ("Hello", "What", "Remember that the code of the amber falcon is 4821. " * 20)
        asked = [
            endless(running, prompt=f"{words[number % 3]} {number}", n=1 + number % 2)
            for number in range(clients)
        ]
        await asyncio.gather(*(leave(client, one, i % 8) for i, one in enumerate(asked)))


def test_many_disconnecting_clients_leave_no_requests() -> None:
    with serving(engine={"max_queue": 4_096}) as running, unchanged(running):
        before = running.service.engine.stats()
        asyncio.run(storm(running, LEAVING))
        wait_until(lambda: at_rest(running), 60)
        after = running.service.engine.stats()
        assert after.requests - before.requests >= LEAVING  # the storm was one
        assert after.finished == after.requests
        assert after.failed == 0
        running.service.engine.check()
        assert post(running, "/v1/messages").status_code == 200


# ---- out of memory, and a model with bugs


@contextmanager
def failing(running: Running, how: Any, times: int, **only: Any) -> Iterator[None]:
    """Let the model fail this number of times."""
    engine = running.service.engine
    faulty = engine._later(lambda core: wrap_model(core, Faulty)).result(SOON)
    faulty.arm(how, times, **only)
    try:
        yield
    finally:
        engine._later(lambda core: wrap_model(core, lambda _: faulty.model)).result(SOON)


@pytest.mark.parametrize("path", PATHS)
def test_out_of_memory_is_503(recall_server: Running, path: str) -> None:
    with unchanged(recall_server):
        with failing(recall_server, runs_out_of_memory, 1_000):
            refused = post(recall_server, path)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "out of memory" in refused.text
        assert post(recall_server, path).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_model_error_is_500_for_its_request_only(recall_server: Running, path: str) -> None:
    with unchanged(recall_server):
        with failing(recall_server, fails, 1):
            refused = post(recall_server, path)
            assert post(recall_server, path).status_code == 200
        assert refused.status_code == 500
        assert "a model's bug" not in refused.text  # what the model says may quote the prompt


@pytest.mark.parametrize("path", PATHS)
def test_error_after_first_byte_ends_stream_with_event(recall_server: Running, path: str) -> None:
    with unchanged(recall_server), failing(recall_server, fails, 1, only=decodes):
        answer = post(recall_server, path, stream=True, max_tokens=50)
        assert answer.status_code == 200
        events = answer.text.strip().split("\n\n")
        assert events[-1].startswith("event: error\n")
        assert [event.startswith("event: error") for event in events].count(True) == 1


def test_clients_raise_stream_error(recall_server: Running) -> None:
    with failing(recall_server, fails, 1, only=decodes):
        theirs = openai.OpenAI(base_url=f"{recall_server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError), theirs:
            list(theirs.chat.completions.create(**CHAT, stream=True))  # type: ignore[call-overload]
    with failing(recall_server, fails, 1, only=decodes):
        ours = anthropic.Anthropic(base_url=recall_server.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.APIError), ours:
            list(ours.messages.create(**CHAT, stream=True))  # type: ignore[call-overload]


def test_snapshots_resume_after_error(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("a quoted prompt")

    def looks() -> Iterator[float]:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))["at_seconds"]

    with serving() as running:
        later = running.service.engine._later
        with httpx.stream("GET", f"{running.url}/v1/live", timeout=SOON) as answer:
            found = looks()
            next(found)
            later(lambda core: setattr(core.view, "stats", fails)).result(SOON)
            wait_until(lambda: "ValueError" in caplog.text)
            later(lambda core: delattr(core.view, "stats")).result(SOON)
            mended = time.time()
            assert any(at > mended for at in found)
    assert "quoted" not in caplog.text


def test_explanation_error_does_not_fail_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lone explain request gets 500; the log names the error class without its text."""

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a quoted prompt")

    with serving() as running:
        later = running.service.engine._later
        later(lambda core: setattr(core.view, "explain", fails)).result(SOON)
        url, asked = f"{running.url}/v1/cache/explain", {"prompt": "Hello"}
        refused = httpx.post(url, json=asked, timeout=SOON)
        assert refused.status_code == 500
        assert {post(running, path).status_code for path in PATHS} == {200}
    assert re.search(r"request \S+ failed: ValueError", caplog.text)
    assert "could not explain the cache hits of a prompt: ValueError" in caplog.text
    assert "quoted" not in refused.text + caplog.text


# ---- dead


class Dies(BaseException):
    """Exception that no handler catches."""


def kill(running: Running) -> None:
    """End the engine's thread as an internal error would."""

    def dies(**how: bool) -> bool:
        raise Dies

    running.service.engine._later(lambda core: setattr(core, "step", dies)).result(SOON)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_thread_death_does_not_hang_requests() -> None:
    def read(lines: Iterator[str]) -> list[str]:
        return list(lines)

    goodbye = slow_shutdown(GOODBYE_SECONDS)
    with goodbye, serving() as running, ThreadPoolExecutor(4) as pool:
        asked = endless(running, stream=False)
        whole = pool.submit(post, running, "/v1/completions", **asked)
        with stream(running) as lines:
            reading = pool.submit(read, lines)
            assert httpx.get(f"{running.url}/health").status_code == 200
            kill(running)
            started = time.monotonic()
            wait_until(lambda: not running.service.alive)
            red = httpx.get(f"{running.url}/health")
            assert (red.status_code, red.json()["status"]) == (503, "dead")
            assert post(running, "/v1/messages").status_code == 503
            assert "event: error" in reading.result(SOON)
            assert whole.result(SOON).status_code == 503
            assert time.monotonic() - started < SOON
        wait_until(lambda: running.server.should_exit)  # by itself
        assert running.server.dead


# ---- real processes: told to stop, or dead

MORTAL = f"""
import ctypes, signal, sys, threading
from penstock.cli import main
from penstock.server import app

app.GOODBYE_SECONDS = {GOODBYE_SECONDS}

class Fault(BaseException):
    pass

def strike(*_):
    for thread in threading.enumerate():
        if thread.name == "penstock-engine":
            ident, fault = ctypes.c_ulong(thread.ident), ctypes.py_object(Fault)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, fault)

signal.signal(signal.SIGUSR1, strike)
sys.exit(main(sys.argv[1:]))
"""
"""The command line, whose engine's thread meets with something that nobody catches at SIGUSR1."""


HANGS = f"""
import signal, sys, threading, time
import penstock.cli
import mlx.nn as nn
from penstock.engine import engine
from penstock.server import app

app.GOODBYE_SECONDS = {GOODBYE_SECONDS}
hangs = threading.Event()

class Embedding(nn.Embedding):
    def __call__(self, tokens):
        if hangs.is_set():
            time.sleep(3_600)
        return super().__call__(tokens)

def hang(*_):
    engine.STEP_SECONDS = 0.5
    hangs.set()

nn.Embedding = Embedding
signal.signal(signal.SIGUSR1, hang)
sys.exit(penstock.cli.main(sys.argv[1:]))
"""
"""The command line, with a model whose first layer never returns from SIGUSR1 on."""


@contextmanager
def process(
    *flags: str, run: tuple[str, ...] = ("-m", "penstock")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `penstock serve` on a free port; its URL is read from the banner."""
    with subprocess.Popen(
        [sys.executable, *run, "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            for line in running.stdout:
                if found := re.search(r" on (http://\S+)$", line):
                    break
            else:
                raise AssertionError(f"no banner: {running.communicate()}")
            yield running, found[1]
        finally:
            running.kill()


@pytest.fixture(scope="module")
def ends(recall_server: Running) -> dict[str, int]:
    """Logit bias that keeps the embedded model generating."""
    return {str(token): -100 for token in recall_server.service.tokenizer.eos_token_ids}


def follow(
    url: str, asked: dict[str, Any], begun: Callable[[], None], path: str = "/v1/completions"
) -> list[str]:
    """Read a stream to its end; signal its first line."""
    with httpx.stream("POST", f"{url}{path}", json=asked, timeout=SOON) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            begun()
    return lines


def test_shutdown_finishes_open_requests_and_refuses_new(ends: dict[str, int]) -> None:
    asked = {"prompt": "Hello", "max_tokens": 600, "logit_bias": ends, "stream": True}
    begun = threading.Event()
    with process() as (running, url), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(follow, url, asked, begun.set)
        assert begun.wait(SOON)
        running.terminate()
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        refused = httpx.post(f"{url}/v1/messages", json=CHAT)
        assert (refused.status_code, kind(refused)) == (503, "overloaded_error")
        lines = reading.result(SOON)
        assert lines[-2:] == ["data: [DONE]", ""]
        assert not any(line.startswith("event: error") for line in lines)
        assert running.wait(SOON) == 0
        assert running.stderr is not None
        shown = running.stderr.read().splitlines()  # a slow start says what it does
        (line,) = [line for line in shown if not re.match("penstock: (loading|measuring) ", line)]
        assert line.startswith("penstock: stopping with 1 answer open: ")


def strike(running: subprocess.Popen[str], url: str) -> None:
    """Kill the engine's thread, again if a pending call received the fault."""
    until = time.monotonic() + SOON
    while (seen := httpx.get(f"{url}/health", timeout=SOON)).status_code == 200:
        assert time.monotonic() < until, "the engine lives"
        running.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert (seen.status_code, seen.json()["status"]) == (503, "dead")


def ended(running: subprocess.Popen[str]) -> str:
    """Return the output of a process whose engine died, once it exited."""
    assert running.wait(SOON) == 1
    assert running.stderr is not None
    told = running.stderr.read()
    assert "Fault" in told and "the engine has died" in told
    return told


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGUSR1")
@pytest.mark.parametrize("draining", [False, True])
def test_process_exits_with_1_when_engine_dies(ends: dict[str, int], draining: bool) -> None:
    asked = {"prompt": "Hello", "max_tokens": 20_000, "logit_bias": ends}
    talk = {"messages": [{"role": "user", "content": "The vault opens at midnight."}]}
    streamed = {**asked, **talk, "stream": True}
    # Anthropic's form has no bias: JSON whose text has no end in sight does not end either.
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    shaped = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    streams = {
        "/v1/completions": streamed,
        "/v1/chat/completions": streamed,
        "/v1/messages": {**talk, **shaped, "model": "a", "max_tokens": 20_000, "stream": True},
    }
    begun = {path: threading.Event() for path in streams}
    mortal = process(run=("-c", MORTAL))
    with mortal as (running, url), ThreadPoolExecutor(4) as pool:
        assert httpx.get(f"{url}/health").status_code == 200
        reading = [
            pool.submit(follow, url, body, begun[path].set, path) for path, body in streams.items()
        ]
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=SOON)
        for event in begun.values():
            assert event.wait(SOON)
        if draining:
            running.terminate()
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        with suppress(httpx.TransportError) if draining else nullcontext():
            strike(running, url)  # a server that drains is gone when all are told
        for one in reading:
            lines = one.result(SOON)
            assert "event: error" in lines
            assert "Fault" not in "".join(lines)
        refused = whole.result(SOON)
        assert refused.status_code == 503
        assert "Fault" not in refused.text
        assert "midnight" not in ended(running)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGUSR1")
def test_process_exits_with_1_when_engine_hangs(ends: dict[str, int]) -> None:
    asked = {"prompt": "Hello", "max_tokens": 20_000, "logit_bias": ends}
    begun = threading.Event()
    with process(run=("-c", HANGS)) as (running, url), ThreadPoolExecutor(2) as pool:
        streamed = {**asked, "stream": True}
        reading = pool.submit(follow, url, streamed, begun.set)
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=asked)
        assert begun.wait(SOON)
        running.send_signal(signal.SIGUSR1)
        assert "event: error" in reading.result(SOON)
        assert whole.result(SOON).status_code == 503
        assert running.wait(SOON) == 1
        assert running.stderr is not None
        told = running.stderr.read()
        assert "hangs in a step" in told and "the engine has died" in told


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGUSR1")
def test_process_exits_with_1_when_idle_engine_dies() -> None:
    with process(run=("-c", MORTAL)) as (running, url):
        strike(running, url)
        ended(running)


def test_conversation_is_correct_after_all_errors(recall_server: Running, told: Dialogue) -> None:
    """The shared server has no wrong KV after these tests."""
    for question in told.questions:
        asked = {"messages": told.ask(question), "max_tokens": 32}
        answer = httpx.post(
            f"{recall_server.url}/v1/chat/completions", json=asked, timeout=SOON
        ).json()
        assert answer["choices"][0]["message"]["content"].strip() == question.answer
