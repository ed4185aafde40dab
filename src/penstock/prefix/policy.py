"""Value of a node: expected prefill seconds saved, per byte.

Each use of a node saves its prefill. The number of future uses is estimated from past ones, which
lose half of their weight after every half life:

    uses(t)  =  sum over uses at t_i of 2 ^ -((t - t_i) / half life)
    value(t) =  uses(t) x prefill seconds / bytes

All values halve at the same rate, so their order changes only at a use. A node stores the logarithm
of its value without the common factor, which never needs an update:

    heat  =  log2 sum 2 ^ (t_i / half life)
    worth =  heat + log2(prefill seconds / bytes)

A short half life approaches LRU, an infinite one LFU (LRFU, Lee et al. 2001). There are two
extensions, both measured (docs/prefix.md):

- The heat of evicted nodes is remembered for a while, so that a prompt that returns shortly after
  its eviction keeps its earlier uses. Small caches need this most.
- The larger the cache, the less earlier uses count. A large cache keeps nodes for two half lives
  after their last use, so a prompt that returns in time is still cached, and keeping once popular
  prompts longer would waste memory. There, only the last use counts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import exp2, inf, log2
from typing import Protocol

HALF_LIFE_SECONDS = 300.0
REMEMBERED_NODES = 16_384
REMEMBERED_BYTES = 200
"""Python overhead of one remembered node, in bytes: 150 to 190 by tracemalloc."""
MOST_ADDED = 4.0
"""Maximum half lives by which earlier uses prolong a node's stay, in the smallest cache."""
IDLE_HALF_LIVES = 2.0
"""Half lives of idleness from which on only the last use counts."""
SMOOTHING_NODES = 256
"""Number of evicted nodes over which their idle time is averaged."""
COLD = -inf
"""Heat of a node without uses."""


class Policy(Protocol):
    """Values nodes for eviction, least valuable first. Owned by one tree; reads no clock.

    The value of a node changes only at a use, a split or a merge.
    """

    @property
    def nbytes(self) -> int:
        """Upper bound of the policy's own size in bytes."""

    def used(self, heat: float, now_seconds: float) -> float: ...
    def joined(self, heat: float, nbytes: int, other: float, other_nbytes: int) -> float: ...
    def worth(self, heat: float, start: int, end: int, nbytes: int) -> float: ...

    def forget(self, key: bytes, heat: float, last_used_seconds: float) -> None:
        """Remember the heat of an evicted node, whose first block is `key`."""

    def recall(self, key: bytes) -> float:
        """Return the heat of a node at its eviction, and forget it; COLD if not remembered."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Prefill time of the first n tokens: per_token x n + per_token_pair x n^2 / 2 seconds.

    The second term is attention. Only the ratio of the two affects decisions.
    """

    per_token: float = 1.0
    per_token_pair: float = 0.0

    def seconds(self, start: int, end: int) -> float:
        return (end - start) * (self.per_token + self.per_token_pair * (start + end) / 2)


class HalfLife:
    def __init__(
        self,
        half_life_seconds: float = HALF_LIFE_SECONDS,
        *,
        cost: PrefillCost | None = None,
        remembered_nodes: int = REMEMBERED_NODES,
    ) -> None:
        if not half_life_seconds > 0:
            raise ValueError(f"half_life_seconds must be positive, not {half_life_seconds}")
        if remembered_nodes < 0:
            raise ValueError(f"remembered_nodes must not be negative: {remembered_nodes}")
        self.half_life_seconds = half_life_seconds
        self.cost = cost or PrefillCost()
        self.remembered_nodes = remembered_nodes
        self._now_seconds = -inf
        self._idle_seconds = inf  # nothing evicted yet, as in an unlimited cache
        self._remembered: OrderedDict[bytes, float] = OrderedDict()  # in order of evicting

    @property
    def nbytes(self) -> int:
        return REMEMBERED_BYTES * self.remembered_nodes

    def used(self, heat: float, now_seconds: float) -> float:
        self._now_seconds = max(self._now_seconds, now_seconds)
        once = now_seconds / self.half_life_seconds
        return min(_log2_sum(heat, once), once + self.most_added)

    @property
    def most_added(self) -> float:
        """Half lives by which earlier uses prolong a node's stay; fewer as nodes idle longer."""
        idle = self._idle_seconds / self.half_life_seconds
        return MOST_ADDED * max(0.0, 1 - idle / IDLE_HALF_LIVES)

    def joined(self, heat: float, nbytes: int, other: float, other_nbytes: int) -> float:
        share = nbytes / max(1, nbytes + other_nbytes)
        return _log2_sum(heat + _log2(share), other + _log2(1 - share))

    def worth(self, heat: float, start: int, end: int, nbytes: int) -> float:
        return heat + _log2(self.cost.seconds(start, end) / max(1, nbytes))

    def forget(self, key: bytes, heat: float, last_used_seconds: float) -> None:
        idle = max(0.0, self._now_seconds - last_used_seconds)
        if self._idle_seconds == inf:
            self._idle_seconds = idle
        self._idle_seconds += (idle - self._idle_seconds) / SMOOTHING_NODES
        self._remembered.pop(key, None)
        self._remembered[key] = heat
        if len(self._remembered) > self.remembered_nodes:
            self._remembered.popitem(last=False)

    def recall(self, key: bytes) -> float:
        return self._remembered.pop(key, COLD)


def _log2(value: float) -> float:
    return log2(value) if value > 0 else -inf


def _log2_sum(a: float, b: float) -> float:
    """Return log2(2^a + 2^b) without computing either."""
    low, high = min(a, b), max(a, b)
    return high if low == -inf else high + log2(1 + exp2(low - high))
