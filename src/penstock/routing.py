"""Choice of a replica for a prompt, without clock, threads or arrays.

    replica's tree --Summary--> Router.update      the blocks it holds, every few seconds
    prompt's keys  --Router.choose--> Routed       the chosen replica
                   --Router.sent-->                blocks that it will soon have

`penstock bench cluster` and `penstock serve --ray` use this router, so the simulation runs the
production code.

A summary has the first 32 bits of the hash of every block that a replica has: 4 bytes per block. A
replica with n blocks seems to have a missing block with a probability of n / 2^32. That is 2 in a
million at 10,000 blocks, 2 in 10,000 at a million. A Bloom filter of 10 bits per block is wrong in
1 of 100 lookups and cannot forget evicted blocks; changes of this summary can be sent. A false
positive routes one prompt to a worse replica, but never gives a wrong answer: replicas look up full
hashes.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from penstock.config import WORTH, RoutingPolicy

POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)
SHORT_BYTES = 4
"""Bytes of a block hash in a summary."""
HASH_BLOCKS = 2
"""Number of leading blocks that identify a prompt without a cache key."""
RECENT = 256
"""Number of recent prompts whose blocks the router remembers."""
COMMON = 16
"""Number of recent prompts with a block from which it is common, and costs only 1 to recompute."""
MOST_ASKED = 16
"""Maximum number of equal replicas compared by load; of more, two random ones are compared."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Blocks that a replica has cached, as the first 32 bits of their hashes.

    >>> known = Summary.of([b"abcd and 12 bytes", b"efgh and 12 bytes"])
    >>> known.nbytes, Summary.from_bytes(known.to_bytes()) == known
    (8, True)
    """

    blocks: frozenset[int]

    @classmethod
    def of(cls, block_hashes: Iterable[bytes]) -> Summary:
        return cls(frozenset(short(key) for key in block_hashes))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Summary:
        if len(raw) % SHORT_BYTES:
            raise ValueError(f"a summary has {SHORT_BYTES} bytes a block; {len(raw)} are none")
        return cls(frozenset(np.frombuffer(raw, "<u4").tolist()))

    def to_bytes(self) -> bytes:
        """Return 4 bytes per block, in ascending order."""
        blocks = np.fromiter(self.blocks, "<u4", len(self.blocks))
        blocks.sort()
        return blocks.tobytes()

    @property
    def nbytes(self) -> int:
        return SHORT_BYTES * len(self.blocks)


def short(key: bytes) -> int:
    """Return the first 32 bits of a block hash, which represent the block in summaries."""
    return int.from_bytes(key[:SHORT_BYTES], "little")


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    block_hashes: Sequence[bytes]
    cache_key: str | None = None
    """The client's `prompt_cache_key`; None without one."""

    def identity(self, blocks: int = HASH_BLOCKS) -> bytes:
        """Return the bytes to hash: the cache key, or the hash of the prompt's leading blocks."""
        if self.cache_key is not None:
            return self.cache_key.encode()
        return (
            self.block_hashes[min(blocks, len(self.block_hashes)) - 1] if self.block_hashes else b""
        )


@dataclass(frozen=True, slots=True)
class Routed:
    replica: str
    known_blocks: int
    """Number of the prompt's leading blocks that the replica is expected to have cached."""


@dataclass(slots=True)
class _ReplicaState:
    bit: int
    seed: int
    reported: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    """Blocks of prompts sent to the replica since its last report, except reported ones."""
    sent_before: set[int] = field(default_factory=set)
    """Content of `sent` at the last report."""

    def holds(self, block: int) -> bool:
        return block in self.reported or block in self.sent or block in self.sent_before

    @property
    def size(self) -> int:
        return len(self.reported) + len(self.sent) + len(self.sent_before)


