"""References of readers to paths of the prefix tree."""

from __future__ import annotations

from typing import Generic, Protocol

from penstock.prefix.node import Node, S


class Pinned(Protocol[S]):
    def extend(self, pin: Pin[S], child: Node[S], now_seconds: float | None) -> None: ...
    def withdraw(self, pin: Pin[S], node: Node[S] | None) -> None: ...
    def unpin(self, pin: Pin[S]) -> None: ...


class Pin(Generic[S]):
    """Reference that keeps a node and its path from eviction until released.

    Nodes of the path may be split and merged meanwhile: read `path` again in every step.
    """

    __slots__ = ("_tree", "node")

    def __init__(self, tree: Pinned[S], node: Node[S] | None) -> None:
        self._tree = tree
        self.node = node
        """Deepest node of the path; None while the path is empty, and once released."""

    @property
    def path(self) -> tuple[Node[S], ...]:
        return () if self.node is None else self.node.path()

    def extend(self, child: Node[S], now_seconds: float | None = None) -> None:
        self._tree.extend(self, child, now_seconds)

    def withdraw(self, node: Node[S] | None) -> None:
        """Release the part of the path below `node`; None is the root."""
        self._tree.withdraw(self, node)

    def release(self) -> None:
        """Release the reference; a second call does nothing."""
        self._tree.unpin(self)

    def __enter__(self) -> Pin[S]:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
