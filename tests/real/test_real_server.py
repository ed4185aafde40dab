"""The server on real weights: both APIs match mlx-lm's text, also after kill -9."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from real_answers import ALL, CLOSE, COUNT, plain_answer

from penstock.models.mlx_lm import Loaded, render
from penstock_bench.serve_process import free_port

QUESTIONS = ("What is the capital of France?", "Name three colors.", "What is 2 + 2?")
CONVERSATIONS = COUNT if ALL else len(QUESTIONS)
TOKENS = 12
START_SECONDS = 120.0
WRITTEN_SECONDS = 60.0
"""Ends of conversations linger for ten seconds; then their records are written."""


def conversation(prose: list[str], number: int) -> list[dict[str, str]]:
    text = f"{prose[number % len(prose)][:300]}\n\n{number}. {QUESTIONS[number % 3]}"
    return [{"role": "user", "content": text}]


@contextmanager
def served_until_killed(folder: Path) -> Iterator[str]:
    """Serve the model as a user would, yield the URL, and end with SIGKILL."""
    port = free_port()
    flags = ["--port", str(port), "--ssd-cache-dir", str(folder), "--memory-limit", "2GB"]
    process = subprocess.Popen([sys.executable, "-m", "penstock", "serve", "smollm2", *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not is_ready(url):
            assert process.poll() is None and time.monotonic() < until, "it did not start"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    line = re.search(rf"^penstock_{name}(?:_total)? (\S+)$", text, re.MULTILINE)
    assert line is not None, f"no {name} in /metrics"
    return float(line[1])


def openai(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "smollm2", "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    answer = post(url, "/v1/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def anthropic(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "smollm2", "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    return str(post(url, "/v1/messages", body)["content"][0]["text"])


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}{path}", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def wait_for_records(folder: Path, records: int) -> None:
    until = time.monotonic() + WRITTEN_SECONDS
    while len(list(folder.rglob("*.safetensors"))) < records:
        assert time.monotonic() < until, "the conversations were not written"
        time.sleep(0.1)


def test_answers_match_plain_before_and_after_kill(
    real: Loaded, prose: list[str], tmp_path: Path
) -> None:
    asked = [conversation(prose, number) for number in range(CONVERSATIONS)]
    expected = [plain_answer(real, render(real.tokenizer, messages), TOKENS) for messages in asked]

    def wrong(texts: list[str]) -> list[int]:
        """Return the numbers of answers that differ though no lead in the plain one is small."""
        return [
            number
            for number, (text, plain) in enumerate(zip(texts, expected, strict=True))
            if text != real.tokenizer.decode(plain.tokens) and min(plain.leads) > CLOSE
        ]

    for restored in (False, True):
        with served_until_killed(tmp_path) as url:
            assert wrong([openai(url, messages) for messages in asked]) == []
            if restored:
                assert metric(url, "restored_tokens") >= 64 * len(asked)
            assert wrong([anthropic(url, messages) for messages in asked]) == []
            wait_for_records(tmp_path, len(asked))
            assert metric(url, "hit_tokens") >= 64 * len(asked)
    assert len(wrong(["another text"] * len(asked))) >= 0.8 * len(asked), "a negative control"
