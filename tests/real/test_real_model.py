"""Greedy text on real weights is mlx-lm's: cold, warm, shared, in batches, restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from penstock import Engine, Request
from penstock.models.mlx_lm import Loaded, render

ANSWER_TOKENS = 24
COUNT = 50
CLOSE = 1e-3
"""Difference of two logits below which either may be the larger one, by rounding alone."""


def prompts(real: Loaded, prose: list[str]) -> list[list[int]]:
    """Return 50 conversations about real paragraphs, of 90 to 700 tokens."""
    conversations = []
    for number in range(COUNT):
        text = prose[number * 7 % len(prose)][: 400 + 40 * number]
        ask = ("Summarize this text.", "What is this about?", "Repeat the first line.")[number % 3]
        conversations.append(
            render(real.tokenizer, [{"role": "user", "content": f"{ask}\n\n{text}"}])
        )
    return conversations


def mlx_lm_answer(model: Any, prompt: list[int], ends: set[int]) -> tuple[list[int], list[float]]:
    """Return a greedy answer by a plain loop, and by how much each token's logit led."""
    cache = make_prompt_cache(model)
    logits = model(mx.array(prompt)[None], cache=cache)[0, -1]
    tokens, leads = [], []
    for _ in range(ANSWER_TOKENS):
        best = mx.sort(logits)[-2:].tolist()
        tokens.append(int(mx.argmax(logits).item()))
        leads.append(best[1] - best[0])
        if tokens[-1] in ends:
            break
        logits = model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
    return tokens, leads


def answers(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    """Return the tokens of all answers, asked at once."""
    handles = [engine.submit(Request(prompt=tuple(p), max_tokens=ANSWER_TOKENS)) for p in asked]
    return [[event.token for event in handle if event.token is not None] for handle in handles]


def differing(ours: list[list[int]], theirs: list[tuple[list[int], list[float]]]) -> list[int]:
    """Return the answers that differ where the logits do not explain it."""
    wrong = []
    for number, (mine, (their, leads)) in enumerate(zip(ours, theirs, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(mine, their, strict=False)) if a != b), None)
        if (at is not None and leads[at] > CLOSE) or (at is None and len(mine) != len(their)):
            wrong.append(number)
    return wrong


@pytest.fixture(scope="module")
def asked(real: Loaded, prose: list[str]) -> list[list[int]]:
    return prompts(real, prose)


@pytest.fixture(scope="module")
def expected(real: Loaded, asked: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    ends = set(real.tokenizer.eos_token_ids)
    return [mlx_lm_answer(real.model, prompt, ends) for prompt in asked]


def engine(real: Loaded, **settings: Any) -> Engine:
    return Engine(real.model, real.tokenizer, memory_limit="2GB", **settings)


def test_fifty_prompts_cold_warm_and_in_batches(
    real: Loaded, asked: list[list[int]], expected: list[tuple[list[int], list[float]]]
) -> None:
    with engine(real) as one:
        cold = [answers(one, [prompt])[0] for prompt in asked]
        before = one.stats().hit_tokens
        warm = [answers(one, [prompt])[0] for prompt in asked]
        stats = one.stats()
        batched = answers(one, asked)
        one.ask(lambda view: view.check()).result()
    print(f"\n{COUNT} prompts: {stats.hit_tokens - before:,} of {sum(map(len, asked)):,} warm")
    assert differing(cold, expected) == []
    assert differing(warm, expected) == []
    assert differing(batched, expected) == []
    assert stats.hit_tokens - before >= 0.8 * sum(map(len, asked))


def test_restored_from_the_disk(
    real: Loaded,
    asked: list[list[int]],
    expected: list[tuple[list[int], list[float]]],
    tmp_path: Path,
) -> None:
    with engine(real, ssd_cache_dir=tmp_path) as first:
        answers(first, asked[:12])
    with engine(real, ssd_cache_dir=tmp_path) as second:
        restored = answers(second, asked[:12])
        stats = second.stats()
    assert differing(restored, expected[:12]) == []
    assert stats.restored_tokens >= 0.5 * sum(map(len, asked[:12]))


def test_a_conversation_of_many_turns_shares_its_history(real: Loaded, prose: list[str]) -> None:
    messages: list[dict[str, str]] = []
    with engine(real) as one:
        for turn in range(8):
            messages.append({"role": "user", "content": f"Turn {turn}. {prose[turn][:300]}"})
            prompt = render(real.tokenizer, messages)
            before = one.stats()
            (said,) = answers(one, [prompt])
            after = one.stats()
            if turn:
                assert after.hit_tokens - before.hit_tokens >= 0.5 * len(prompt)
            expected = mlx_lm_answer(real.model, prompt, set(real.tokenizer.eos_token_ids))
            assert differing([said], [expected]) == []
            messages.append({"role": "assistant", "content": real.tokenizer.decode(said)})


def test_texts_of_all_kinds_survive_the_tokenizer(real: Loaded, prose: list[str]) -> None:
    """1,000 texts come back as they were; none of them has a mark in it."""
    kinds = [
        "déjà vu 東京 😀👍🏽",
        "\t\tif x:\n\t\t\treturn 0x1F",
        "1234567890 3.14159",
        "   a    b",
    ]
    texts = [f"{kinds[n % 4]} {prose[n % len(prose)][n % 50 : 80 + n % 50]}" for n in range(1_000)]
    inner = getattr(real.tokenizer, "_tokenizer", real.tokenizer)
    backend: Tokenizer = inner.backend_tokenizer
    for text in texts:
        assert backend.decode(backend.encode(text).ids) == text
