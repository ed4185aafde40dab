"""Agents that share a system prompt and chat concurrently, as HTTP clients."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

SESSIONS, TURNS = 8, 5
TIMEOUT_SECONDS = 300.0
ANIMALS = ("falcon", "dolphin", "badger", "heron", "otter", "lynx", "raven", "beaver")
COLORS = ("amber", "quiet", "silver", "distant", "gentle")
SYSTEM = "You keep codes and tell them when you are asked. " * 20


@dataclass(frozen=True)
class Talked:
    """Totals of all sessions."""

    prompt_tokens: int
    hit_tokens: int
    answers: tuple[tuple[str, ...], ...]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def talk(url: str, sessions: int = SESSIONS, turns: int = TURNS) -> Talked:
    """Let every agent send its conversation so far each turn, all agents concurrently."""
    with ThreadPoolExecutor(sessions) as pool:
        found = list(pool.map(lambda number: session(url, number, turns), range(sessions)))
    return Talked(
        sum(prompt for prompt, _, _ in found),
        sum(hit for _, hit, _ in found),
        tuple(said for _, _, said in found),
    )


def session(url: str, number: int, turns: int) -> tuple[int, int, tuple[str, ...]]:
    messages = [{"role": "system", "content": SYSTEM}]
    prompt_tokens = hit_tokens = 0
    said = []
    rng = random.Random(number)
    for turn in range(turns):
        if rng.random() < 0.5:  # agents that keep step would take turns with always the same one
            httpx.get(f"{url}/v1/models", timeout=TIMEOUT_SECONDS).raise_for_status()
        thing = f"{COLORS[turn % len(COLORS)]} {ANIMALS[number % len(ANIMALS)]}"
        facts = f"The code of the {thing} is {4_000 + 10 * number + turn}. " * 12
        question = f"{facts}What is the code of the {thing}?"
        messages.append({"role": "user", "content": question})
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": messages, "max_tokens": 16},
            timeout=TIMEOUT_SECONDS,
        )
        assert answer.status_code == 200, answer.text
        made = answer.json()
        usage = made["usage"]
        prompt_tokens += usage["prompt_tokens"]
        hit_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        said.append(made["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": said[-1]})
    return prompt_tokens, hit_tokens, tuple(said)
