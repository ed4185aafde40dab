"""Sides of engine benchmarks: penstock without its thread, and the protocol shared with mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from penstock import config
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.stats import Stats
from penstock_bench.models import BenchModel

OURS = "penstock"
RIVAL = "mlx-lm"
LLAMA = "llama.cpp"

MEMORY_SHARE = 0.8
"""Memory limit as a share of the machine's memory, large enough for all benchmarks."""

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """Engine under test. Sequences are numbered in the order of their prompts."""

    @property
    def prompt_read(self) -> int:
        """Prompt tokens in caches so far."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens not computed: cached, or shared with another prompt."""

    @property
    def model_seconds(self) -> float:
        """Seconds in the model and the sampler so far; 0 if not measured."""

    def learn(self, prefix: Sequence[int]) -> None:
        """Prefill `prefix` and cache it for prompts that start with it."""

    def submit(self, prompts: Prompts, max_tokens: int) -> None:
        """Submit all prompts at once."""

    def cancel(self) -> None:
        """Cancel the submitted prompts and free what is not shared."""

    def step(self) -> Sequence[tuple[int, int]]:
        """Run one step and return (sequence, token) of every new token, several of each perhaps."""

    def settle(self) -> None:
        """Wait until nothing is in flight."""

    def close(self) -> None:
        """Stop; memory is freed with the object."""


MakeSide = Callable[[], Side]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Settings of our engine, in tokens; None is the default for the model."""

    block_size: int | None = None
    prefill_chunk: int = config.PREFILL_CHUNK
    kv_cache_quantization: str | None = None
    kv_cache_min_quantize_tokens: int = config.MIN_QUANTIZE_TOKENS
    kv_cache_raw_first_tokens: int = config.RAW_FIRST_TOKENS

    @property
    def exact(self) -> bool:
        """Whether KV is not quantized, so that texts equal mlx-lm's."""
        return self.kv_cache_quantization is None

    @property
    def codec_settings(self) -> dict[str, Any]:
        """Codec settings of the engine."""
        names = (
            "kv_cache_quantization",
            "kv_cache_min_quantize_tokens",
            "kv_cache_raw_first_tokens",
        )
        return {} if self.exact else {name: getattr(self, name) for name in names}


class Ours:
    """Penstock's engine without its thread: one `Core.step` per step."""

    def __init__(
        self, model: BenchModel, batch_size: int, shape: EngineShape, **settings: Any
    ) -> None:
        self._core = Core(
            model.model,
            model.tokenizer,
            memory_limit=int(MEMORY_SHARE * psutil.virtual_memory().total),
            max_batch_size=batch_size,
            block_size=shape.block_size,
            prefill_chunk=shape.prefill_chunk,
            max_stall_ms=0,  # all sides read prompts in chunks of one size
            **{**shape.codec_settings, **settings},
        )
        self._handles: list[Handle] = []
        self._seen_tokens: list[int] = []
        self._before = self.stats()

    def stats(self) -> Stats:
        return self._core.view.stats()

    @property
    def prefilled_tokens(self) -> int:
        return self.stats().prefilled_tokens - self._before.prefilled_tokens

    @property
    def prompt_read(self) -> int:
        """Cached and prefilled tokens; a prompt's last token is read by its first decode step."""
        return self.cached_tokens + self.prefilled_tokens

    @property
    def cached_tokens(self) -> int:
        return self.stats().hit_tokens - self._before.hit_tokens

    @property
    def model_seconds(self) -> float:
        """Seconds in the model and the sampler since the construction.

        The rest is overhead: block hashes, tree, ledger, scheduler, copies of KV, text.
        """
        return self.stats().model_seconds

    def learn(self, prefix: Sequence[int]) -> None:
        """Serve a request for one token after `prefix`, so that its whole blocks are cached."""
        self.cancel()
        self.submit([prefix], 1)
        while self._core.step():
            pass

    def submit(self, prompts: Prompts, max_tokens: int) -> None:
        """Submit one request per prompt."""
        self._before = self.stats()
        self._handles = [
            self._core.submit(Request(prompt=tuple(prompt), max_tokens=max_tokens, ignore_eos=True))
            for prompt in prompts
        ]
        self._seen_tokens = [0 for _ in prompts]

    def answers(self) -> list[list[int]]:
        """Step until every request has ended; return the tokens of each."""
        while self._core.step():
            pass
        ended, self._handles = self._handles, []
        return [handle.result(0.0)[0].tokens for handle in ended]

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._handles = []

    def step(self) -> Sequence[tuple[int, int]]:
        """Run one step, as the engine's thread does while nothing waits; return its new tokens."""
        self._core.step(send_later=True, pending=lambda: False)
        new: list[tuple[int, int]] = []
        for place, handle in enumerate(self._handles):
            answers = self._core.view.generated(handle)
            if not answers:
                raise AssertionError(f"sequence {place} ended while it was measured")
            (tokens,) = answers
            new += [(place, token) for token in tokens[self._seen_tokens[place] :]]
            self._seen_tokens[place] = len(tokens)
        return new

    def settle(self) -> None:
        """Do nothing: nothing is in flight after a step of the core."""

    def close(self) -> None:
        self._core.close()
