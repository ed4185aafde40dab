"""Fair shares of the queue: one client cannot lock out others. Pure functions.

A single client may fill the queue of `max_queue` sequences. A request of another client then
removes the latest requests of the client with the most waiting sequences, until both have equally
many. Requests that have started are not removed; instead the new request is queued beyond
`max_queue`, up to an equal share for its client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.schedule.fair_shares import Path
from penstock.errors import QueueFull

BEYOND = 2
"""Hard limit of waiting sequences, as a multiple of `max_queue`."""


@dataclass(frozen=True, slots=True)
class QueueShares:
    """Queue capacity, and the number of waiting sequences of each client."""

    max_queue: int
    waiting: Counter[str | int]
    """Number of sequences not admitted yet, by client."""

    def to_displace(
        self, client: str | int, added: int, requests: Mapping[Path, int]
    ) -> list[Path]:
        """Return the requests to remove from the queue to make room for a request of a client.

        Args:
            requests: requests that may be removed, with their numbers of sequences, latest last.

        Raises:
            QueueFull: removing them would not make enough room.
        """
        waiting, displaced = self.waiting.copy(), []
        waiting[client] += added
        latest = list(requests.items())[::-1]
        while waiting.total() > self.max_queue:
            # No client keeps fewer sequences than the new request's client has.
            losing = [
                (waiting[owners[0]], owners, size)
                for owners, size in latest
                if owners not in displaced and waiting[owners[0]] - size >= waiting[client]
            ]
            if not losing:
                break
            _, owners, size = max(losing, key=lambda losable: losable[0])
            displaced.append(owners)
            waiting[owners[0]] -= size
        share = self.max_queue // len(waiting)
        beyond = waiting.total() > self.max_queue
        if beyond and (waiting[client] > share or waiting.total() > BEYOND * self.max_queue):
            raise QueueFull(self.waiting.total(), added, self.max_queue)
        return displaced
