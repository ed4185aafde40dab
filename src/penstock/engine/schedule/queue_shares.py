"""Fair shares of the queue: a client that fills it leaves room for others. Pure.

A queue of `max_queue` sequences is one client's while no other has any. A request of another client
displaces the latest requests of the client with the most, until both have equally many. Where those
have begun, it is admitted beyond the queue, up to its client's equal share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.schedule.fair_shares import Path
from penstock.errors import QueueFull

BEYOND = 2
"""Most sequences that wait, as a multiple of `max_queue`."""


@dataclass(frozen=True, slots=True)
class QueueShares:
    """The places of a queue, and the sequences of each client in it."""

    max_queue: int
    waiting: Counter[str | int]
    """Sequences that wait for their first place, by client."""

    def to_displace(
        self, client: str | int, added: int, requests: Mapping[Path, int]
    ) -> list[Path]:
        """Return the requests that leave the queue for one of a client.

        Args:
            client: of the new request.
            added: its sequences.
            requests: sequences of each request that may leave, the latest last.

        Raises:
            QueueFull: they would not make enough room.
        """
        waiting, displaced = self.waiting.copy(), []
        waiting[client] += added
        latest = list(requests.items())[::-1]
        while waiting.total() > self.max_queue:
            # Whoever loses one keeps as many as the new one's client has.
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
