"""Large request bodies stay within a memory pool and delay no other request."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from parrot import parrot
from patience import SOON
from pydantic import ValidationError
from servers import Running, serving, wait_until

from penstock.ledger import Kind
from penstock.server.openai.openai_forms import ChatRequest
from penstock.server.problems import Unavailable
from penstock.server.prompt_memory import PromptHold, PromptMemory

COMPLETIONS = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory was taken")


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server with a context of 32,768 tokens of at most 13 bytes."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def wide() -> Iterator[Running]:
    """A server with memory for millions of tokens that ignores the model's context length."""
    with serving(engine={"memory_limit": "3GB"}, ignore_model_context=True) as running:
        yield running


def post(running: Running, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(running.url + COMPLETIONS, content=content, headers=HEADERS, timeout=SOON)


def taken_bytes(act: Callable[[], object]) -> int:
    """Return the peak of this process's memory above the start during a call."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024


HOSTILE = {
    "lists": b'{"prompt":"a","x":[' + b"[]," * 3_300_000 + b"[]]}",
    "objects": b'{"prompt":"a","x":[' + b"{}," * 3_300_000 + b"{}]}",
    "numbers": b'{"prompt":[' + b"999," * 2_500_000 + b"1]}",
    "words": b'{"prompt":"' + b"a b " * 2_500_000 + b'"}',
    "wide": '{"prompt":"🦫'.encode() + b"a" * 10_000_000 + b'"}',
}


@linux
@pytest.mark.parametrize("name", HOSTILE)
def test_oversized_body_is_refused_before_reading(small: Running, name: str) -> None:
    def refused() -> None:
        answer = post(small, HOSTILE[name])
        assert answer.status_code == 413, answer.text
        assert "for all prompts" in answer.text

    assert taken_bytes(refused) < 100_000_000  # its bytes, here and in the client, and copies
    assert small.service.memory.used_bytes == 0


@linux
def test_oversized_prompt_is_not_tokenized(small: Running) -> None:
    """32,768 tokens of at most 13 bytes are less than half a million."""
    text = "aaaaaaa bbbb ccccc\n" * 60_000

    def refused() -> None:
        answer = post(small, {"prompt": text})
        assert answer.status_code == 400, answer.text
        (tokens,) = re.findall(r"prompt is too long: (\d+) tokens > 32767 maximum", answer.text)
        assert int(tokens) > 32_768 and "maximum context length is 32768 tokens" in answer.text

    assert taken_bytes(refused) < 60_000_000


def test_very_long_line_without_split_points_is_413(small: Running) -> None:
    """A line of usual length is tokenized; a longer one needs memory."""
    read = post(small, {"prompt": "a" * 120_000, "max_tokens": 1})
    assert read.status_code == 400 and "prompt is too long: 120000 tokens" in read.text
    refused = post(small, {"prompt": "a" * 400_000, "max_tokens": 1})
    assert refused.status_code == 413 and "for all prompts" in refused.text


def test_concurrent_bodies_stay_within_prompt_memory(small: Running) -> None:
    """Excess requests get 503; the pool is empty afterwards, and counted in the ledger."""
    memory = small.service.memory
    stats = small.service.engine.stats()
    assert stats.by_kind[Kind.PROMPTS.value] == memory.pool_bytes > 0
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 1_200_000}).encode()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: post(small, body), range(24)))
    codes = {answer.status_code for answer in answers}
    assert 200 in codes and codes <= {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert (
                answer.json()["error"]["code"] == "prompts_full" and "retry-after" in answer.headers
            )
    wait_until(lambda: memory.used_bytes == 0)


def filled(memory: PromptMemory, client: str, nbytes: int) -> list[PromptHold]:
    """Hold `nbytes` for each request of a client until one is refused."""
    holds: list[PromptHold] = []
    with pytest.raises(Unavailable, match="for this client"):
        while True:
            hold = memory.hold(client)
            hold.resize(nbytes)
            holds.append(hold)
    return holds


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_requests_of_one_client_leave_room_for_others(clients: int) -> None:
    memory = PromptMemory(1_000_000)
    holds = [hold for name in range(clients) for hold in filled(memory, f"{name}", 10_000)]
    free = memory.pool_bytes - memory.used_bytes
    assert (
        memory.pool_bytes // 4**clients - 10_000 <= free <= memory.pool_bytes // 4**clients + 20_000
    )
    memory.hold("another").resize(free)
    for hold in holds:
        hold.resize(0)
    assert memory.used_bytes == free


def test_single_request_may_take_all_free_memory() -> None:
    memory = PromptMemory(1_000_000)
    memory.hold("a").resize(900_000)
    memory.hold("b").resize(10_000)
    large = memory.hold("b")
    large.resize(90_000)
    with pytest.raises(Unavailable):
        large.resize(90_001)


@linux
def test_client_filling_prompt_memory_is_503_but_others_succeed(small: Running) -> None:
    holds = filled(small.service.memory, "127.0.0.1", 400_000)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 200_000}).encode()
    refused = post(small, body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "prompts_full"
    other = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(transport=other, timeout=SOON) as client:
        answer = client.post(small.url + COMPLETIONS, content=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    for hold in holds:
        hold.resize(0)


def long_prompt(megabytes: int) -> dict[str, Any]:
    line = "cedar 17 river, walnut: 4 of them\n"
    return {"prompt": line * (megabytes * 1_000_000 // len(line)), "max_tokens": 1}


def test_short_prompt_overtakes_long_one(wide: Running) -> None:
    started = threading.Event()

    def read_long() -> httpx.Response:
        started.set()
        return post(wide, long_prompt(8))

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(read_long)
        started.wait()
        wait_until(lambda: wide.service.workers.pending == 1)
        began = time.monotonic()
        answers = 0
        while not long.done() and answers < 3:
            assert post(wide, {"prompt": "a b", "max_tokens": 1}).status_code == 200
            answers += 1
        took = time.monotonic() - began
        passed = not long.done()
        long.cancel()
        wide.service.cancel_all()
        assert answers == 3 and passed, f"{answers} short prompts took {took:.1f} s"


def test_tokenization_stops_when_client_disconnects(wide: Running) -> None:
    body = json.dumps(long_prompt(8)).encode()
    host, port = wide.url.removeprefix("http://").split(":")
    wait_until(lambda: wide.service.workers.pending == 0, SOON)
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: wide.service.workers.pending == 1, SOON)
        reading = wide.service.prompts._pieces
        time.sleep(0.3)
        assert wide.service.workers.pending == 1, "it was read too soon to tell"
    wait_until(lambda: wide.service.workers.pending == 0, SOON)
    idle = wide.service.workers.long.submit(lambda: None)
    began = time.process_time()  # of all threads here, whatever else the machine does
    idle.result(SOON)
    assert time.process_time() - began < 1.0, "the thread went on reading"
    assert reading.can_cut
    wait_until(lambda: wide.service.memory.used_bytes == 0)


@pytest.mark.parametrize("ignored", [False, True])
def test_model_context_is_enforced(tmp_path: Path, ignored: bool) -> None:
    """The last token is for the answer; --ignore-model-context allows more."""
    model, tokenizer = parrot(tmp_path, "hello", context=64)
    with serving(model, tokenizer, ignore_model_context=ignored) as running:
        answers = [
            post(running, {"prompt": [5] * tokens, "max_tokens": 1}) for tokens in (63, 64, 65)
        ]
    assert [answer.status_code for answer in answers] == [200, *(200 if ignored else 400,) * 2]
    if not ignored:
        error = answers[1].json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "prompt is too long: 64 tokens > 63 maximum" in error["message"]


def test_answer_ends_at_context_length(tmp_path: Path) -> None:
    model, tokenizer = parrot(tmp_path, "hello", context=64)
    with serving(model, tokenizer) as running:
        answer = post(running, {"prompt": [5] * 60, "max_tokens": 40, "logit_bias": {"5": 100}})
        clamped = post(running, {"prompt": [5], "max_tokens": 32_000, "logit_bias": {"5": 100}})
    for one in (answer, clamped):
        assert one.status_code == 200
        assert one.json()["usage"]["total_tokens"] == 64
        assert one.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("context", "engine", "max_tokens", "total"),
    [
        (64, {}, None, 64),
        (64, {}, 20, 24),
        (1_000_000, {"max_kv_size": 640}, None, 640),
    ],
)
def test_default_max_tokens_fill_context(
    tmp_path: Path, context: int, engine: dict[str, Any], max_tokens: int | None, total: int
) -> None:
    """The model's context or the window; `--max-tokens` is less."""
    model, tokenizer = parrot(tmp_path, "hello", context=context)
    with serving(model, tokenizer, engine=engine, max_tokens=max_tokens) as running:
        for prompt in (4, 60):
            body = {"prompt": [5] * prompt, "logit_bias": {"5": 100}}
            answer = post(running, body)
            most = total if max_tokens is None else min(context, prompt + max_tokens)
            assert answer.json()["usage"]["total_tokens"] == most


def test_context_length_is_limited_by_memory(tmp_path: Path) -> None:
    """`/v1/models` reports how many tokens fit; one more is refused."""
    model, tokenizer = parrot(tmp_path, "hello", context=1_000_000)
    with serving(model, tokenizer, engine={"memory_limit": "26MB", "prefill_chunk": 64}) as running:
        most = httpx.get(f"{running.url}/v1/models").json()["data"][0]["max_model_len"]
        assert 100 < most < 20_000
        assert post(running, {"prompt": [5] * (most - 1), "max_tokens": 1}).status_code == 200
        refused = post(running, {"prompt": [5] * most, "max_tokens": 1})
    assert refused.status_code == 400
    assert f"maximum context length is {most} tokens" in refused.text
    assert f"prompt is too long: {most} tokens > {most - 1} maximum" in refused.text
    assert re.search(r"tokens needs .*\d.*limit of 26", refused.text)


def test_models_route_has_openai_and_anthropic_fields(small: Running) -> None:
    both = (
        anthropic.Anthropic(base_url=small.url, api_key="x"),
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="x"),
    )
    (theirs,) = both[0].models.list(limit=5).data
    (ours,) = both[1].models.list().data
    assert theirs.id == ours.id == theirs.display_name
    assert theirs.type == "model" and theirs.created_at.timestamp() == ours.created
    assert theirs.max_input_tokens == 32_767 and ours.owned_by == "penstock"
    assert both[0].models.retrieve(ours.id).id == ours.id
    for client in both:
        client.close()


