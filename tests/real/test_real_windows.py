"""Chats on real weights that pass their window, against a mask over mlx-lm's growing cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from real_answers import ALL, answers, differing, engine_of, plain_answer

from penstock.models.mlx_lm import Loaded, render

TURNS = 20
LINE_CHARACTERS, WINDOW, KEEP = (1_600, 2_048, 64) if ALL else (40, 256, 32)
"""In `ALL` the chat passes the 8,192 tokens that the model is made for."""


class MaskedCache(KVCache):
    """mlx-lm's growing cache, of which a query sees the first tokens and the last ones alone."""

    def make_mask(self, N: int, *_: Any, **__: Any) -> mx.array:
        columns = mx.arange(self.offset + N)
        queries = mx.arange(self.offset, self.offset + N)[:, None]
        near = columns > queries - (WINDOW - KEEP)
        return (columns <= queries) & (near | (columns < KEEP))


def test_twenty_turns_past_a_window(real: Loaded, prose: list[str]) -> None:
    messages: list[dict[str, str]] = []
    caches = [MaskedCache() for _ in real.model.layers]  # type: ignore[union-attr]
    read: list[int] = []
    most_held = 0
    with engine_of(real, max_kv_size=WINDOW, keep=KEEP, block_size=32) as engine:
        for turn in range(TURNS):
            line = prose[turn % len(prose)][:LINE_CHARACTERS]
            messages.append({"role": "user", "content": f"Turn {turn}. {line}"})
            prompt = render(real.tokenizer, messages)
            (tokens,) = answers(engine, [prompt])
            pairs = enumerate(zip(read, prompt, strict=False))
            common = next((place for place, (a, b) in pairs if a != b), len(read))
            for cache in caches:
                cache.trim(cache.offset - common)
            plain = plain_answer(real, prompt[common:], caches=caches)
            assert differing([tokens], [plain]) == [], f"turn {turn}, {len(prompt)} tokens"
            read = prompt + plain.tokens[: caches[0].offset - len(prompt)]
            most_held = max(most_held, engine.stats().held_bytes)
            messages.append({"role": "assistant", "content": real.tokenizer.decode(tokens)})
        engine.check()
    assert len(prompt) > (8_192 if ALL else 2 * WINDOW)
    print(f"\n{len(prompt):,} tokens in a window of {WINDOW:,}; {most_held / 1e6:.0f} MB held")
