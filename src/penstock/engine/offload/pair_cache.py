"""LRU cache of spilled blocks of one layer, as pairs of keys and values.

Pairs are identified only by their checksums, whatever their sequence, head or place. All memory is
allocated at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.kv.codecs.spilled import Checksums, RawBlocks

Slots: TypeAlias = NDArray[np.int64]
SLOT_BYTES = 64
"""Bytes of a pair in addition to its keys and values: checksums, last request, name and order."""
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Odd factor of the second checksum in a pair's name."""
FREE = -1


class PairCache:
    """Cache of `count` key/value block pairs of `nbytes` each. Not thread-safe."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.room = np.empty((count, nbytes), np.uint8)
        self._checksums = np.zeros((count, 2), np.uint64)
        self._requests = np.full(count, FREE, np.int64)
        """Number of the last request for each pair."""
        self._request = 0
        self._order = np.arange(count)
        self._names = np.zeros(count, np.uint64)

    def __len__(self) -> int:
        return len(self.held_checksums())

    def held_checksums(self) -> Checksums:
        cached: Checksums = self._checksums[self._requests != FREE]
        return cached

    def find(self, checksums: Checksums) -> Slots:
        """Start a request: return the slots of pairs, -1 for missing ones.

        `checksums` are those of keys and values, (pairs, 2).
        """
        self._request += 1
        indices = np.searchsorted(self._names, _names(checksums))
        slots = self._order[np.minimum(indices, len(self._order) - 1)]
        equal = (self._checksums[slots] == checksums).all(axis=1)
        cached = equal & (self._requests[slots] != FREE)
        self._requests[slots[cached]] = self._request
        return np.where(cached, slots, -1)

    def make_room(self, count: int) -> Slots:
        """Free up to `count` slots of the least recently requested pairs, except this request's."""
        oldest = np.argsort(self._requests, kind="stable")[:count]
        slots = oldest[self._requests[oldest] < self._request]
        self._forget(slots)
        return slots

    def keep(self, slots: Slots, checksums: Checksums, raw: Sequence[RawBlocks]) -> None:
        """Copy pairs to slots; `raw` has keys and values, (pairs or more, bytes) each."""
        start = 0
        for side in raw:
            self.room[slots, start : start + side.shape[1]] = side[: len(slots)]
            start += side.shape[1]
        self._checksums[slots] = checksums
        self._requests[slots] = self._request
        names = _names(self._checksums)
        self._order = np.argsort(names, kind="stable")
        self._names = names[self._order]

    def clear(self) -> None:
        self._forget(slice(None))

    def _forget(self, slots: Slots | slice) -> None:
        self._requests[slots] = FREE
        self._checksums[slots] = 0  # an old name in `_names` must not match


def _names(checksums: Checksums) -> NDArray[np.uint64]:
    """Return a hash of each pair's checksums, which distinguish pairs with the same hash."""
    names: NDArray[np.uint64] = checksums[:, 0] + MIXER * checksums[:, 1]
    return names
