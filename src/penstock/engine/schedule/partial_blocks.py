"""The partial block at the end of a sequence, kept as a leaf of the tree.

    end     ──> keep: the tokens behind the last whole block, with the states at that place
    attach  ──> find: a leaf whose tokens come next; the sequence reads it as its own span
    commit  ──> covered: the whole block is in the tree now, and its only reader drops the leaf

So a conversation goes on at the token where it ended, not at the block in front of it.
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
    """The leaf at which one sequence resumed, and the one that it leaves behind.

    Args:
        stores: the engine's.
    """

    def __init__(self, stores: KVStores) -> None:
        self._stores = stores
        self._ref: ref[Node[Segment]] | None = None
        """The leaf, which the tree alone holds: one that is evicted meanwhile takes no memory."""

    @property
    def _leaf(self) -> Node[Segment] | None:
        """The leaf at which the sequence resumed, as long as it is in the tree."""
        leaf = None if self._ref is None else self._ref()
        return leaf if leaf is not None and leaf in self._stores.prefixes.tree else None

    @property
    def enabled(self) -> bool:
        """Whether a sequence can resume inside a block, as not with rows of compressing layers."""
        return self._stores.resumes_inside

    @property
    def tokens(self) -> int:
        """Tokens of the leaf at which the sequence resumed, as long as it is in the tree; or 0."""
        leaf = self._leaf
        return 0 if leaf is None else len(leaf.tokens)

    def find(
        self, match: Match[Segment], root: bytes, tokens: Sequence[int]
    ) -> tuple[KVSpan, RecurrentState | None] | None:
        """Return the leaf behind a match that holds the next tokens, and the states at its end.

        Args:
            match: of the sequence's whole blocks.
            root: hash of the last of them, or the root hash.
            tokens: behind the match, as far as they may be read.
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
        """Count the read of the leaf that was found."""
        if (leaf := self._leaf) is not None:
            self._stores.prefixes.use_partial(leaf)

    def covered(self, end: int) -> None:
        """Drop the leaf if blocks up to `end` hold its tokens, and no other sequence read it."""
        if (leaf := self._leaf) is not None and leaf.start < end:
            self._stores.prefixes.drop_partial(leaf)
            self._ref = None

    def forget(self) -> None:
        """Forget the leaf, which stays in the tree."""
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
        """Keep the end of a sequence as a leaf, if there is room; the leaf before it goes.

        Args:
            pin: the sequence's.
            start: position of the partial block.
            root: hash of the block in front of it, or the root hash.
            tokens: of the partial block.
            segment: their KV, in buffers of its own.
            recurrent_state: behind them, of models with recurrent layers.
            paid: a reservation that counts the segment.
        """
        prefixes, blocks_done = self._stores.prefixes, start // self._stores.block_size
        end = self._stores.ended(segment, recurrent_state)
        if end is None:
            return
        leaf = prefixes.insert_partial(pin, blocks_done, root, tokens, end, paid)
        if leaf is not None and self._leaf is not leaf:
            self.covered(start + len(tokens))
