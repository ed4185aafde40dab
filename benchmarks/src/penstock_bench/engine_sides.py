"""The sides of an engine bench: ours without its thread, behind one protocol with mlx-lm's."""

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
"""Share of the machine's memory that is the engine's limit: no bench is about running out of it."""

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """An engine under test. Sequences are numbered as their prompts were handed in."""

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompts that are in caches by now."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: known before, or computed for another prompt."""

    @property
    def model_seconds(self) -> float:
        """Seconds of the model and the sampler so far; 0 where they are not measured apart."""

    def learn(self, prefix: Sequence[int]) -> None:
        """Read `prefix` and keep it for prompts that begin with it."""

    def submit(self, prompts: Prompts, max_tokens: int) -> None:
        """Hand all prompts in at once."""

    def cancel(self) -> None:
        """Cancel the prompts that were handed in, and drop all that was read for them alone."""

    def step(self) -> Sequence[tuple[int, int]]:
        """Run one step and return (sequence, token) of all that came out."""

    def settle(self) -> None:
        """Wait until nothing is in flight."""

    def close(self) -> None:
        """Stop. Its memory goes with the object."""


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
        """Whether keys and values are held as they are, so that texts are mlx-lm's."""
        return self.kv_cache_quantization is None

    @property
    def codec_settings(self) -> dict[str, Any]:
        """Settings of codecs, as the engine takes them."""
        names = (
            "kv_cache_quantization",
            "kv_cache_min_quantize_tokens",
            "kv_cache_raw_first_tokens",
        )
        return {} if self.exact else {name: getattr(self, name) for name in names}


class Ours:
    """Penstock's engine without its thread: one `Core.step` a step."""

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
        """Return the engine's figures."""
        return self._core.view.stats()

    @property
    def prefilled_tokens(self) -> int:
        """Prefilled tokens since the submission."""
        return self.stats().prefilled_tokens - self._before.prefilled_tokens

    @property
    def prompt_read(self) -> int:
        """Hits and prefilled tokens; a prompt's last token is read by its first decode step."""
        return self.cached_tokens + self.prefilled_tokens

    @property
    def cached_tokens(self) -> int:
        """Hits since the submission."""
        return self.stats().hit_tokens - self._before.hit_tokens

    @property
    def model_seconds(self) -> float:
        """Seconds of the model and the sampler, in all steps since the construction.

        The rest is the machinery: block hashes, tree, ledger, scheduler, copies of KV, text.
        """
        return self.stats().model_seconds

    def learn(self, prefix: Sequence[int]) -> None:
        """Serve a request for one token after `prefix`: its whole blocks stay."""
        self.cancel()
        self.submit([prefix], 1)
        while self._core.step():
            pass

    def submit(self, prompts: Prompts, max_tokens: int) -> None:
        """Submit one request a prompt."""
        self._before = self.stats()
        self._handles = [
            self._core.submit(Request(prompt=tuple(prompt), max_tokens=max_tokens, ignore_eos=True))
            for prompt in prompts
        ]
        self._seen_tokens = [0 for _ in prompts]

    def answers(self) -> list[list[int]]:
        """Run steps until every request has ended, and return the tokens of each."""
        while self._core.step():
            pass
        ended, self._handles = self._handles, []
        return [handle.result(0.0)[0].tokens for handle in ended]

    def cancel(self) -> None:
        """Cancel the requests."""
        for handle in self._handles:
            handle.cancel()
        self._handles = []

    def step(self) -> Sequence[tuple[int, int]]:
        """Run one step, as the engine's thread does, and return its new tokens."""
        self._core.step(send_later=True)
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
        """Do nothing: after a step of the core nothing is in flight."""

    def close(self) -> None:
        """Close the core."""
        self._core.close()
