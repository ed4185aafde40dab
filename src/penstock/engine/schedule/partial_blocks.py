"""Partial blocks: unfinished blocks at the ends of sequences, cached as leaves of the tree.

    end     ──> keep: cache the tokens after the last whole block, with the states there
        attach  ──> find: a leaf with the next tokens becomes an own span of the sequence
        commit  ──> covered: the whole block is in the tree, so the leaf is dropped

So a conversation resumes at the token where it ended, not at the preceding block boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from penstock.engine.schedule.kv_stores import KVStores
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import RecurrentState
from penstock.ledger import Reservation
from penstock.prefix.node import Match, Node
from penstock.prefix.pin import Pin


class PartialBlock:
    """Partial block from which a sequence resumed, and the one that it caches when it ends."""

    def __init__(self, stores: KVStores) -> None:
        self._stores = stores
        self._ref: ref[Node[Segment]] | None = None
        """Weak reference to the leaf, which the tree owns: it is freed on eviction."""

    @property
    def _leaf(self) -> Node[Segment] | None:
        """Leaf from which the sequence resumed; None if none or evicted."""
        leaf = None if self._ref is None else self._ref()
        return leaf if leaf is not None and leaf in self._stores.prefixes.tree else None

    @property
    def enabled(self) -> bool:
        """Whether a sequence can resume inside a block; False with compressed layers."""
        return self._stores.resumes_inside

    @property
    def tokens(self) -> int:
        """Number of tokens in the leaf from which the sequence resumed; 0 if none or evicted."""
        leaf = self._leaf
        return 0 if leaf is None else len(leaf.tokens)

    def find(
        self, match: Match[Segment], root: bytes, tokens: Sequence[int]
    ) -> tuple[KVSpan, RecurrentState | None] | None:
        """Return the leaf that continues a match, and the states at its end; None without one.

        Args:
            match: match of the sequence's whole blocks.
            root: hash of the last matched block, or the root hash.
            tokens: tokens after the match that may be read from the cache.
        """
        leaf = self._stores.prefixes.find_partial(match, root, tokens) if self.enabled else None
        if leaf is None:
            return None
        resumed, recurrent_state = self._stores.resume((*match.path, leaf), leaf.end)
        if resumed < leaf.end:
            return None
        self._ref = ref(leaf)
        segment = leaf.segment.checkpointed(())
        return KVSpan(segment, leaf.start, segment.tokens), recurrent_state

    def use(self) -> None:
        if (leaf := self._leaf) is not None:
            self._stores.prefixes.use_partial(leaf)

    def covered(self, end: int) -> None:
        """Drop the leaf if blocks up to `end` cover its tokens, and no other sequence reads it."""
        if (leaf := self._leaf) is not None and leaf.start < end:
            self._stores.prefixes.drop_partial(leaf)
            self._ref = None

    def forget(self) -> None:
        self._ref = None

    def keep(
        self,
        pin: Pin[Segment],
        start: int,
        root: bytes,
        tokens: Sequence[int],
        segment: Segment,
        recurrent_state: RecurrentState | None,
        paid: Reservation,
    ) -> None:
        """Cache the end of a sequence as a leaf that replaces the previous one, if memory allows.

        Args:
            start: position of the partial block.
            root: hash of the block before it, or the root hash.
            segment: KV of the tokens, in buffers not shared with others.
            recurrent_state: states after the tokens; None without recurrent layers.
            paid: reservation that includes the segment.
        """
        prefixes, blocks_done = self._stores.prefixes, start // self._stores.block_size
        end = self._stores.ended(segment, recurrent_state)
        if end is None:
            return
        leaf = prefixes.insert_partial(pin, blocks_done, root, tokens, end, paid)
        if leaf is not None and self._leaf is not leaf:
            self.covered(start + len(tokens))
