"""`BoundedTree`: the prefix tree inside a ledger. It makes room by evicting nodes.

Every act makes room first: it evicts the nodes worth least, pinned ones never. If there is not
enough room it is refused, and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol

from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory import format_bytes
from penstock.prefix.explanation import EvictionLog, Why
from penstock.prefix.node import Match, Node, S, index_bytes, upwards
from penstock.prefix.policy import REMEMBERED_NODES
from penstock.prefix.tree import PrefixTree

logger = logging.getLogger(__name__)

BYTES_PER_REMEMBERED = 20_000
"""Bytes of the limit for each node, and block, remembered after it was evicted: 500 bytes."""
REMEMBERED_MATCHES = 64
"""Matches that are remembered while the tree stays as it is, so that none is looked up twice."""


@dataclass(slots=True)
class PrefixCounts:
    """Counts of events since the start."""

    hits: int = 0
    fetched_tokens: int = 0
    """Tokens whose KV was given out: prefill saved."""
    stored_tokens: int = 0
    refused: int = 0
    evicted_nodes: int = 0
    evicted_bytes: int = 0
    """KV of the nodes evicted."""
    copied_bytes: int = 0
    """KV copied by splits and merges."""


class Yielding(Protocol):
    """Bytes beside the tree that are given back to it."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def shrink(self, nbytes: int) -> int:
        """Free as many bytes, or all, and return the bytes freed."""


class Spare(Yielding, Protocol):
    """Bytes beside the tree that are given back after all of its nodes."""

    def recount(self) -> int:
        """Return the bytes held, counted again."""


class Relief(Protocol[S]):
    """Frees bytes of nodes that stay."""

    def relieve(self, nbytes: int) -> int:
        """Free as many bytes, or as many as possible, and return the bytes freed.

        Makes no room by itself.
        """

    @property
    def pinned_bytes(self) -> int:
        """Bytes that it can free, at least, of pinned nodes."""

    def is_useless(self, node: Node[S]) -> bool:
        """Tell whether an unpinned leaf has become useless."""