def test_parsing_long_body_does_not_block_others(wide: Running) -> None:
    """Other requests are answered meanwhile."""
    content = [{"type": "text", "text": "x"}] * 8
    messages = [{"role": "user", "content": content}] * 16_000
    body = json.dumps({"messages": [*messages, {"role": 7, "content": ""}]}).encode()
    # Of the processor, in all threads here: others on the machine do not count.
    began = time.process_time()
    with pytest.raises(ValidationError):
        ChatRequest.model_validate(json.loads(body))
    alone_seconds = time.process_time() - began

    def longest_wait() -> float:
        waits = []
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=wide.url) as http:
            url = f"{wide.url}/v1/chat/completions"
            asked = pool.submit(httpx.post, url, content=body, headers=HEADERS, timeout=SOON)
            while not asked.done():
                began = time.process_time()
                assert http.get("/health").status_code == 200
                waits.append(time.process_time() - began)
        answer = asked.result()
        assert answer.status_code == 400 and "messages.16000.role" in answer.text
        return max(waits)

    # A loop that reads is held up each time, and one of a busy machine now and then.
    assert any(longest_wait() < alone_seconds / 2 for _ in range(3))


def test_grammar_compilation_does_not_block_short_prompts(small: Running) -> None:
    """Only requests with a grammar wait for the compiling thread."""
    busy = threading.Event()
    small.service.workers.compiling.submit(busy.wait, SOON)
    try:
        with ThreadPoolExecutor(1) as pool:
            form = {"response_format": {"type": "json_object"}, "max_tokens": 1}
            body = {"messages": [{"role": "user", "content": "x"}], **form}
            url = f"{small.url}/v1/chat/completions"
            constrained = pool.submit(httpx.post, url, json=body, timeout=SOON)
            wait_until(lambda: small.service.workers.pending == 1)
            time.sleep(0.1)
            assert post(small, {"prompt": "The code", "max_tokens": 1}).status_code == 200
            assert not constrained.done()
            busy.set()
            assert constrained.result().status_code == 200
    finally:
        busy.set()
