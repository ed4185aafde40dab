"""`Prefixes`: the tree of computed KV, inside a ledger that it may share with others.

    tokens --keys--> chain --match--> path --pin--> read; follow others --insert--> commit

`BoundedTree` holds it inside the limit; an act without room is refused, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.ledger import Kind, Ledger, Reservation
from penstock.prefix.block_hashes import TokenArray, Tokens, as_tokens, hash_blocks, root_hash
from penstock.prefix.bounded_tree import BoundedTree, remembered_nodes
from penstock.prefix.node import NODE_BYTES, Match, Node, NodeView, S, upwards
from penstock.prefix.pin import Pin
from penstock.prefix.policy import HalfLife, PrefillCost
from penstock.prefix.tree import PrefixTree

MAX_MERGE_TOKENS = 2_048


@dataclass(frozen=True, slots=True)
class InsertResult:
    """Result of `insert`."""

    blocks_readable: int
    """Whole blocks of the chain, from the first one on, that can be read below the pin."""
    new_tokens: int
    """Tokens that were not in the tree before."""
    refused: str | None = None
    """Why nothing was inserted, if there was no room. Not set when all was known before."""


class Prefixes(BoundedTree[S]):
    """KV by prefix. Not thread-safe: one owner, the thread with the arrays.

    Args:
        ledger: see `BoundedTree`.
        block_size: tokens of a block, the unit of identity.
        fingerprint: identity of everything but the tokens that KV depends on.
        clock: seconds, for recency.
        cost: of a prefill, for the order of eviction.
        remembered: how many of the nodes, and blocks, that were evicted are remembered; by
            default `remembered_nodes` of the limit.
        max_merge_tokens: nodes are not merged to more than this,
        max_merge_bytes: unless they take no more than this together, and are not much longer; see
            `PrefixTree`.
        span_tokens: a node is merged with a longer parent, too, if both are no more than this.

    Raises:
        LedgerFull, NeverFits: not even the empty index fits.

    >>> prefixes = Prefixes(Ledger(1_000_000), block_size=64)
    >>> prefixes.find(range(200)).tokens
    0
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        block_size: int,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
        cost: PrefillCost | None = None,
        remembered: int | None = None,
        max_merge_tokens: int = MAX_MERGE_TOKENS,
        max_merge_bytes: int = 0,
        span_tokens: int = 0,
    ) -> None:
        if remembered is None:
            remembered = remembered_nodes(ledger.limit_bytes)
        self.policy = HalfLife(cost=cost, remembered_nodes=remembered)
        tree: PrefixTree[S] = PrefixTree(
            block_size,
            self.policy,
            max_merge_tokens=max_merge_tokens,
            max_merge_bytes=max_merge_bytes,
        )
        super().__init__(ledger, tree, remembered=remembered, clock=clock)
        self.fingerprint = fingerprint
        self._span_tokens = span_tokens

    # ---- questions

    def block_hashes(
        self, tokens: Tokens, salt: str = "", *, after: bytes | None = None
    ) -> list[bytes]:
        """Name the whole blocks of a prompt: the chain that all other questions are asked with.

        Args:
            tokens: the prompt, or its tokens behind the block `after`.
            salt: the tenant's; others find nothing of it.
            after: the last key of a chain that goes on; the salt is in it already.
        """
        return hash_blocks(tokens, self.block_size, self.root(salt) if after is None else after)

    def root(self, salt: str) -> bytes:
        """Return the root hash of a tenant's chains."""
        return root_hash(self.fingerprint, salt)

    def find(self, tokens: Tokens, salt: str = "") -> Match[S]:
        """Find the longest prefix of a prompt that is held. Valid until the tree changes."""
        return self.match(self.block_hashes(tokens, salt))

    def views(self) -> list[NodeView]:
        """Show every node of the tree as it is now, parents before their children."""
        return self.tree.views(self.clock())

    # ---- reading

    def pin(self, match: Match[S]) -> Pin[S]:
        """Read a match: keep its nodes until released, and count the use. Nothing is split.

        The match may end inside its last node: how many blocks of the path are the sequence's
        is for the sequence to remember (`blocks_done`).
        """
        return self.tree.pin(match.path[-1] if match.path else None, self.clock())

    def follow(self, pin: Pin[S], block_hashes: Sequence[bytes], blocks_done: int) -> int:
        """Extend a pin along blocks of the chain that other sequences committed.

        Releases this sequence's own copies of them.

        Args:
            pin: a sequence's, whose path holds the first `blocks_done` of these blocks.
            block_hashes: the chain of the sequence, from its first block on, as far as it may be
                read.
            blocks_done: whole blocks of the path that the sequence reads now.

        Returns:
            Whole blocks that can be read now; at least `blocks_done`.

        Raises:
            ValueError: the path is not that of the chain.
        """
        match = self._match_at_least(block_hashes, blocks_done)
        self._lead(pin, match.path)
        return match.tokens // self.block_size

    def hold(self, pin: Pin[S], tokens: int, seconds: float) -> None:
        """Hold the nodes of a path that begin within its first `tokens` for so long from now.

        They are evicted only when nothing else can be: a preference, unlike the pin.
        """
        until = self.clock() + seconds
        for node in pin.path:
            if node.start < tokens:
                self.tree.hold(node, until)

    # ---- writing

    def insert(
        self,
        pin: Pin[S],
        blocks_done: int,
        block_hashes: Sequence[bytes],
        tokens: Tokens,
        segment: S,
        paid: Reservation,
    ) -> InsertResult:
        """Hang finished blocks below the first `blocks_done` of a path, and pin them, too.

        If others have committed the same blocks meanwhile, their nodes are pinned instead; if they
        committed some of them, the others are copied out of `segment` and inserted. The bytes of
        `paid` go down by just the bytes that the tree has taken over. So after anything but a
        refusal the caller lets go of the segment, and of the bytes that `paid` still counts for it.

        A refusal changes and evicts nothing; the blocks stay the caller's, which goes on reading
        them.

        Args:
            pin: the sequence's.
            blocks_done: whole blocks of the path that the sequence reads.
            block_hashes: the sequence's chain, from its first block on.
            tokens: of the segment's blocks.
            segment: the blocks behind `blocks_done`; not changed.
            paid: a reservation that counts the segment's bytes already.

        Raises:
            ValueError: sizes that contradict each other, or a path that is not the chain's.
        """
        values = as_tokens(tokens)
        blocks = self._blocks_of(segment, values, block_hashes, blocks_done, paid)
        end = blocks_done + blocks
        match = self._match_at_least(block_hashes[:end], blocks_done)
        self._lead(pin, match.path)
        known = match.tokens // self.block_size - blocks_done
        if known == blocks:
            return InsertResult(end, 0)
        needed = self._bytes_to_split(match) + self.index_bytes(blocks - known)
        needed += segment.nbytes if known else 0
        if not self.make_room(needed):
            start = blocks_done * self.block_size
            self._lead(pin, [node for node in match.path if node.start < start])
            self.counts.refused += 1
            return InsertResult(blocks_done, 0, self.no_room(needed))
        self.split(pin, match)
        at = known * self.block_size
        new_keys, new_values = block_hashes[blocks_done + known : end], values[at:]
        if known == 0:
            self._hang(pin, new_keys, new_values, segment, paid)
        else:
            with self.ledger.reserve(Kind.BUFFERS, segment.nbytes) as copies:
                self._hang(pin, new_keys, new_values, segment.split(at)[1], copies)
        return InsertResult(end, len(new_values))

    def insert_partial(
        self,
        pin: Pin[S],
        blocks_done: int,
        root: bytes,
        tokens: Tokens,
        segment: S,
        paid: Reservation,
    ) -> Node[S] | None:
        """Hang a partial block, a sequence's end, below the blocks that the sequence reads.

        It is not pinned. `paid` goes down by its keys and values; the checkpoints are
        found room for.

        Args:
            pin: the sequence's, with a path of `blocks_done` blocks or more.
            blocks_done: whole blocks of the path that the sequence reads.
            root: hash of the last of them, or the root hash.
            tokens: of the segment.
            segment: fewer tokens than a block.
            paid: a reservation that counts the keys and values already.

        Returns:
            The leaf, which may have been there already; None if there is no room.
        """
        if not self._end_at(pin, blocks_done):
            return None
        known = self.tree.match_partial(pin.node, root, tokens)
        if known is not None and len(known.tokens) == segment.tokens:
            return known
        if not self.make_room(self.index_bytes(1) + segment.checkpoint_nbytes):
            return None
        kv_nbytes = segment.nbytes - segment.checkpoint_nbytes
        self._index.resize(self._index.nbytes + self.index_bytes(1))
        self._checkpoints.resize(self._checkpoints.nbytes + segment.checkpoint_nbytes)
        try:
            leaf = self.tree.insert_partial(pin.node, root, tokens, segment, self.clock())
            paid.resize(paid.nbytes - kv_nbytes)
        finally:
            self._settle()
        return leaf

    def find_partial(self, match: Match[S], root: bytes, tokens: Tokens) -> Node[S] | None:
        """Find the longest partial block behind a match with which the tokens behind it begin."""
        if match.ends_inside:
            return None
        return self.tree.match_partial(match.path[-1] if match.path else None, root, tokens)

    def use_partial(self, leaf: Node[S]) -> None:
        """Count a read of a partial block, which its reader copies or keeps for itself."""
        self.tree.pin(leaf, self.clock()).release()

    def drop_partial(self, leaf: Node[S]) -> None:
        """Drop a partial block whose only reader has gone on behind it."""
        if leaf in self.tree and leaf.hits <= 1:
            self.tree.remove(leaf)
            self._settle()

    def split(self, pin: Pin[S], match: Match[S]) -> bool:
        """Make a pinned path end where its match does, cutting the last node if need be.

        `insert` does it by itself; do it before if the copy should not be held beside a segment.

        Returns:
            False if there is no room for the copy; nothing has changed then.
        """
        if not match.ends_inside:
            return True
        node = match.path[-1]
        if not self.make_room(self._bytes_to_split(match)):
            return False
        with self._copying(node.copy_bytes, node.index_bytes):
            pin.withdraw(self.tree.split(node, match.blocks_in_last))
        return True

    def tidy(self, at: Pin[S] | Node[S] | None) -> int:
        """Merge the small nodes of a path and return by how many it has fewer.

        A node is merged with its parent if the parent is not longer, as in a binary counter, or if
        both are a span at most. So a sequence that commits block by block has each token copied
        O(log) times beyond its span, and leaves a path of few nodes. Nodes that come together are
        copied once. There must be room for the copy; nothing is evicted for it.

        Args:
            at: the end of the path.
        """
        node = at.node if isinstance(at, Pin) else at
        merged = 0
        while node is not None:
            run = self._run_to_merge(node)
            if len(run) > 1:
                self._merge(run)
                merged += len(run) - 1
            node = node.parent
        return merged

    def cut(self, node: Node[S], blocks: int) -> bool:
        """Cut a node behind its first `blocks` blocks; afterwards it is the rest.

        Returns:
            False if there is no room for the copy; nothing is evicted for it.
        """
        if node.copy_bytes + node.index_bytes > self.ledger.free_bytes:
            return False
        with self._copying(node.copy_bytes, node.index_bytes):
            self.tree.split(node, blocks)
        return True

    def exchange(self, node: Node[S], make: Callable[[S], S], nbytes: int) -> bool:
        """Hold a node's KV in another form.

        Args:
            node: of the tree, pinned or not: sequences read the new form from the next step on.
            make: makes the other form; its own buffers are the caller's to count.
            nbytes: the most that the other form takes.

        Returns:
            False if there is no room for both forms; nothing is evicted for it.
        """
        if nbytes > self.ledger.free_bytes:
            return False
        with self.ledger.reserve(Kind.BUFFERS, nbytes) as reserved:
            try:
                self.tree.exchange(node, make(node.segment))
            finally:
                reserved.resize(0)  # it is the node's now
                self._settle()
        return True

    # ---- parts

    def _blocks_of(
        self,
        segment: S,
        values: TokenArray,
        block_hashes: Sequence[bytes],
        blocks_done: int,
        paid: Reservation,
    ) -> int:
        """Return how many blocks a segment has; raise ValueError if sizes contradict each other."""
        blocks, over = divmod(segment.tokens, self.block_size)
        few = len(block_hashes) < blocks_done + blocks
        if over or not blocks or len(values) != segment.tokens or few:
            raise ValueError(
                f"a segment of {segment.tokens} tokens, {len(values)} tokens and "
                f"{len(block_hashes)} keys do not make blocks of {self.block_size} "
                f"behind block {blocks_done}"
            )
        if paid.nbytes < segment.nbytes:
            raise ValueError(f"{paid} does not count the segment's {segment.nbytes} bytes")
        return blocks

    def _match_at_least(self, block_hashes: Sequence[bytes], blocks: int) -> Match[S]:
        match = self.match(block_hashes)
        if match.tokens < blocks * self.block_size:
            raise ValueError(
                f"{match.tokens // self.block_size} blocks of the chain are held, and a path of "
                f"{blocks} was promised: the pin is not on this chain"
            )
        return match

    def _end_at(self, pin: Pin[S], blocks: int) -> bool:
        """Let a pinned path end behind its first blocks; False without room for a copy."""
        node, end = pin.node, blocks * self.block_size
        while node is not None and node.start >= end:
            node = node.parent
        pin.withdraw(node)
        if node is None or node.end == end:
            return True
        inside = Match(node.path(), end, (end - node.start) // self.block_size)
        return self.split(pin, inside)

    def _lead(self, pin: Pin[S], path: Sequence[Node[S]]) -> None:
        """Move a pin to the end of `path`; nodes that are new to it count as used now."""
        own = set(pin.path)
        shared = [node for node in path if node in own]
        pin.withdraw(shared[-1] if shared else None)
        now = self.clock()
        for node in path[len(shared) :]:
            pin.extend(node, now)

    def _hang(
        self,
        pin: Pin[S],
        block_hashes: Sequence[bytes],
        values: TokenArray,
        segment: S,
        paid: Reservation,
    ) -> None:
        """Insert below the pinned node, whose room was made, and pin the new node."""
        self._index.resize(self._index.nbytes + self.index_bytes(len(block_hashes)))
        try:
            pin.extend(self.tree.insert(pin.node, block_hashes, values, segment, self.clock()))
            # From one line of the account to another: there need not be room for both.
            paid.resize(paid.nbytes - segment.nbytes)
        finally:
            self._settle()
        self.counts.stored_tokens += len(values)

    def _bytes_to_split(self, match: Match[S]) -> int:
        """Return the free bytes that cutting the match's last node takes."""
        if not match.ends_inside:
            return 0
        node = match.path[-1]
        return node.copy_bytes + node.index_bytes + NODE_BYTES

    def _run_to_merge(self, last: Node[S]) -> list[Node[S]]:
        """Return the nodes, parents first, that `last` is to be merged with and has room for."""
        run, tokens, nbytes = [last], len(last.tokens), last.copy_bytes + last.index_bytes
        for node in upwards(last.parent):
            nbytes += node.copy_bytes + node.index_bytes
            fits = nbytes <= self.ledger.free_bytes
            longer = len(node.tokens) > tokens and tokens + len(node.tokens) > self._span_tokens
            if longer or not fits or not self.tree.can_merge(node, last):
                break
            tokens += len(node.tokens)
            run.insert(0, node)
        return run

    def _merge(self, run: Sequence[Node[S]]) -> None:
        nbytes = sum(node.copy_bytes for node in run)
        with self._copying(nbytes, sum(node.index_bytes for node in run)):
            self.tree.merge(run[0], run[-1])
