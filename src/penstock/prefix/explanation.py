"""Explanation of a cache look-up: how far a prompt matched, and why no further."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Why: TypeAlias = Literal["limit", "pressure", "cleared", "lost"]
"""Cause of an eviction: the memory limit, memory pressure, a request to clear the cache, or the
loss of KV stored only in a cold tier."""

CAUSES: dict[Why, str] = {
    "limit": "to stay inside the memory limit of {limit}; raise memory_limit (--memory-limit) to "
    "keep more",
    "pressure": "because the machine ran short of memory; close other programs, or "
    "raise memory_threshold (--memory-threshold)",
    "cleared": "because the cache was cleared",
    "lost": "because its keys and values were in a cold tier alone, and could not be read back",
}
EVICTION_BYTES = 300
"""Python overhead of one remembered block, in bytes: 170 to 280 by tracemalloc."""


class Eviction(NamedTuple):
    """Time and cause of a block's eviction."""

    at_seconds: float
    why: Why


class EvictionLog:
    """Log of the time and cause of the last `capacity` evicted blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_key: OrderedDict[bytes, Eviction] = OrderedDict()  # in order of evicting

    @property
    def nbytes(self) -> int:
        """Upper bound of the log's size in bytes."""
        return EVICTION_BYTES * self.capacity

    def note(self, block_hashes: Sequence[bytes], at_seconds: float, why: Why) -> None:
        gone = Eviction(at_seconds, why)
        for key in reversed(block_hashes[: self.capacity]):  # the first block is forgotten last
            self._by_key[key] = gone
            self._by_key.move_to_end(key)
        while len(self._by_key) > self.capacity:
            self._by_key.popitem(last=False)

    @property
    def forgets(self) -> bool:
        """Whether the log is full, so that older evictions are forgotten."""
        return len(self._by_key) >= self.capacity

    def find(self, key: bytes) -> Eviction | None:
        return self._by_key.get(key)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Length of a prompt's cached prefix, and the reason why it is not longer."""

    prompt_tokens: int
    held_tokens: int
    """Number of tokens in the cached whole blocks and the partial block after them."""
    diverges_at: int | None
    """Index of the first token that differs from the nearest cached prompt."""
    held_token: int | None
    """Token at that position in the cached prompt."""
    given_token: int | None
    reason: str
    evicted_seconds_ago: float | None = None
    """Seconds since the next block was evicted; None if unknown."""
    evicted_for: Why | None = None
    held_text: str | None = None
    """Text of `held_token`, if a tokenizer is available."""
    given_text: str | None = None
    reusable_tokens: int | None = None
    """Length of the cached prefix that can be reused: up to the last boundary where every recurrent
    layer has a checkpoint and every window is complete, and before the last token's block if full
    blocks are quantized. None if all but the last token can be reused, and the model has no
    recurrent layers."""
    tier_tokens: int | None = None
    """Cached tokens in the cold tiers; None if not requested, or without a tier."""
    volatile: str | None = None
    """Kind of the text that changes at `diverges_at`, such as "date" or "counter"; None if
    unknown."""
    volatile_held: str | None = None
    """Volatile text of the cached prompt."""
    volatile_given: str | None = None
    """Volatile text of the explained prompt."""
