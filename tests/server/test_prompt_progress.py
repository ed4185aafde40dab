"""Progress reports while a long prompt is prefilled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from patience import SOON
from servers import Running, serving

from penstock.engine.handle import PromptProgress

SMALL: dict[str, Any] = {"prefill_chunk": 64, "block_size": 32}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = " ".join(f"The code of falcon {number} is {number * 37}." for number in range(60))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server that prefills in chunks of 64 tokens."""
    with serving(engine=SMALL) as small:
        yield small


def chunks(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    answer = httpx.post(
        running.url + path, json={"max_tokens": 4, "stream": True, **body}, timeout=SOON
    )
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def ask_both(running: Running, path: str, **more: Any) -> list[dict[str, Any]]:
    """Request an answer by chat or by completion."""
    text = f"{path}: {TEXT}"
    if path == CHAT:
        return chunks(running, path, messages=[{"role": "user", "content": text}], **more)
    return chunks(running, path, prompt=text, **more)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_reports_prompt_progress(running: Running, path: str) -> None:
    usage = {"stream_options": {"include_usage": True}}
    cold = ask_both(running, path, return_progress=True, **usage)
    progress = [chunk["prompt_progress"] for chunk in cold if "prompt_progress" in chunk]
    tokens = cold[-1]["usage"]["prompt_tokens"]
    assert tokens > 300
    processed = [one["processed"] for one in progress]
    assert processed == sorted(set(processed)) and len(processed) >= 4
    assert processed[-1] == tokens and {one["total"] for one in progress} == {tokens}
    assert {one["cache"] for one in progress} == {0}
    times = [one["time_ms"] for one in progress]
    assert times == sorted(times)
    assert progress[-1]["left_ms"] == 0 and all(one["left_ms"] for one in progress[1:-1])
    begins = [number for number, chunk in enumerate(cold) if "prompt_progress" not in chunk]
    assert begins[0] == len(progress), "the prompt's progress is told before the answer"

    warm = ask_both(running, path, return_progress=True, **usage)
    assert [chunk["prompt_progress"]["cache"] for chunk in warm if "prompt_progress" in chunk][
        -1
    ] == warm[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    silent = ask_both(running, path)
    assert all("prompt_progress" not in chunk for chunk in silent)


def test_pings_report_prompt_progress() -> None:
    """As comments, and as Anthropic's events."""
    with serving(engine={"prefill_chunk": 16, "block_size": 16}, ping_seconds=0.005) as running:
        message = {"role": "user", "content": TEXT}
        body: dict[str, Any] = {"messages": [message], "max_tokens": 1, "stream": True}
        answer = httpx.post(running.url + CHAT, json=body, timeout=SOON)
        comments = [line for line in answer.text.splitlines() if line.startswith(": prompt: ")]
        assert comments and all(" tokens" in line for line in comments)
        assert any(line.endswith(" s left") for line in comments)
        body = {**body, "model": "any", "messages": [{**message, "content": "b" + TEXT}]}
        answer = httpx.post(f"{running.url}/v1/messages", json=body, timeout=SOON)
        lines = answer.text.splitlines()
        pings = [
            json.loads(data.removeprefix("data: "))
            for name, data in pairwise(lines)
            if name == "event: ping"
        ]
        assert {ping["type"] for ping in pings} == {"ping"}
        progress = [ping["prompt_progress"] for ping in pings if "prompt_progress" in ping]
        assert progress and all(one["processed"] < one["total"] for one in progress)
        body = {"input": "c" + TEXT, "max_output_tokens": 1, "stream": True}
        answer = httpx.post(f"{running.url}/v1/responses", json=body, timeout=SOON)
        assert "\n: prompt: " in answer.text


def test_estimate_excludes_cached_tokens() -> None:
    """400 tokens in 2 s leave 2 s for as many."""
    assert PromptProgress(1_000, 200, 600, 2.0).seconds_left == 2.0
    assert PromptProgress(1_000, 200, 200, 0.0).seconds_left is None
    assert PromptProgress(1_000, 200, 1_000, 4.0).seconds_left == 0.0
