"""Totals of a tree's nodes, updated with every change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.prefix.node import Node, S


@dataclass(slots=True)
class TreeTotals:
    tokens: int = 0
    nbytes: int = 0
    checkpoint_bytes: int = 0
    """Bytes of checkpoints among `nbytes`."""
    key_index_bytes: int = 0
    """Bytes of key indexes among `nbytes`."""
    index_bytes: int = 0
    """Python overhead of the nodes, excluding their segments; see also `policy.nbytes`."""
    pinned_bytes: int = 0
    """Bytes of segments and index of pinned nodes."""
    partial_sizes: Counter[int] = field(default_factory=Counter)
    """Number of partial blocks, by length in tokens."""

    def count(self, node: Node[S], sign: int = 1) -> None:
        """Add a node, or subtract it with `sign` -1; its bytes must not change between the two."""
        nbytes, index_bytes = node.segment.nbytes, node.index_bytes
        node.held_bytes = nbytes + index_bytes
        self.tokens += sign * len(node.tokens)
        self.nbytes += sign * nbytes
        self.checkpoint_bytes += sign * node.segment.checkpoint_nbytes
        self.key_index_bytes += sign * node.segment.key_index_nbytes
        self.index_bytes += sign * index_bytes
        if node.pins:
            self.pinned_bytes += sign * node.held_bytes

    def claim(self, node: Node[S], pins: int) -> None:
        before, node.pins = node.pins, node.pins + pins
        if bool(before) != bool(node.pins):
            self.pinned_bytes += node.held_bytes if node.pins else -node.held_bytes

    def check(self, nodes: Iterable[Node[S]]) -> None:
        recounted = TreeTotals()
        for node in nodes:
            recounted.tokens += len(node.tokens)
            recounted.nbytes += node.segment.nbytes
            recounted.checkpoint_bytes += node.segment.checkpoint_nbytes
            recounted.key_index_bytes += node.segment.key_index_nbytes
            recounted.index_bytes += node.index_bytes
            if node.pins:
                recounted.pinned_bytes += node.segment.nbytes + node.index_bytes
            if node.partial:
                recounted.partial_sizes[len(node.tokens)] += 1
        if self != recounted:
            raise AssertionError(f"{self} counted, {recounted} found")
