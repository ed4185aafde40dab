"""Mutual exclusion of engines that share a device and a ledger, with equal shares of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager


class Turns:
    """Lock granted to the waiting owner that has used the least time so far. Thread-safe.

    An owner keeps its turn for several steps, until a waiting owner has used less time (`is_over`).
    So a model with short steps runs many of them between two long steps of another. An owner that
    returns starts with the least time of the active ones, or with the most of all if none is
    active: unused time is not credited.

    >>> turns = Turns()
    >>> with turns.turn("small"):
    ...     turns.is_over("small")
    False
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used_seconds: dict[Hashable, float] = {}
        self._waiting: list[Hashable] = []
        self._holder: Hashable = None
        self._since = 0.0
        self._most_seconds = 0.0
        self._changed = threading.Condition(threading.Lock())

    @property
    def is_contended(self) -> bool:
        """Whether another owner waits for its turn."""
        return bool(self._waiting)

    @contextmanager
    def turn(self, owner: Hashable) -> Iterator[None]:
        """Wait for the owner's turn, and hold it within the block. Not reentrant."""
        with self._changed:
            self._enter(owner)
            self._waiting.append(owner)
            while self._holder is not None or self._next() != owner:
                self._changed.wait()
            self._waiting.remove(owner)
            self._holder, self._since = owner, self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._used_seconds[owner] = self._held_seconds()
                self._most_seconds = max(self._most_seconds, self._used_seconds[owner])
                self._holder = None
                self._changed.notify_all()

    def is_over(self, owner: Hashable) -> bool:
        """Return whether a waiting owner has used less time than the holder."""
        if not self._waiting:
            return False
        with self._changed:
            now = self._held_seconds()
            return any(self._used_seconds[other] < now for other in self._waiting)

    def forget(self, owner: Hashable) -> None:
        with self._changed:
            self._used_seconds.pop(owner, None)

    def _enter(self, owner: Hashable) -> None:
        active = [self._used_seconds[other] for other in self._waiting]
        if self._holder is not None:
            active.append(self._held_seconds())
        least = min(active, default=self._most_seconds)
        self._used_seconds[owner] = max(least, self._used_seconds.get(owner, 0.0))

    def _held_seconds(self) -> float:
        """Return the time that the holder has used, its turn included."""
        return self._used_seconds[self._holder] + self._clock() - self._since

    def _next(self) -> Hashable:
        return min(self._waiting, key=lambda other: self._used_seconds[other])
