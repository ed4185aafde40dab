"""Simulation of many replicas: real prefix trees and router, linear machine model, no arrays.

trace, in parts ──arrivals──> Router ──> queue ─> reading ─> answering      of each replica
                                ▲                   │
                                └──── summaries ────┘  every `gossip_seconds`
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from itertools import count, islice

from penstock.config import WORTH, RoutingPolicy
from penstock.prefix import HalfLife, hash_blocks, root_hash
from penstock.routing import SHORT_BYTES, RoutedPrompt, Router, short
from penstock_bench.bench_settings import Machine
from penstock_bench.blank import BlankPrefixes
from penstock_bench.trace import Trace, Visit

COMMON_SHARE = 0.05
"""Minimum share of a trace's requests for a block to count as shared (a system prompt).

A shared block is the same in all copies of the trace. All other blocks are per user.
"""
GOLDEN = 0.6180339887
SHIFT_SECONDS = 60.0
"""Largest delay of a copy of the trace; copies are evenly spaced."""
NODE_BLOCKS = 4
ROOT = root_hash("trace")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings of the replicas and their routing."""

    replicas: int
    policy: RoutingPolicy
    routers: int = 1
    """Number of routers, used in turn; each knows only its own requests at once."""
    gossip_seconds: float = 5.0
    """Seconds between two summaries of a replica."""
    worth: float = WORTH
    """Cost of recomputing a block of one conversation, in waiting blocks."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of one copy of the trace."""

    seconds: float
    visit: Visit
    blocks: tuple[int, ...]
    """Block ids of the visit; per-user blocks have different ids in each copy."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run."""

    requests: int
    hit_rate: float
    """Share of all prompt tokens that were cached on the chosen replica."""
    imbalance: float
    """Busy seconds of the busiest replica over the mean."""
    wait_p50_seconds: float
    wait_p95_seconds: float
    """95th percentile of the seconds from arrival to first token."""
    queue_p95_seconds: float
    """95th percentile of the seconds from arrival to prefill."""
    busy: float
    """Mean share of the time that replicas prefill."""
    gossip_bytes_per_second: float
    """Bytes per second of all summary changes, to all routers."""
    whole_bytes_per_second: float
    """Bytes per second if full summaries were sent each time."""
    router_bytes: int
    """Bytes of one router's index at the end."""
    evictions: int


class TraceCopies:
    """Trace scaled to many replicas: each gets one more part of whole conversations.

    `split` parts are the original trace. Further parts are copies, in which all blocks but shared
    ones have other ids, and which start a little later.
    """

    def __init__(self, trace: Trace, split: int) -> None:
        if split < 1:
            raise ValueError(f"split must be at least 1, not {split}")
        self._trace = trace
        self._split = split
        seen = Counter(block for visit in trace.visits for block in set(visit.blocks))
        least = COMMON_SHARE * len(trace.visits)
        self._common = {block for block, times in seen.items() if times >= least}
        self._stride = max(seen) + 1
        self._parts: list[list[Visit]] = [[] for _ in range(split)]
        for visit in trace.visits:
            self._parts[self._conversation(visit) % split].append(visit)

    def _conversation(self, visit: Visit) -> int:
        first_own = next((block for block in visit.blocks if block not in self._common), 0)
        return (first_own * 2_654_435_761 & 0xFFFFFFFF) >> 8  # Knuth: neighbors come apart

    def arrivals(self, replicas: int, limit: int | None = None) -> list[Arrival]:
        """Return the requests for `replicas` replicas by time, at most the first `limit`."""
        copies = [self._copy(number) for number in range(replicas)]
        return list(islice(merge(*copies, key=lambda arrival: arrival.seconds), limit))

    def _copy(self, number: int) -> Iterator[Arrival]:
        copy, part = divmod(number, self._split)
        late, offset = copy * GOLDEN % 1.0 * SHIFT_SECONDS, copy * self._stride
        for visit in self._parts[part]:
            blocks = visit.blocks
            if offset:
                blocks = tuple(b if b in self._common else b + offset for b in blocks)
            yield Arrival(visit.seconds + late, visit, blocks)


