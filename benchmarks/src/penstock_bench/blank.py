"""Segment without arrays, and a bounded prefix tree of them, for benchmarks of the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.ledger import Kind, Ledger
from penstock.prefix import Node, Policy, PrefixTree


@dataclass(frozen=True, slots=True)
class Blank:
    """Placeholder for the KV of `tokens` tokens; counts one byte per token."""

    tokens: int

    @property
    def nbytes(self) -> int:
        return self.tokens

    @property
    def checkpoint_nbytes(self) -> int:
        return 0

    @property
    def key_index_nbytes(self) -> int:
        return 0

    def split(self, at_tokens: int) -> tuple[Self, Self]:
        return type(self)(at_tokens), type(self)(self.tokens - at_tokens)

    def join(self, *others: Self) -> Self:
        return type(self)(self.tokens + sum(other.tokens for other in others))

    def joins(self, _: Self) -> bool:
        return True


class BlankPrefixes:
    """The prefixes of one engine without arrays: a real tree in a real ledger.

    A block is one token to the tree and one byte to the ledger.

    Args:
        capacity_blocks: the ledger's limit.
        policy: chooses the leaf that is evicted first.
        node_blocks: most blocks of a node; one eviction evicts a node.
    """

    def __init__(self, capacity_blocks: int, policy: Policy, node_blocks: int) -> None:
        self.tree: PrefixTree[Blank] = PrefixTree(1, policy)
        self.evictions = 0
        self._node_blocks = node_blocks
        self._ledger = Ledger(capacity_blocks)
        self._held = self._ledger.reserve(Kind.NODES, 0)
        self.on_change: Callable[[Sequence[bytes], bool], None] | None = None
        """Takes hashes of blocks, and whether these were added (True) or evicted (False)."""

    def serve(
        self, blocks: Sequence[int], block_hashes: Sequence[bytes], now_seconds: float
    ) -> int:
        """Match, pin and complete one prompt; return the number of cached blocks.

        Args:
            blocks: block ids of the prompt, one token each.
            block_hashes: hashes of these blocks.
            now_seconds: current time.
        """
        match = self.tree.match(block_hashes)
        last: Node[Blank] | None = match.path[-1] if match.path else None
        if last is not None and match.ends_inside:
            last = self.tree.split(last, match.blocks_in_last)
        start = match.tokens
        with self.tree.pin(last, now_seconds) as pin:
            while start < len(block_hashes):
                # Nodes end at multiples of their size, so that their blocks return with one hash.
                end = min(len(block_hashes), start - start % self._node_blocks + self._node_blocks)
                if not self._make_room(end - start):
                    break
                new = block_hashes[start:end]
                node = self.tree.insert(
                    pin.node, new, blocks[start:end], Blank(end - start), now_seconds
                )
                pin.extend(node)
                self._report(new, added=True)
                start = end
        return match.tokens

    def check(self) -> None:
        """Recount the tree and the ledger; raise AssertionError on a mismatch."""
        self.tree.check()
        self._ledger.check({Kind.NODES: self.tree.nbytes})

    def _make_room(self, nbytes: int) -> bool:
        """Reserve `nbytes`, evicting nodes if needed; return False if all others are pinned."""
        while self._ledger.free_bytes < nbytes:
            victim = self.tree.victim()
            if victim is None:
                return False
            self.tree.remove(victim)
            self._held.resize(self.tree.nbytes)
            self.evictions += 1
            self._report(victim.block_hashes, added=False)
        self._held.resize(self._held.nbytes + nbytes)
        return True

    def _report(self, block_hashes: Sequence[bytes], *, added: bool) -> None:
        if self.on_change is not None:
            self.on_change(block_hashes, added)
