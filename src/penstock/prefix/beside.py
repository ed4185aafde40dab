"""What lies beside a prefix tree in its ledger: memory that it can take back before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol

from penstock.prefix.node import Node, S


class Yielding(Protocol):
    """Memory beside the tree that can be given back to it."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def shrink(self, nbytes: int) -> int:
        """Free `nbytes`, or everything if there is less; return the bytes freed."""


class Relief(Protocol[S]):
    """Frees bytes of nodes that stay."""

    def relieve(self, nbytes: int) -> int:
        """Free `nbytes`, or as many as possible; return the bytes freed.

        Evicts no nodes.
        """

    @property
    def pinned_bytes(self) -> int:
        """Lower bound of the bytes it can free of pinned nodes."""

    def is_useless(self, node: Node[S]) -> bool:
        """Return whether an unpinned leaf has become useless."""


class NoRelief:
    """Frees nothing of nodes that stay."""

    pinned_bytes = 0

    def relieve(self, nbytes: int) -> int:
        return 0

    def is_useless(self, node: Node[Any]) -> bool:
        return False


class Beside(Generic[S]):
    """Parts beside a tree: memory given back to it, and listeners to evictions.

    The tree is made first, with this object; parts that need the tree join it afterwards.
    """

    def __init__(self) -> None:
        self.first: list[Yielding] = []
        """Shrunk in order before the relief is asked."""
        self.relief: Relief[S] = NoRelief()
        """Asked before a node is evicted."""
        self.last: list[Yielding] = []
        """Shrunk in order when no node is left to evict."""
        self.evicting: list[Callable[[Node[S]], object]] = []
        """Called with a node before it is evicted; they change nothing in the tree."""

    @property
    def nbytes(self) -> int:
        """Bytes that the parts can give back."""
        return sum(part.nbytes for part in (*self.first, *self.last))

    def free_first(self, nbytes: int) -> int:
        """Free up to `nbytes` for which no node is evicted, and return the bytes freed."""
        freed = _shrunk(self.first, nbytes)
        return freed + (self.relief.relieve(nbytes - freed) if freed < nbytes else 0)

    def free_last(self, nbytes: int) -> int:
        """Free up to `nbytes` after all nodes were evicted, and return the bytes freed."""
        return _shrunk(self.last, nbytes)

    def clear(self) -> None:
        """Shrink all parts to nothing."""
        for part in (*reversed(self.last), *self.first):
            part.shrink(part.nbytes)


def _shrunk(parts: Sequence[Yielding], nbytes: int) -> int:
    """Shrink parts in order until `nbytes` are free; return the bytes freed."""
    freed = 0
    for part in parts:
        if freed < nbytes:
            freed += part.shrink(nbytes - freed)
    return freed
