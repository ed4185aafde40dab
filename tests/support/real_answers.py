"""Greedy answers on real weights by a plain mlx-lm loop, and their comparison with ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from penstock import Engine, Request
from penstock.models.mlx_lm import Loaded, render

ALL = os.environ.get("PENSTOCK_REAL") == "all"
"""Whether prompts are long and chats pass the whole context: an hour in place of five minutes."""
COUNT = 50
ANSWER_TOKENS = 24 if ALL else 8
CLOSE = 1e-3
"""Difference of two logits below which either may be the larger one, by rounding alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's tokens, and the logit lead of each over the second."""

    tokens: list[int]
    leads: list[float]


def prompts(real: Loaded, prose: Sequence[str]) -> list[list[int]]:
    """Return 50 conversations about real paragraphs of 50 to 200 tokens; `ALL` has up to 700."""
    base, step = (400, 40) if ALL else (80, 10)
    conversations = []
    for number in range(COUNT):
        text = prose[number * 7 % len(prose)][: base + step * number]
        ask = ("Summarize this text.", "What is this about?", "Repeat the first line.")[number % 3]
        conversations.append(
            render(real.tokenizer, [{"role": "user", "content": f"{ask}\n\n{text}"}])
        )
    return conversations


def plain_answer(
    real: Loaded, prompt: Sequence[int], count: int = ANSWER_TOKENS, caches: Any = None
) -> Answer:
    """Return a greedy answer by a plain loop, without the end of sequence.

    `caches` hold what is left out of the prompt.
    """
    model: Any = real.model
    cache = make_prompt_cache(model) if caches is None else caches
    logits = model(mx.array(list(prompt))[None], cache=cache)[0, -1]
    answer = Answer([], [])
    for number in range(count):
        best: Any = mx.sort(logits)[-2:].tolist()
        token = int(mx.argmax(logits).item())
        if token in real.tokenizer.eos_token_ids:
            break
        answer.tokens.append(token)
        answer.leads.append(best[1] - best[0])
        if number + 1 == count:
            break
        logits = model(mx.array([[answer.tokens[-1]]]), cache=cache)[0, -1]
    return answer


def answers(
    engine: Engine, asked: Sequence[Sequence[int]], count: int = ANSWER_TOKENS
) -> list[list[int]]:
    """Return the tokens of concurrent answers."""
    handles = [engine.submit(Request(prompt=tuple(p), max_tokens=count)) for p in asked]
    return [list(handle.result()[0].tokens) for handle in handles]


def differing(ours: Sequence[Sequence[int]], theirs: Sequence[Answer]) -> list[int]:
    """Return the numbers of answers that differ at a token with a significant logit lead."""
    wrong = []
    for number, (tokens, plain) in enumerate(zip(ours, theirs, strict=True)):
        pairs = enumerate(zip(tokens, plain.tokens, strict=False))
        at = next((place for place, (a, b) in pairs if a != b), None)
        ends_alike = len(tokens) == len(plain.tokens)
        if (at is None and not ends_alike) or (at is not None and plain.leads[at] > CLOSE):
            wrong.append(number)
    return wrong


def unaccounted_bytes(engine: Engine, before: int) -> int:
    """Return MLX's bytes beyond the ledger; `before` are those without the engine."""
    stats = engine.stats()
    return stats.active_bytes - before - (stats.used_bytes - stats.by_kind["weights"])


def engine_of(real: Loaded, **settings: Any) -> Engine:
    """Return an engine on the real weights."""
    return Engine(real.model, real.tokenizer, **{"memory_limit": "2GB", **settings})
