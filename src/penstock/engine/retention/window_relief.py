"""Frees bytes of sliding-window layers for `Prefixes`, which knows neither sequences nor tiers."""

from __future__ import annotations

from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.windows import Windows
from penstock.engine.schedule.admission import Admission
from penstock.kv.segment import Segment
from penstock.prefix.node import Node


class WindowRelief:
    """Relieves windows, for the running sequences of an engine. See `prefix.prefixes.Relief`.

    Args:
        windows: of the engine's tree.
        admission: has the running sequences.
        tiers: write blocks of the tree; None if there are none. None also where other ranks hold
            the same tree, because each writes at a pace of its own.
    """

    def __init__(self, windows: Windows, admission: Admission, tiers: TierGroup | None) -> None:
        self._windows = windows
        self._admission = admission
        self._tiers = tiers

    def relieve(self, nbytes: int) -> int:
        """Drop KV that no sequence can resume from, until `nbytes` are free; see `Windows`."""
        waiting = set() if self._tiers is None else self._tiers.waiting_nodes()
        return self._windows.relieve(nbytes, self._admission.readers(), waiting)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that `relieve` frees of nodes that are read, at least."""
        return self._windows.pinned_bytes(self._admission.readers())

    def is_useless(self, node: Node[Segment]) -> bool:
        """Tell whether no sequence reads a node, and none can resume in it or behind it."""
        return self._windows.is_useless(node)
