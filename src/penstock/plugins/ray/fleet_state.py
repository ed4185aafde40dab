"""State shared by the door and its router: ejected replicas, attempts, routing counters.

    router's loop  ──beat──> replica           every second; a replica without answer is ejected
                   ──routed──> FleetState      the replica that accepted an attempt at a request
    door's loop    <──abandoned── FleetState   attempts at an ejected replica, to be retried

Both run in the door's process, in the event loops of two threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

BEAT_SECONDS = 1.0
"""Interval in seconds of health probes to each replica."""
SILENT_SECONDS = 8.0
"""Seconds without an answer until a replica is ejected; a prefill does not block its answers."""


class FleetState:
    """Ejected replicas, the replica of each attempt, and counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ejected: set[str] = set()
        self._tries: dict[str, tuple[str | None, Callable[[bool], object]]] = {}
        self.ejections = 0
        self._metrics: dict[str, str] = {}
        self.routed_requests = 0
        self.routed_blocks = 0
        self.known_blocks = 0
        """Blocks of prompts that the router expected to be cached by the chosen replica."""

    def begin(self, name: str, abandoned: Callable[[bool], object]) -> None:
        with self._lock:
            self._tries[name] = (None, abandoned)

    def routed(self, name: str, replica: str, blocks: int, known_blocks: int) -> None:
        """Record the replica that accepted an attempt, and the number of blocks it has cached."""
        with self._lock:
            self.routed_requests += 1
            self.routed_blocks += blocks
            self.known_blocks += known_blocks
            if name in self._tries:
                self._tries[name] = (replica, self._tries[name][1])

    def end(self, name: str) -> str | None:
        """Forget an attempt; return the replica that accepted it, None if none did."""
        with self._lock:
            replica, _ = self._tries.pop(name, (None, None))
        return replica

    def is_ejected(self, replica: str) -> bool:
        with self._lock:
            return replica in self._ejected

    def there(self, metrics: dict[str, str]) -> None:
        with self._lock:
            self._metrics = metrics
            replaced = self._ejected - set(metrics)
            self._ejected -= replaced  # Ray does not reuse names
            calls = [call for place, call in self._tries.values() if place in replaced]
        for call in calls:
            call(True)

    @property
    def metrics(self) -> dict[str, str]:
        with self._lock:
            return dict(self._metrics)

    @property
    def replicas(self) -> int:
        with self._lock:
            return len(self._metrics)

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(1 for place, _ in self._tries.values() if place is None)

    @property
    def ejected(self) -> int:
        with self._lock:
            return len(self._ejected)

    def eject(self, replica: str) -> None:
        """Stop sending requests to a replica, and abandon its attempts. Idempotent.

        Attempts that no replica has accepted yet are abandoned too: they may wait for this one.
        """
        with self._lock:
            if replica in self._ejected:
                return
            self._ejected.add(replica)
            self.ejections += 1
            calls = [call for place, call in self._tries.values() if place in (replica, None)]
        for call in calls:
            call(False)

    def readmit(self, replica: str) -> None:
        with self._lock:
            self._ejected.discard(replica)


_STATE = FleetState()


def fleet_state() -> FleetState:
    return _STATE
