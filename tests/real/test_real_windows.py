"""Chats on real weights past their window, compared with a mask over mlx-lm's growing cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache
from real_answers import ALL, ANSWER_TOKENS, answers, differing, engine_of, plain_answer

from penstock import Engine
from penstock.models.mlx_lm import Loaded, render

TURNS = 20
LINE_CHARACTERS, WINDOW, KEEP = (2_000, 2_048, 64) if ALL else (40, 256, 32)
"""In `ALL` the chat passes the 8,192 tokens that the model is made for."""
CONTEXT = 8_192 if ALL else 1_280
TURN_TOKENS = 2 * ANSWER_TOKENS + 24
"""Tokens of a turn beside the line's own: two answers, the marks and the number of the turn."""


class MaskedCache(KVCache):
    """mlx-lm's growing cache, masked to the first and last tokens."""

    def make_mask(self, N: int, *_: Any, **__: Any) -> mx.array:
        columns = mx.arange(self.offset + N)
        queries = mx.arange(self.offset, self.offset + N)[:, None]
        near = columns > queries - (WINDOW - KEEP)
        return (columns <= queries) & (near | (columns < KEEP))


class Talk:
    """A chat with the engine and with a plain loop whose caches continue across turns."""

    def __init__(self, real: Loaded, caches: list[Any]) -> None:
        self.real, self.caches = real, caches
        self.messages: list[dict[str, str]] = []
        self.read: list[int] = []
        """Tokens in the plain loop's caches."""

    def ask(self, engine: Engine, line: str) -> int:
        """Send a line, compare the answers, and return the prompt's tokens."""
        self.messages.append({"role": "user", "content": line})
        prompt = render(self.real.tokenizer, self.messages)
        (tokens,) = answers(engine, [prompt])
        pairs = enumerate(zip(self.read, prompt, strict=False))
        common = next((place for place, (a, b) in pairs if a != b), len(self.read))
        for cache in self.caches:
            cache.trim(cache.offset - common)
        plain = plain_answer(self.real, prompt[common:], caches=self.caches)
        assert differing([tokens], [plain]) == [], f"{line[:8]}, {len(prompt)} tokens"
        self.read = prompt + plain.tokens[: self.caches[0].offset - len(prompt)]
        self.messages.append({"role": "assistant", "content": self.real.tokenizer.decode(tokens)})
        return len(prompt)


def test_twenty_turns_past_window_match_masked_cache(real: Loaded, prose: list[str]) -> None:
    talk = Talk(real, [MaskedCache() for _ in real.model.layers])  # type: ignore[union-attr]
    text, most_held = " ".join(prose), 0
    with engine_of(real, max_kv_size=WINDOW, keep=KEEP, block_size=32) as engine:
        for turn in range(TURNS):
            start = turn * LINE_CHARACTERS % (len(text) - LINE_CHARACTERS)
            line = text[start : start + LINE_CHARACTERS]
            tokens = talk.ask(engine, f"Turn {turn}. {line}")
            stats = engine.stats()
            most_held = max(most_held, stats.held_bytes - stats.by_kind["weights"])
        engine.check()
    assert tokens > (8_192 if ALL else 2 * WINDOW)
    print(f"\n{tokens:,} tokens in a window of {WINDOW:,}; {most_held / 1e6:.0f} MB of KV at most")


def test_twenty_turns_to_end_of_context_match_plain(real: Loaded, prose: list[str]) -> None:
    """The last answer ends just below the model's context length."""
    talk = Talk(real, make_prompt_cache(real.model))
    text = real.tokenizer.encode(" ".join(prose))
    tokens = 0
    with engine_of(real) as engine:
        for turn in range(TURNS):
            count = (CONTEXT - tokens) // (TURNS - turn) - TURN_TOKENS
            start = turn * count % (len(text) // 2)
            line = real.tokenizer.decode(text[start : start + count])
            before = engine.stats().hit_tokens
            last, tokens = tokens, talk.ask(engine, f"Turn {turn}. {line}")
            assert engine.stats().hit_tokens - before >= 0.8 * last
        engine.check()
    assert CONTEXT - 3 * TURN_TOKENS < tokens + ANSWER_TOKENS <= CONTEXT
    print(f"\n{tokens:,} tokens of {CONTEXT:,}")
