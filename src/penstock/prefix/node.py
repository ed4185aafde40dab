"""Node of the prefix tree, the interface of its segment, and the result of a look-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from penstock.prefix.block_hashes import TokenArray


class TreeSegment(Protocol):
    """Interface of a segment in the tree: immutable KV of consecutive whole blocks.

    The results of `split` and `join` share no memory with their sources, so that dropping a segment
    frees all of its bytes.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of checkpoints, included in `nbytes`; the ledger counts them separately."""

    @property
    def key_index_nbytes(self) -> int:
        """Bytes of the key index, included in `nbytes`; the ledger counts them separately."""

    def split(self, at_tokens: int) -> tuple[Self, Self]: ...
    def join(self, *others: Self) -> Self: ...
    def joins(self, other: Self) -> bool: ...


S = TypeVar("S", bound=TreeSegment)

# Measured by tracemalloc, including entries of the eviction queue, for a node in the middle of a
# path; a leaf takes 200 bytes less, which serve as a reserve.
NODE_BYTES = 900
BLOCK_BYTES = 57


def index_bytes(blocks: int, block_size: int, nodes: int = 1) -> int:
    """Return the bytes of the Python objects of blocks and nodes, excluding segments."""
    return NODE_BYTES * nodes + (BLOCK_BYTES + 4 * block_size) * blocks


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Node(Generic[S]):
    """Node of the blocks that follow its parent's, or a partial block. Changed only by the tree."""

    id: int
    parent: Node[S] | None
    block_hashes: tuple[bytes, ...]
    """Hash of each block. The parent finds this node by the first one."""
    tokens: TokenArray
    segment: S
    start: int
    """Number of tokens before this node's first."""
    children: dict[bytes, Node[S]] = field(default_factory=dict)
    pins: int = 0
    """Number of pins on this node or its descendants."""
    hits: int = 0
    last_used_seconds: float
    heat: float
    """Logarithm of the decayed number of uses, as the policy computes it."""
    held_until_seconds: float | None = None
    """Time on the tree's clock until which the node is evicted last; None if it is not held."""
    held_bytes: int = 0
    """Bytes of segment and index, as the tree counts them."""
    partial: bool = False
    """Whether it is a partial block: the end of a sequence, always a leaf."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def index_bytes(self) -> int:
        return NODE_BYTES + BLOCK_BYTES * len(self.block_hashes) + self.tokens.nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy of the node's KV; checkpoints are not copied."""
        return self.segment.nbytes - self.segment.checkpoint_nbytes

    def path(self) -> tuple[Node[S], ...]:
        return tuple(upwards(self))[::-1]

    def __repr__(self) -> str:
        return f"Node({self.id}, tokens {self.start}..{self.end}, pins {self.pins})"


@dataclass(frozen=True, slots=True)
class NodeView:
    id: int
    parent: int | None
    """Id of the parent; None below the root."""
    start: int
    end: int
    nbytes: int
    """Bytes of its segment and of its entry in the index."""
    pins: int
    hits: int
    idle_seconds: float
    """Seconds since the last use, or since the insertion."""
    held_seconds: float
    tokens: tuple[int, ...]
    """The first `VIEW_TOKENS` tokens."""


VIEW_TOKENS = 32


def view(node: Node[S], now_seconds: float) -> NodeView:
    until = node.held_until_seconds
    return NodeView(
        id=node.id,
        parent=None if node.parent is None else node.parent.id,
        start=node.start,
        end=node.end,
        nbytes=node.held_bytes,
        pins=node.pins,
        hits=node.hits,
        idle_seconds=max(0.0, now_seconds - node.last_used_seconds),
        held_seconds=0.0 if until is None else max(0.0, until - now_seconds),
        tokens=tuple(node.tokens[:VIEW_TOKENS].tolist()),
    )


def upwards(node: Node[S] | None) -> Iterator[Node[S]]:
    while node is not None:
        yield node
        node = node.parent


@dataclass(frozen=True, slots=True)
class Match(Generic[S]):
    """Longest cached prefix of a prompt. Valid until the tree changes."""

    path: tuple[Node[S], ...]
    """Nodes of which at least the first block matched."""
    tokens: int
    blocks_in_last: int
    """Number of blocks of the last node that matched; 0 for an empty path."""

    @property
    def ends_inside(self) -> bool:
        return bool(self.path) and self.blocks_in_last < len(self.path[-1].block_hashes)
