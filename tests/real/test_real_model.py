"""Greedy text on real weights matches mlx-lm: cold, warm, shared, batched, restored."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import gguf
import mlx.core as mx
import pytest
from real_answers import (
    ALL,
    COUNT,
    Answer,
    answers,
    differing,
    engine_of,
    plain_answer,
    prompts,
    unaccounted_bytes,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.config import BLOCK_SIZE
from penstock.kv.block_spans import RECORD_TOKENS
from penstock.models import named
from penstock.models.mlx_lm import Loaded, render

RESTORED = COUNT if ALL else 12
SYSTEM_CHARACTERS = 12_000 if ALL else 800
CONTROL = 3
"""Type of a token that is a mark, in a GGUF file."""


@pytest.fixture(scope="module")
def asked(real: Loaded, prose: list[str]) -> list[list[int]]:
    return prompts(real, prose)


@pytest.fixture(scope="module")
def expected(real: Loaded, asked: list[list[int]]) -> list[Answer]:
    return [plain_answer(real, prompt) for prompt in asked]


def test_fifty_prompts_match_plain_cold_warm_and_batched(
    real: Loaded, asked: list[list[int]], expected: list[Answer]
) -> None:
    gc.collect()
    alone = mx.get_active_memory()
    with engine_of(real) as engine:
        cold = answers(engine, asked)
        assert unaccounted_bytes(engine, alone) <= 0
        before = engine.stats().hit_tokens
        warm = [answers(engine, [prompt])[0] for prompt in asked[:RESTORED]]
        hits = engine.stats().hit_tokens - before
        batches, start = [], 0
        for size in range(1, 9):
            batches += answers(engine, asked[start : start + size])
            start += size
        engine.check()
        assert unaccounted_bytes(engine, alone) <= 0
        assert unaccounted_bytes(engine, alone - (1 << 30)) > 0, "a negative control"
    mx.synchronize()
    assert mx.get_active_memory() <= alone, "something outlives the engine"
    known = sum(map(len, asked[:RESTORED]))
    print(f"\n{COUNT} prompts; of {RESTORED} again {hits:,} of {known:,} tokens were known")
    assert differing(cold, expected) == []
    assert differing(warm, expected[:RESTORED]) == []
    assert differing(batches, expected[:start]) == []
    assert hits >= 0.5 * known


def test_check_detects_different_answer(expected: list[Answer]) -> None:
    """Negative control: one token changed, one missing, one more."""
    sure = next(number for number, answer in enumerate(expected) if answer.leads[2] > 0.1)
    right = expected[sure].tokens
    for wrong in ([*right[:2], right[2] + 1, *right[3:]], right[:-1], [*right, 7]):
        assert differing([wrong], [expected[sure]]) == [0]


def test_text_after_restore_matches_plain(
    real: Loaded, asked: list[list[int]], expected: list[Answer], tmp_path: Path
) -> None:
    with engine_of(real, ssd_cache_dir=tmp_path) as first:
        answers(first, asked[-RESTORED:])
    with engine_of(real, ssd_cache_dir=tmp_path) as second:
        restored = answers(second, asked[-RESTORED:])
        stats = second.stats()
        second.check()
    assert differing(restored, expected[-RESTORED:]) == []
    known = sum(map(in_records, asked[-RESTORED:], restored))
    print(f"\n{stats.restored_tokens:,} tokens restored, of {known:,} that lie in records")
    assert stats.restored_tokens > 0
    assert stats.hit_tokens >= 0.9 * known


def in_records(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return the tokens of a prompt in whole records on disk.

    The last record of a short prompt ends with its answer, where that fills a block.
    """
    end = (len(prompt) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    return end if end < len(prompt) else (len(prompt) - 1) // RECORD_TOKENS * RECORD_TOKENS


def test_eight_conversations_reuse_cached_system_prompt(real: Loaded, prose: list[str]) -> None:
    """All are answered at once, after the first has prefilled the system prompt."""
    system = {"role": "system", "content": "\n\n".join(prose)[:SYSTEM_CHARACTERS]}
    questions = [{"role": "user", "content": prose[number][:100]} for number in range(8)]
    asked = [render(real.tokenizer, [system, question]) for question in questions]
    expected = [plain_answer(real, prompt) for prompt in asked]
    shared = len(render(real.tokenizer, [system], answer=False))
    with engine_of(real) as engine:
        first = answers(engine, asked[:1])
        before = engine.stats().hit_tokens
        rest = answers(engine, asked[1:])
        hits = engine.stats().hit_tokens - before
        engine.check()
    assert differing(first + rest, expected) == []
    assert hits >= 0.8 * shared * len(rest)


def test_long_conversation_reuses_cached_history(real: Loaded, prose: list[str]) -> None:
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


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    """Return SmolLM2's original tokenizer on the vocabulary that `gguf` reads."""
    fields = gguf.GGUFReader(named.fetch("smollm2")).fields
    texts, kinds, merges = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({text: n for n, text in enumerate(texts)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [text for text, kind in zip(texts, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


def test_tokens_of_1000_texts_match_reference(
    real: Loaded, prose: list[str], reference: Tokenizer
) -> None:
    """Each round trips; every fourth contains special tokens."""
    inner = getattr(real.tokenizer, "_tokenizer", real.tokenizer)
    backend: Tokenizer = inner.backend_tokenizer
    marked = 0
    for number, text in enumerate(texts(prose)):
        if number % 4 == 3:
            text = f"<|im_start|>user\n{text}<|im_end|> <|endoftext|>"
        ids = backend.encode(text).ids
        assert ids == reference.encode(text).ids, text
        assert backend.decode(ids, skip_special_tokens=False) == text
        marked += {"<|im_start|>", "<|im_end|>"} <= {*backend.encode(text).tokens}
    assert marked == 250
