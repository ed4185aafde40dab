"""Eviction order: a priority queue that finds the least valuable node in O(log n)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from penstock.prefix.node import Node, S
from penstock.prefix.policy import Policy

HELD_WORTH = 2.0**30
"""Value added to held nodes: more than any uses add. Floats still distinguish two held nodes
that were used a second apart."""
ROUNDING = 1e-6
"""Difference of two values of one node that counts as rounding error."""


class EvictionQueue:
    """Heap of ids by value. An id whose value has risen is requeued when it reaches the top.

    Stores only numbers, so it keeps no removed node alive.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._queued: dict[int, float] = {}  # id -> value in its one valid entry

    def __contains__(self, item: int) -> bool:
        return item in self._queued

    def queued(self, item: int) -> float | None:
        return self._queued.get(item)

    def offer(self, item: int, worth: float) -> None:
        """Queue `item`, unless it is already queued at this value or less."""
        queued = self._queued.get(item)
        if queued is not None and queued <= worth:
            return
        self._queued[item] = worth
        heappush(self._heap, (worth, item))

    def drop(self, item: int) -> None:
        self._queued.pop(item, None)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(worth, item) for item, worth in self._queued.items()]
            heapify(self._heap)

    def first(self, worth_of: Callable[[int], float | None]) -> int | None:
        """Return the least valuable id, leaving it queued; None if the queue is empty.

        `worth_of` returns the current value of an id, or None if it must not be evicted now; the id
        is then removed from the queue until it is offered again.
        """
        while self._heap:
            worth, item = self._heap[0]
            if self._queued.get(item) != worth:
                heappop(self._heap)
                continue
            present = worth_of(item)
            if present is None:
                heappop(self._heap)
                del self._queued[item]
            elif present > worth:
                heapreplace(self._heap, (present, item))
                self._queued[item] = present
            else:
                return item
        return None


class EvictionOrder(Generic[S]):
    def __init__(self, policy: Policy, nodes: Mapping[int, Node[S]]) -> None:
        self.policy = policy
        self._nodes = nodes
        self._queue = EvictionQueue()
        self._holds = EvictionQueue()  # held nodes, by the end of the hold

    def worth(self, node: Node[S]) -> float:
        worth = self.policy.worth(node.heat, node.start, node.end, node.segment.nbytes)
        return worth if node.held_until_seconds is None else worth + HELD_WORTH

    def first(self) -> Node[S] | None:
        node_id = self._queue.first(self._worth_if_evictable)
        return None if node_id is None else self._nodes[node_id]

    def offer(self, node: Node[S]) -> None:
        if _evictable(node):
            self._queue.offer(node.id, self.worth(node))

    def drop(self, node: Node[S]) -> None:
        self._queue.drop(node.id)
        self._holds.drop(node.id)

    def hold(self, node: Node[S], until_seconds: float) -> None:
        """Evict a node last until `until_seconds`, or until the end of a longer existing hold."""
        until = node.held_until_seconds
        node.held_until_seconds = until_seconds if until is None else max(until, until_seconds)
        self._holds.offer(node.id, node.held_until_seconds)

    def expire(self, now_seconds: float) -> None:
        while (node_id := self._holds.first(self._held_until)) is not None:
            node = self._nodes[node_id]
            if node.held_until_seconds is None or node.held_until_seconds > now_seconds:
                return
            node.held_until_seconds = None
            self._holds.drop(node_id)
            self.offer(node)

    def check(self, node: Node[S]) -> None:
        """Raise AssertionError if a node would be evicted too late, or be held forever."""
        queued = self._queue.queued(node.id)
        if _evictable(node) and queued is None:
            raise AssertionError(f"{node} will never be evicted")
        if _evictable(node) and queued is not None and queued > self.worth(node) + ROUNDING:
            raise AssertionError(f"{node} will be evicted too late")
        if node.held_until_seconds is not None and node.id not in self._holds:
            raise AssertionError(f"{node} will be held forever")

    def _held_until(self, node_id: int) -> float | None:
        return self._nodes[node_id].held_until_seconds

    def _worth_if_evictable(self, node_id: int) -> float | None:
        node = self._nodes[node_id]
        return self.worth(node) if _evictable(node) else None


def _evictable(node: Node[S]) -> bool:
    return not node.children and not node.pins
