"""Frees bytes of sliding-window layers for `Prefixes`, which knows neither sequences nor tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from penstock.engine.retention.retention import PathReader
from penstock.engine.retention.windows import Windows
from penstock.kv.segment import Segment
from penstock.prefix.node import Node


class WindowRelief:
    """Relieves windows, for the running sequences of an engine. See `prefix.beside.Relief`.

    Args:
        windows: of the engine's tree.
        readers: lists the running sequences.
        waiting: lists the ids of nodes with blocks that wait to be written. None of them where
            other ranks hold the same tree, because each writes at a pace of its own.
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
        """Bytes that `relieve` frees of nodes that are read, at least."""
        return self._windows.pinned_bytes(self._readers())

    def is_useless(self, node: Node[Segment]) -> bool:
        """Tell whether no sequence reads a node, and none can resume in it or behind it."""
        return self._windows.is_useless(node)