def remembered_nodes(limit_bytes: int) -> int:
    """Return how many nodes 2.5 % of a limit remember, at most 16,384."""
    return min(REMEMBERED_NODES, limit_bytes // BYTES_PER_REMEMBERED)


class BoundedTree(Generic[S]):
    """A prefix tree inside a ledger that it may share with others.

    Args:
        ledger: the account; the tree has its lines `NODES`, `KEY_INDEX`, `CHECKPOINTS` and
            `INDEX`, and copies made while it is cut and joined count as `BUFFERS`.
        tree: empty; its policy orders evictions.
        remembered: how many evicted blocks are remembered.
        clock: seconds, for recency.
    """

    def __init__(
        self, ledger: Ledger, tree: PrefixTree[S], *, remembered: int, clock: Callable[[], float]
    ) -> None:
        self.ledger = ledger
        self.tree = tree
        self.block_size = tree.block_size
        self.clock = clock
        self.counts = PrefixCounts()
        self.relief: Relief[S] | None = None
        """Asked for bytes before a node is evicted."""
        self.spare: Spare | None = None
        """Asked for bytes when no node is left to evict."""
        self.first: Yielding | None = None
        """Asked for bytes before a node is evicted, and before the relief is."""
        self.last: Yielding | None = None
        """Asked for bytes after all others."""
        self.evicting: Callable[[Node[S]], object] | None = None
        """Called with a node before it is evicted; changes nothing in the tree."""
        self.evictions = EvictionLog(remembered)
        self._matches: dict[bytes, Match[S]] = {}  # by the last hash of their chain
        self._matches_version = self.tree.version
        self._nodes = ledger.reserve(Kind.NODES, 0)
        self._key_index = ledger.reserve(Kind.KEY_INDEX, 0)
        self._checkpoints = ledger.reserve(Kind.CHECKPOINTS, 0)
        self._index = ledger.reserve(Kind.INDEX, self.fixed_bytes)

    # ---- questions

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the index that are held with an empty tree, too: the memory of evictions."""
        return self.tree.policy.nbytes + self.evictions.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held, the index included."""
        kinds = (self._nodes, self._key_index, self._checkpoints, self._index)
        return sum(kind.nbytes for kind in kinds)

    @property
    def evictable_bytes(self) -> int:
        """Bytes that evicting all unpinned nodes would free, and those beside the tree."""
        beside = sum(part.nbytes for part in self._beside)
        return self.tree.nbytes + self.tree.index_bytes - self.tree.pinned_bytes + beside

    def index_bytes(self, blocks: int) -> int:
        """Return the index bytes of a node of so many blocks."""
        return index_bytes(blocks, self.block_size)

    def match(self, block_hashes: Sequence[bytes]) -> Match[S]:
        """Find the longest prefix of a chain that is held. Valid until the tree changes.

        Asked again until then, it looks nothing up: a chain's last hash names all of it.
        """
        if not block_hashes:
            return self.tree.match(block_hashes)
        if self._matches_version != self.tree.version or len(self._matches) >= REMEMBERED_MATCHES:
            self._forget_matches()
        match = self._matches.get(block_hashes[-1])
        if match is None:
            match = self._matches[block_hashes[-1]] = self.tree.match(block_hashes)
        return match

    # ---- room

    def make_room(self, nbytes: int, why: Why = "limit") -> bool:
        """Evict nodes until `nbytes` are free; False, and none evicted, if that cannot be."""
        short = nbytes - self.ledger.room_bytes
        beyond = short - self.evictable_bytes
        if beyond > 0 and (self.relief is None or beyond > self.relief.pinned_bytes):
            return False
        return self.shrink(short, why) >= short

    def reserve(self, kind: Kind, nbytes: int) -> Reservation:
        """Make room and count `nbytes` as held, before they are allocated.

        Raises:
            LedgerFull, NeverFits: there is no room; nothing was evicted.
        """
        self.make_room(nbytes)
        return self.ledger.reserve(kind, nbytes)

    def shrink(self, nbytes: int, why: Why = "pressure") -> int:
        """Evict the nodes worth least until `nbytes` were freed, or no node is left to evict.

        First drops parts of nodes that no sequence needs, if a retention policy is set.

        Returns:
            Bytes freed, index included: at least `nbytes`, or those of all unpinned nodes.
        """
        freed = 0 if self.first is None else self.first.shrink(nbytes)
        self.tree.order.expire(self.clock())
        if self.relief is not None and nbytes > freed:
            freed += self.relief.relieve(nbytes - freed)
        while freed < nbytes and (node := self.tree.victim()) is not None:
            freed += self._evict(node, why)
            if self.relief is not None:
                for above in upwards(node.parent):
                    if not self.relief.is_useless(above):
                        break
                    freed += self._evict(above, why)
        for part in (self.spare, self.last):
            if part is not None and freed < nbytes:
                freed += part.shrink(nbytes - freed)
        return freed

    def drop(self, node: Node[S], why: Why = "lost") -> None:
        """Evict a node that is not to be read any more, and all below it; pinned ones stay."""
        below = [node]
        for above in below:
            below.extend(above.children.values())
        for last in reversed(below):
            if not (last.pins or last.children):
                self._evict(last, why)

    def clear(self) -> None:
        """Evict all unpinned nodes, and shrink the parts beside the tree to nothing."""
        while (node := self.tree.victim()) is not None:
            self._evict(node, "cleared")
        for part in (self.last, self.first, self.spare):
            if part is not None:
                part.shrink(part.nbytes)

    def no_room(self, nbytes: int) -> str:
        """Return the message for a failed `make_room`."""
        return (
            f"{format_bytes(nbytes)} do not fit in the limit of "
            f"{format_bytes(self.ledger.limit_bytes)} beside the nodes in use; raise memory_limit"
        )

    # ---- proof

    def recount(self) -> dict[Kind, int]:
        """Recount the tree's bytes, for `Ledger.check`."""
        checkpoints = sum(node.segment.checkpoint_nbytes for node in self.tree)
        key_index = sum(node.segment.key_index_nbytes for node in self.tree)
        return {
            Kind.NODES: sum(node.segment.nbytes for node in self.tree) - checkpoints - key_index,
            Kind.KEY_INDEX: key_index,
            Kind.CHECKPOINTS: checkpoints,
            Kind.INDEX: sum(node.index_bytes for node in self.tree) + self.fixed_bytes,
        }

    def check(self) -> None:
        """Recount tree and reservations, and raise AssertionError if something differs."""
        self.tree.check()
        counted = {
            Kind.NODES: self._nodes.nbytes,
            Kind.KEY_INDEX: self._key_index.nbytes,
            Kind.CHECKPOINTS: self._checkpoints.nbytes,
            Kind.INDEX: self._index.nbytes,
        }
        if counted != self.recount():
            raise AssertionError(f"{counted} counted, {self.recount()} found")

    # ---- parts

    @property
    def _beside(self) -> Iterator[Yielding]:
        """Parts beside the tree that give bytes back."""
        return (part for part in (self.first, self.spare, self.last) if part is not None)

    @contextmanager
    def _copying(self, nbytes: int, index_bytes: int) -> Iterator[None]:
        """Count a copy of nodes while it is made, and the new total afterwards."""
        with self.ledger.reserve(Kind.BUFFERS, nbytes + index_bytes):
            try:
                yield
            finally:
                self._settle()
        self.counts.copied_bytes += nbytes

    def _evict(self, node: Node[S], why: Why) -> int:
        """Evict a node and return the bytes freed."""
        if self.evicting is not None:
            self.evicting(node)
        before = self.nbytes
        logger.debug("a node of %d tokens is evicted (%s)", len(node.tokens), why)
        self.evictions.note(node.block_hashes, self.clock(), why)
        self.counts.evicted_nodes += 1
        self.counts.evicted_bytes += self.tree.remove(node).nbytes
        self._settle()
        return before - self.nbytes

    def _settle(self) -> None:
        """Set the ledger to the tree's bytes."""
        self._forget_matches()
        totals = self.tree.totals
        self._nodes.resize(totals.nbytes - totals.checkpoint_bytes - totals.key_index_bytes)
        self._key_index.resize(totals.key_index_bytes)
        self._checkpoints.resize(totals.checkpoint_bytes)
        self._index.resize(self.tree.index_bytes + self.fixed_bytes)

    def _forget_matches(self) -> None:
        """Forget matches of the tree as it was: they would keep evicted nodes alive."""
        self._matches.clear()
        self._matches_version = self.tree.version
