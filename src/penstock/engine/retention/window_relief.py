"""Adapter through which `Prefixes` frees KV of sliding-window layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from penstock.engine.retention.retention import PathReader
from penstock.engine.retention.windows import Windows
from penstock.kv.segment import Segment
from penstock.prefix.node import Node


class WindowRelief:
    """Frees KV of windows, given the running sequences. See `prefix.beside.Relief`.

    Args:
        waiting: returns the ids of nodes with blocks still to be written. Empty with several ranks,
            whose tiers write at different speeds.
    """

    def __init__(
        self,
        windows: Windows,
        readers: Callable[[], Iterable[PathReader]],
        waiting: Callable[[], Collection[int]],
    ) -> None:
        self._windows = windows
        self._readers = readers
        self._waiting = waiting

    def relieve(self, nbytes: int) -> int:
        """Drop KV that no sequence can resume from, until `nbytes` are free; see `Windows`."""
        return self._windows.relieve(nbytes, self._readers(), self._waiting())

    @property
    def pinned_bytes(self) -> int:
        """Lower bound of the bytes that `relieve` frees from pinned nodes."""
        return self._windows.pinned_bytes(self._readers())

    def is_useless(self, node: Node[Segment]) -> bool:
        """Return whether no sequence reads a node, and none can resume in or after it."""
        return self._windows.is_useless(node)