def one_large(trace: Trace, arrivals: Sequence[Arrival], machine: Machine, replicas: int) -> float:
    """Return the hit rate of a single replica with all the memory and no queueing."""
    capacity = replicas * capacity_blocks(trace, machine)
    prefixes = BlankPrefixes(capacity, HalfLife(), NODE_BLOCKS)
    hit_tokens = prompt_tokens = 0
    for arrival in arrivals:
        block_hashes = hash_blocks(arrival.blocks, 1, ROOT)
        matched = prefixes.serve(arrival.blocks, block_hashes, arrival.seconds)
        hit_tokens += trace.tokens_of(arrival.visit, matched)
        prompt_tokens += arrival.visit.input_tokens
    prefixes.check()
    return hit_tokens / max(1, prompt_tokens)


def capacity_blocks(trace: Trace, machine: Machine) -> int:
    return max(1, machine.memory_tokens // trace.block_tokens)


def simulate(
    trace: Trace,
    arrivals: Sequence[Arrival],
    cluster: Cluster,
    machine: Machine,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Send every request through the router, a queue and a prefix tree; deterministic.

    Args:
        trace: the trace.
        arrivals: requests by time.
        cluster: settings of the replicas.
        machine: speed and memory of a replica.
        progress: takes the number of arrived requests, now and then.
    """
    return _Simulation(trace, cluster, machine).run(arrivals, progress)


# ---- inside


@dataclass(slots=True)
class _QueuedRequest:
    """Request in the queue of a replica, or running."""

    arrival: Arrival
    block_hashes: list[bytes]
    expected_blocks: float
    """Blocks that the router expects to be computed."""


@dataclass(slots=True)
class _Replica:
    """One engine: prompts are prefilled one at a time, answers are decoded concurrently."""

    name: str
    prefixes: BlankPrefixes
    waiting: deque[_QueuedRequest] = field(default_factory=deque)
    reading: _QueuedRequest | None = None
    answering: int = 0
    busy_seconds: float = 0.0
    changed: dict[int, bool] = field(default_factory=dict)
    """Short hashes added (True) or evicted (False) since the last gossip."""
    held_blocks: int = 0

    def note(self, block_hashes: Sequence[bytes], added: bool) -> None:
        """Record blocks that were added or evicted."""
        self.held_blocks += len(block_hashes) if added else -len(block_hashes)
        self.changed.update((short(block_hash), added) for block_hash in block_hashes)


class _Simulation:
    def __init__(self, trace: Trace, cluster: Cluster, machine: Machine) -> None:
        self._trace, self._cluster, self._machine = trace, cluster, machine
        names = [f"replica {number}" for number in range(cluster.replicas)]
        self._replicas = {name: self._replica(name) for name in names}
        self._routers = [
            Router(cluster.policy, seed=seed, worth=cluster.worth)
            for seed in range(cluster.routers)
        ]
        for router in self._routers:
            for name in names:
                router.join(name)
        self._gossips = cluster.policy in ("prefix", "prefix+load")
        # Routers ask replicas for their queues when they need them; summaries alone are old.
        self._loads = dict.fromkeys(names, 0.0)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._hit_tokens = self._prompt_tokens = 0
        self._gossip_bytes = self._whole_bytes = 0
        self._waits: list[float] = []
        self._queued: list[float] = []

    def _replica(self, name: str) -> _Replica:
        capacity = capacity_blocks(self._trace, self._machine)
        replica = _Replica(name, BlankPrefixes(capacity, HalfLife(), NODE_BLOCKS))
        replica.prefixes.on_change = replica.note
        return replica

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None]) -> Outcome:
        """Process all arrivals in order, then finish the open requests."""
        next_gossip = now = 0.0
        for number, arrival in enumerate(arrivals):
            while next_gossip <= arrival.seconds:
                self._until(next_gossip)
                self._gossip()
                next_gossip += self._cluster.gossip_seconds
            self._until(arrival.seconds)
            self._arrive(number, arrival)
            if number % 256 == 0:
                progress(number)
        last = arrivals[-1].seconds
        while self._events:
            now, _, act = heappop(self._events)
            act(now)
        progress(len(arrivals))
        return self._outcome(len(arrivals), last, max(now, last))

    def _until(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            now, _, act = heappop(self._events)
            act(now)

    def _at(self, seconds: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (seconds, next(self._order), act))

    def _arrive(self, number: int, arrival: Arrival) -> None:
        router = self._routers[number % len(self._routers)]
        block_hashes = hash_blocks(arrival.blocks, 1, ROOT)
        routed = router.choose(RoutedPrompt(block_hashes), self._loads)
        if self._gossips:
            router.sent(routed.replica, block_hashes)
        replica = self._replicas[routed.replica]
        request = _QueuedRequest(arrival, block_hashes, len(block_hashes) - routed.known_blocks)
        self._loads[replica.name] += request.expected_blocks
        replica.waiting.append(request)
        self._begin(replica, arrival.seconds)

    def _begin(self, replica: _Replica, now: float) -> None:
        """Start the next prefill if the replica is idle and has a free slot."""
        if replica.reading or not replica.waiting:
            return
        if replica.answering >= self._machine.max_batch_size:
            return
        request = replica.reading = replica.waiting.popleft()
        visit = request.arrival.visit
        self._queued.append(now - request.arrival.seconds)
        match_tokens = replica.prefixes.tree.match(request.block_hashes).tokens
        hit_tokens = min(self._trace.tokens_of(visit, match_tokens), visit.input_tokens - 1)
        seconds = (visit.input_tokens - hit_tokens) / self._machine.prefill_rate
        replica.busy_seconds += seconds
        self._hit_tokens += hit_tokens
        self._prompt_tokens += visit.input_tokens
        self._at(now + seconds, lambda end: self._read(replica, request, end))

    def _read(self, replica: _Replica, request: _QueuedRequest, now: float) -> None:
        """Commit the blocks of a prefilled prompt, and start its answer."""
        self._waits.append(now - request.arrival.seconds)
        replica.prefixes.serve(request.arrival.blocks, request.block_hashes, now)
        replica.reading = None
        replica.answering += 1
        self._loads[replica.name] = max(0.0, self._loads[replica.name] - request.expected_blocks)
        seconds = request.arrival.visit.output_tokens / self._machine.decode_rate
        self._at(now + seconds, lambda end: self._end(replica, end))
        self._begin(replica, now)

    def _end(self, replica: _Replica, now: float) -> None:
        replica.answering -= 1
        self._begin(replica, now)

    def _gossip(self) -> None:
        """Send every replica's changes to the routers."""
        if not self._gossips:
            return
        for replica in self._replicas.values():
            self._whole_bytes += SHORT_BYTES * replica.held_blocks * len(self._routers)
            added = [short_hash for short_hash, was_added in replica.changed.items() if was_added]
            removed = [
                short_hash for short_hash, was_added in replica.changed.items() if not was_added
            ]
            self._gossip_bytes += SHORT_BYTES * len(replica.changed) * len(self._routers)
            replica.changed.clear()
            for router in self._routers:
                router.change(replica.name, added, removed)

    def _outcome(self, requests: int, last: float, end: float) -> Outcome:
        for replica in self._replicas.values():
            replica.prefixes.check()
        busy = [replica.busy_seconds for replica in self._replicas.values()]
        mean = sum(busy) / len(busy)
        return Outcome(
            requests=requests,
            hit_rate=self._hit_tokens / max(1, self._prompt_tokens),
            imbalance=max(busy) / mean if mean else 1.0,
            wait_p50_seconds=quantile(self._waits, 0.5),
            wait_p95_seconds=quantile(self._waits, 0.95),
            queue_p95_seconds=quantile(self._queued, 0.95),
            busy=mean / end if end else 0.0,
            gossip_bytes_per_second=self._gossip_bytes / last if last else 0.0,
            whole_bytes_per_second=self._whole_bytes / last if last else 0.0,
            router_bytes=self._routers[0].index_bytes,
            evictions=sum(replica.prefixes.evictions for replica in self._replicas.values()),
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed; 0 if empty.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
