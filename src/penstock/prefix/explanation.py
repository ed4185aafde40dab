"""Why a prompt is not found any further, and what to change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Why: TypeAlias = Literal["limit", "pressure", "cleared"]
"""Cause of an eviction: the memory limit, memory pressure of the machine, or a request to clear."""

CAUSES: dict[Why, str] = {
    "limit": "to stay inside the memory limit of {limit}; raise memory_limit to keep more",
    "pressure": "because the machine ran short of memory; leave it more, or let more of it be "
    "used (memory_threshold)",
    "cleared": "because all was to be evicted",
}
GIVEN_UP_BYTES = 300
"""Python overhead of one remembered block, in bytes: 170 to 280 by tracemalloc."""


class Eviction(NamedTuple):
    """The end of what was held."""

    at_seconds: float
    why: Why


class EvictionLog:
    """Which blocks were evicted last, when and why: `most` of them, whatever happens."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_key: OrderedDict[bytes, Eviction] = OrderedDict()  # in order of evicting

    @property
    def nbytes(self) -> int:
        """Bytes of Python that this may come to hold, to be counted once."""
        return GIVEN_UP_BYTES * self.most

    def note(self, block_hashes: Sequence[bytes], at_seconds: float, why: Why) -> None:
        """Remember that the blocks `keys`, a run of a chain, were evicted."""
        gone = Eviction(at_seconds, why)
        for key in reversed(block_hashes[: self.most]):  # the run's first block is forgotten last
            self._by_key[key] = gone
            self._by_key.move_to_end(key)
        while len(self._by_key) > self.most:
            self._by_key.popitem(last=False)

    def find(self, key: bytes) -> Eviction | None:
        """Return how the block was last evicted, or None if that is not known."""
        return self._by_key.get(key)


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a prompt would match, and why no further."""

    prompt_tokens: int
    held_tokens: int
    """Tokens of whole blocks that are held."""
    diverges_at: int | None
    """Index of the first token that differs from the nearest prompt that is held."""
    held_token: int | None
    """The token that stands there in what is held."""
    given_token: int | None
    reason: str
    given_up_seconds_ago: float | None = None
    """Seconds since the next block was evicted; None if that is not remembered."""
    given_up_for: Why | None = None
    held_text: str | None = None
    """Text of `held_token`, where a tokenizer is at hand."""
    given_text: str | None = None
    resume_tokens: int | None = None
    """Length of the cached prefix that can be reused: up to the last boundary where every recurrent
    layer has a checkpoint and every window is complete. None if all of it can be, in a model
    without recurrent layers."""
    tier_tokens: int | None = None
    """First tokens whose blocks a cold tier has; None if that was not asked, or there is none."""
