"""Queue that finds the node worth least, in O(log n), while worths change."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace


class EvictionQueue:
    """A heap of ids by worth. An id whose worth has risen since is put back when it surfaces.

    It holds numbers only: what was removed elsewhere is not kept alive by being queued here.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._queued: dict[int, float] = {}  # id -> the worth of its one valid entry

    def __contains__(self, item: int) -> bool:
        return item in self._queued

    def queued(self, item: int) -> float | None:
        """Return the worth at which `item` is queued, or None if it is not."""
        return self._queued.get(item)

    def offer(self, item: int, worth: float) -> None:
        """Queue `item`; if it is queued at this worth or less, do nothing."""
        queued = self._queued.get(item)
        if queued is not None and queued <= worth:
            return
        self._queued[item] = worth
        heappush(self._heap, (worth, item))

    def drop(self, item: int) -> None:
        """Take `item` out, if it is in."""
        self._queued.pop(item, None)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(worth, item) for item, worth in self._queued.items()]
            heapify(self._heap)

    def first(self, worth_of: Callable[[int], float | None]) -> int | None:
        """Return the id that is worth least, leaving it queued, or None if nothing is queued.

        Args:
            worth_of: the present worth of an id, None if it must not be evicted now; it
                leaves the queue then, until it is offered again.
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
