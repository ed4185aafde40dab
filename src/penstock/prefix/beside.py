"""Memory outside the prefix tree, in the same ledger, that can be freed before or after nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol

from penstock.prefix.node import Node, S


class Yielding(Protocol):
    """Memory outside the tree that can be freed on demand."""

    @property
    def nbytes(self) -> int: ...

    def shrink(self, nbytes: int) -> int:
        """Free `nbytes`, or everything if there is less; return the bytes freed."""


class Relief(Protocol[S]):
    """Frees parts of nodes without evicting them."""

    def relieve(self, nbytes: int) -> int:
        """Free `nbytes`, or as many as possible; return the bytes freed.

        Evicts no nodes.
        """

    @property
    def pinned_bytes(self) -> int:
        """Lower bound of the bytes that can be freed from pinned nodes."""

    def is_useless(self, node: Node[S]) -> bool:
        """Return whether no sequence can resume from an unpinned leaf."""


class NoRelief:
    pinned_bytes = 0

    def relieve(self, nbytes: int) -> int:
        return 0

    def is_useless(self, node: Node[Any]) -> bool:
        return False


class Beside(Generic[S]):
    """Registry of memory outside a tree that can be freed, and of listeners to evictions.

    Created before the tree; components that need the tree register themselves later.
    """

    def __init__(self) -> None:
        self.first: list[Yielding] = []
        """Shrunk in order, before `relief` is called."""
        self.relief: Relief[S] = NoRelief()
        """Called after `first`, before nodes are evicted."""
        self.last: list[Yielding] = []
        """Shrunk in order, after all unpinned nodes have been evicted."""
        self.evicting: list[Callable[[Node[S]], object]] = []
        """Called with a node before it is evicted; they must not change the tree."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.first, *self.last))

    def free_first(self, nbytes: int) -> int:
        """Free up to `nbytes` before evicting nodes; return the bytes freed."""
        freed = _shrunk(self.first, nbytes)
        return freed + (self.relief.relieve(nbytes - freed) if freed < nbytes else 0)

    def free_last(self, nbytes: int) -> int:
        """Free up to `nbytes` after all unpinned nodes were evicted; return the bytes freed."""
        return _shrunk(self.last, nbytes)

    def clear(self) -> None:
        for part in (*reversed(self.last), *self.first):
            part.shrink(part.nbytes)


def _shrunk(parts: Sequence[Yielding], nbytes: int) -> int:
    """Shrink parts in order until `nbytes` are free; return the bytes freed."""
    freed = 0
    for part in parts:
        if freed < nbytes:
            freed += part.shrink(nbytes - freed)
    return freed
