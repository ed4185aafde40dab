"""Greedy text on real weights is mlx-lm's: cold, warm, shared, in batches, restored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from real_answers import COUNT, Answer, answers, differing, engine_of, plain_answer, prompts
from tokenizers import Tokenizer

from penstock.models.mlx_lm import Loaded, render

RESTORED = 12


@pytest.fixture(scope="module")
def asked(real: Loaded, prose: list[str]) -> list[list[int]]:
    return prompts(real, prose)


@pytest.fixture(scope="module")
def expected(real: Loaded, asked: list[list[int]]) -> list[Answer]:
    return [plain_answer(real, prompt) for prompt in asked]


def test_fifty_prompts_cold_warm_and_in_batches(
    real: Loaded, asked: list[list[int]], expected: list[Answer]
) -> None:
    with engine_of(real) as engine:
        cold = answers(engine, asked)
        before = engine.stats().hit_tokens
        warm = [answers(engine, [prompt])[0] for prompt in asked[:RESTORED]]
        hits = engine.stats().hit_tokens - before
        batches, start = [], 0
        for size in range(1, 9):
            batches += answers(engine, asked[start : start + size])
            start += size
        engine.check()
    known = sum(map(len, asked[:RESTORED]))
    print(f"\n{COUNT} prompts; of {RESTORED} again {hits:,} of {known:,} tokens were known")
    assert differing(cold, expected) == []
    assert differing(warm, expected[:RESTORED]) == []
    assert differing(batches, expected[:start]) == []
    assert hits >= 0.5 * known


def test_another_answer_is_noticed(expected: list[Answer]) -> None:
    """A negative control: one token changed, one left out, one more."""
    sure = next(number for number, answer in enumerate(expected) if answer.leads[2] > 0.1)
    right = expected[sure].tokens
    for wrong in ([*right[:2], right[2] + 1, *right[3:]], right[:-1], [*right, 7]):
        assert differing([wrong], [expected[sure]]) == [0]


def test_restored_from_the_disk(
    real: Loaded, asked: list[list[int]], expected: list[Answer], tmp_path: Path
) -> None:
    with engine_of(real, ssd_cache_dir=tmp_path) as first:
        answers(first, asked[-RESTORED:])
    with engine_of(real, ssd_cache_dir=tmp_path) as second:
        restored = answers(second, asked[-RESTORED:])
        stats = second.stats()
        second.check()
    assert differing(restored, expected[-RESTORED:]) == []
    assert stats.restored_tokens >= 0.5 * sum(map(len, asked[-RESTORED:]))


def test_a_conversation_of_many_turns_shares_its_history(real: Loaded, prose: list[str]) -> None:
    messages: list[dict[str, str]] = []
    with engine_of(real) as engine:
        for turn in range(6):
            messages.append({"role": "user", "content": f"Turn {turn}. {prose[turn][:150]}"})
            prompt = render(real.tokenizer, messages)
            before = engine.stats().hit_tokens
            (tokens,) = answers(engine, [prompt])
            if turn > 1:
                assert engine.stats().hit_tokens - before >= 0.5 * len(prompt)
            assert differing([tokens], [plain_answer(real, prompt)]) == []
            messages.append({"role": "assistant", "content": real.tokenizer.decode(tokens)})
        engine.check()


def texts(prose: Sequence[str]) -> list[str]:
    kinds = [
        "déjà vu 東京 😀👍🏽",
        "\t\tif x:\n\t\t\treturn 0x1F",
        "1234567890 3.14159",
        "   a    b",
    ]
    return [f"{kinds[n % 4]} {prose[n % len(prose)][n % 50 : 80 + n % 50]}" for n in range(1_000)]


def test_texts_of_all_kinds_survive_the_tokenizer(real: Loaded, prose: list[str]) -> None:
    """1,000 texts come back as they were; none of them has a mark in it."""
    inner = getattr(real.tokenizer, "_tokenizer", real.tokenizer)
    backend: Tokenizer = inner.backend_tokenizer
    for text in texts(prose):
        assert backend.decode(backend.encode(text).ids) == text