class Router:
    """Chooses a replica for each prompt. Not thread-safe.

    - `round-robin`: replicas in turn.
    - `hash`: the same replica for the same cache key, or the same first blocks (rendezvous
      hashing). When a replica leaves, its prompts are spread over the others, and no other prompts
      move.
    - `prefix`: a replica that holds the longest prefix; among equals, as with `hash`.
    - `prefix+load`: the replica with the least work: its waiting blocks, plus the blocks of this
      prompt that it would have to compute. Such a block counts `worth`, or 1 if many prompts have
      it. So a conversation stays on its replica unless that is overloaded, and a common system
      prompt spreads to more replicas. Among many replicas with the same number of cached blocks,
      two are drawn at random, and the one with less work is chosen (the power of two choices).

    Args:
        policy: one of `POLICIES`.
        seed: random seed.
        hash_blocks: number of leading blocks that identify a prompt without a cache key.
        worth: cost of recomputing a block of one conversation, in waiting blocks.

    >>> router = Router("prefix+load")
    >>> router.join("a"), router.join("b")
    (None, None)
    >>> keys = [bytes([i]) * 16 for i in range(4)]
    >>> router.update("b", Summary.of(keys))
    >>> router.choose(RoutedPrompt(keys), {})
    Routed(replica='b', known_blocks=4)
    >>> router.choose(RoutedPrompt(keys), {"b": 33.0})  # more waits there than 4 blocks are worth
    Routed(replica='a', known_blocks=0)
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        seed: int = 0,
        hash_blocks: int = HASH_BLOCKS,
        worth: float = WORTH,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy}")
        if not worth > 0:
            raise ValueError(f"worth must be positive, not {worth}")
        if hash_blocks < 1:
            raise ValueError(f"hash_blocks must be at least 1, not {hash_blocks}")
        self.policy = policy
        self._random = random.Random(seed)
        self._hash_blocks = hash_blocks
        self._worth = worth
        self._places: dict[str, _ReplicaState] = {}
        self._names: list[str] = []  # by bit; "" where one has left
        self._index: dict[int, int] = {}  # short hash -> mask of the replicas that have it
        self._recent: deque[list[int]] = deque()
        self._uses: dict[int, int] = {}  # short hash -> number of recent prompts with it
        self._turn = 0
        self._recount()

    @property
    def replicas(self) -> tuple[str, ...]:
        return self._replicas

    @property
    def index_bytes(self) -> int:
        return sys.getsizeof(self._index) + sum(
            sys.getsizeof(block) + sys.getsizeof(mask) for block, mask in self._index.items()
        )

    def known(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks that each replica seems to have; omits zeros."""
        lengths: dict[str, int] = {}
        for blocks, mask in self._levels(block_hashes):
            for name in self._named(mask):
                lengths.setdefault(name, blocks)
        return lengths

    def prices(self, block_hashes: Sequence[bytes]) -> list[float]:
        """Return the costs of computing all blocks after the first 0, 1, 2, ..."""
        block_prices = [
            1.0 if self._uses.get(short(key), 0) >= COMMON else self._worth for key in block_hashes
        ]
        return [*accumulate(reversed(block_prices), initial=0.0)][::-1]

    def choose(self, prompt: RoutedPrompt, loads: Mapping[str, float]) -> Routed:
        """Choose a replica, given the waiting blocks of each in `loads`.

        Raises LookupError if no replica has joined. Advances `round-robin` and the random state.
        """
        if not self._places:
            raise LookupError("no replica has joined")
        if self.policy == "round-robin":
            name = self.replicas[self._turn % len(self._places)]
            self._turn += 1
            return self._routed(prompt, name)
        if self.policy == "hash":
            return self._routed(prompt, self._hashed(prompt))
        if self.policy == "prefix":
            return self._longest(prompt)
        return self._soonest(prompt, loads)

    def join(self, replica: str) -> None:
        if not replica:
            raise ValueError("a replica needs a name")
        if replica in self._places:
            return
        bit = next((i for i, name in enumerate(self._names) if not name), len(self._names))
        if bit == len(self._names):
            self._names.append("")
        self._names[bit] = replica
        seed = int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), "little")
        self._places[replica] = _ReplicaState(bit, seed)
        self._recount()

    def leave(self, replica: str) -> None:
        place = self._places.get(replica)
        if place is None:
            return
        del self._places[replica]
        for block in place.reported | place.sent | place.sent_before:
            self._mark(block, place.bit, present=False)
        self._names[place.bit] = ""
        self._recount()

    def update(self, replica: str, summary: Summary) -> None:
        """Replace the blocks of a replica by a summary's; raises KeyError if it has not joined."""
        place = self._places[replica]
        self.change(replica, summary.blocks - place.reported, place.reported - summary.blocks)

    def change(self, replica: str, added: Iterable[int], removed: Iterable[int]) -> None:
        place = self._places[replica]
        added, removed = set(added), set(removed)
        place.reported |= added
        place.reported -= removed
        forgotten = place.sent_before
        place.sent_before, place.sent = place.sent - place.reported, set()
        for block in added | removed | forgotten:
            self._mark(block, place.bit, present=place.holds(block))

    def sent(self, replica: str, block_hashes: Sequence[bytes]) -> None:
        place = self._places[replica]
        blocks = [short(key) for key in block_hashes]
        self._use(blocks)
        new = set(blocks) - place.reported  # the replica will report the eviction of these
        for block in new:
            self._mark(block, place.bit, present=True)
        place.sent |= new

    def check(self) -> None:
        recount: dict[int, int] = {}
        for place in self._places.values():
            for block in place.reported | place.sent | place.sent_before:
                recount[block] = recount.get(block, 0) | 1 << place.bit
        if recount != self._index:
            raise AssertionError(f"{len(self._index)} blocks indexed, {len(recount)} are held")

    # ---- inside

    def _use(self, blocks: list[int]) -> None:
        self._recent.append(blocks)
        for block in blocks:
            self._uses[block] = self._uses.get(block, 0) + 1
        if len(self._recent) > RECENT:
            for block in self._recent.popleft():
                self._uses[block] -= 1
                if not self._uses[block]:
                    del self._uses[block]

    def _mark(self, block: int, bit: int, *, present: bool) -> None:
        mask = self._index.get(block, 0)
        mask = mask | 1 << bit if present else mask & ~(1 << bit)
        if mask:
            self._index[block] = mask
        else:
            self._index.pop(block, None)

    def _recount(self) -> None:
        self._everybody = sum(1 << place.bit for place in self._places.values())
        self._replicas = tuple(self._places)
        self._seeds = np.array([place.seed for place in self._places.values()], np.uint64)

    def _levels(self, block_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return pairs of a number of leading blocks and a mask of replicas, most blocks first."""
        levels: list[tuple[int, int]] = []
        mask = (1 << len(self._names)) - 1
        for blocks, key in enumerate(block_hashes):
            further = self._index.get(short(key), 0) & mask
            if blocks and further != mask:
                levels.append((blocks, mask & ~further))
            mask = further
            if not mask:
                break
        else:
            if block_hashes:
                levels.append((len(block_hashes), mask))
        return levels[::-1]

    def _named(self, mask: int) -> Iterator[str]:
        while mask:
            lowest = mask & -mask
            yield self._names[lowest.bit_length() - 1]
            mask ^= lowest

    def _some(self, mask: int) -> list[str]:
        if mask.bit_count() <= MOST_ASKED:
            return list(self._named(mask))
        drawn: list[str] = []
        while len(drawn) < 2:
            bit = self._random.randrange(len(self._names))
            if mask >> bit & 1 and self._names[bit] not in drawn:
                drawn.append(self._names[bit])
        return drawn

    def _hashed(self, prompt: RoutedPrompt, among: Sequence[str] | None = None) -> str:
        names = self.replicas if among is None else among
        seeds = self._seeds
        if among is not None:
            seeds = np.array([self._places[name].seed for name in among], np.uint64)
        name = blake2b(prompt.identity(self._hash_blocks), digest_size=8).digest()
        scores = _mixed(seeds ^ np.uint64(int.from_bytes(name, "little")))
        return names[int(scores.argmax())]

    def _longest(self, prompt: RoutedPrompt) -> Routed:
        levels = self._levels(prompt.block_hashes)
        if not levels:
            return Routed(self._hashed(prompt), 0)
        blocks, mask = levels[0]
        return Routed(self._hashed(prompt, list(self._named(mask))), blocks)

    def _soonest(self, prompt: RoutedPrompt, loads: Mapping[str, float]) -> Routed:
        levels, prices = self._levels(prompt.block_hashes), self.prices(prompt.block_hashes)
        knowing = 0
        for _, mask in levels:
            knowing |= mask
        if self._everybody & ~knowing:
            levels.append((0, self._everybody & ~knowing))
        best: tuple[float, Routed] | None = None
        for blocks, mask in levels:
            missing = prices[blocks]
            if best is not None and missing >= best[0]:
                break  # replicas with fewer cached blocks cannot be faster, even if idle
            name = min(self._some(mask), key=lambda name: self._busy(name, loads))
            cost = loads.get(name, 0.0) + missing
            if best is None or cost < best[0]:
                best = cost, Routed(name, blocks)
        assert best is not None  # there is a replica, so there is a level
        return best[1]

    def _busy(self, name: str, loads: Mapping[str, float]) -> tuple[float, int, float]:
        """Return a sort key for equal replicas: load, number of blocks, random number."""
        return loads.get(name, 0.0), self._places[name].size, self._random.random()

    def _routed(self, prompt: RoutedPrompt, name: str) -> Routed:
        place = self._places[name]
        known = 0
        for key in prompt.block_hashes:
            if not place.holds(short(key)):
                break
            known += 1
        return Routed(name, known)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each value, the finalizer of splitmix64 (Steele, Lea & Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
