"""A short request does not wait for a large one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from servers import Running, serving, wait_until

from penstock.engine.schedule import fair_shares

LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 1, "stream": True}
HELLO = [{"role": "user", "content": "hi"}]
LARGE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "n": 128, **LONG},
    "/v1/completions": {"prompt": [f"Number {number} is" for number in range(128)], **LONG},
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("path", LARGE)
def test_short_request_does_not_wait_for_large_one(running: Running, path: str) -> None:
    engine = running.service.engine
    with (
        ThreadPoolExecutor(1) as other,
        httpx.Client(base_url=running.url, timeout=60) as client,
        client.stream("POST", path, json=LARGE[path]) as large,
    ):
        assert large.status_code == 200
        wait_until(lambda: engine.stats().running == 8)
        short = {"messages": HELLO, "max_tokens": 2}
        answer = other.submit(httpx.post, f"{running.url}/v1/chat/completions", json=short)
        assert answer.result(60).status_code == 200
        stats = engine.stats()
        assert stats.waiting > 100, "it waited for the answers of the other"
        assert running.service.open_requests == 1
    wait_until(lambda: engine.ask(lambda view: view.idle).result())


def ask_from(address: str, url: str, **more: Any) -> httpx.Response:
    """Send a request from another local address, which is another client."""
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(transport=transport, timeout=60) as client:
        body = {"messages": HELLO, "max_tokens": 2, **more}
        return client.post(f"{url}/v1/chat/completions", json=body)


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine on Linux alone")
def test_client_filling_queue_leaves_room_for_others() -> None:
    with (
        pytest.MonkeyPatch.context() as patching,
        serving(engine={"max_batch_size": 1, "max_queue": 4}) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        patching.setattr(fair_shares, "MOST_IN_TURNS", 0)
        engine = running.service.engine
        with httpx.stream(
            "POST", f"{running.url}/v1/chat/completions", json={"messages": HELLO, **LONG}
        ):
            wait_until(lambda: engine.stats().running == 1)
            waiting = []
            for count in range(4):
                waiting.append(pool.submit(ask_from, "127.0.0.1", running.url))
                wait_until(lambda: engine.stats().waiting == count + 1)  # noqa: B023
            refused = ask_from("127.0.0.1", running.url)
            assert refused.status_code == 429
            other = pool.submit(ask_from, "127.0.0.2", running.url)
            displaced = waiting[-1].result(60)
            assert (displaced.status_code, displaced.json()["error"]["code"]) == (429, "queue_full")
            assert int(displaced.headers["retry-after"]) >= 1
            text = httpx.get(f"{running.url}/metrics").text
            assert "penstock_waiting_clients 2.0" in text
            assert "penstock_waiting_most_of_a_client 3.0" in text
            assert "127.0.0" not in text
        statuses = [answer.result(60).status_code for answer in (*waiting[:-1], other)]
        assert statuses == [200] * 4


def test_prompts_of_one_request_share_client_and_group(running: Running) -> None:
    engine = running.service.engine
    with httpx.stream("POST", f"{running.url}/v1/completions", json=LARGE["/v1/completions"]):
        wait_until(lambda: engine.stats().running == 8)
        (answering,) = running.service._open
        requests = [handle.request for handle in answering.handles]
        assert {(request.client, request.group) for request in requests} == {
            ("127.0.0.1", answering.recent.id)
        }
