"""`Prefixes`: the prefix cache, a tree of computed KV within a memory ledger.

    tokens --keys--> chain --match--> path --pin--> read; follow others --insert--> commit

An insertion first makes room by evicting the least valuable unpinned nodes. If it can never fit, it
is refused without effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic

from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory.sizes import format_bytes
from penstock.prefix.beside import Beside
from penstock.prefix.block_hashes import TokenArray, Tokens, as_tokens, hash_blocks, root_hash
from penstock.prefix.explanation import EvictionLog, Why
from penstock.prefix.node import NODE_BYTES, Match, Node, NodeView, S, index_bytes, upwards
from penstock.prefix.pin import Pin
from penstock.prefix.policy import REMEMBERED_NODES, HalfLife, PrefillCost
from penstock.prefix.tree import LONGER, PrefixTree

logger = logging.getLogger(__name__)

MAX_MERGE_TOKENS = 2_048
BYTES_PER_REMEMBERED = 20_000
"""Bytes of the memory limit per remembered eviction, which takes 500 bytes (node and block)."""
REMEMBERED_MATCHES = 64
"""Number of cached match results, valid while the tree is unchanged."""


@dataclass(slots=True)
class PrefixCounts:
    hits: int = 0
    fetched_tokens: int = 0
    """Tokens read from the cache instead of being prefilled."""
    stored_tokens: int = 0
    refused: int = 0
    evicted_nodes: int = 0
    evicted_bytes: int = 0
    copied_bytes: int = 0
    """KV copied by splits and merges."""


def remembered_nodes(limit_bytes: int) -> int:
    """Return the number of evicted nodes to remember: at most 16,384, in 2.5 % of the limit."""
    return min(REMEMBERED_NODES, limit_bytes // BYTES_PER_REMEMBERED)


@dataclass(frozen=True, slots=True)
class InsertResult:
    blocks_readable: int
    """Number of the chain's blocks that the pinned path covers."""
    new_tokens: int
    refused: str | None = None
    """Reason why nothing was inserted; None if the blocks were inserted or already cached."""


class Prefixes(Generic[S]):
    """Prefix cache. Not thread-safe: owned by the thread that owns the arrays.

    Args:
        ledger: memory ledger; the tree uses `NODES`, `KEY_INDEX`, `CHECKPOINTS` and `INDEX`, and
            `BUFFERS` for copies during splits and merges.
        block_size: number of tokens per block.
        fingerprint: identity of everything besides tokens that KV depends on.
        clock: time in seconds, for recency.
        cost: cost of a prefill, for the eviction order.
        remembered: number of evicted nodes and blocks to remember; by default
            `remembered_nodes` of the limit.
        max_merge_tokens: maximum number of tokens of a merged node.
        max_merge_bytes: maximum bytes of a merged node with more tokens; 0 allows none.
        longer: maximum number of tokens of such a node, in multiples of `max_merge_tokens`.
        grows: returns whether a node with such a segment may have more than `max_merge_tokens`
            tokens; None allows all.
        span_tokens: a node is also merged with a longer parent if both together have at most this
            many tokens.
        beside: other memory that can be freed, and listeners; none by default.

    Raises:
        LedgerFull, NeverFits: the empty index does not fit.

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
        longer: int = LONGER,
        grows: Callable[[S], bool] | None = None,
        span_tokens: int = 0,
        beside: Beside[S] | None = None,
    ) -> None:
        if remembered is None:
            remembered = remembered_nodes(ledger.limit_bytes)
        self.policy = HalfLife(cost=cost, remembered_nodes=remembered)
        tree: PrefixTree[S] = PrefixTree(
            block_size,
            self.policy,
            max_merge_tokens=max_merge_tokens,
            max_merge_bytes=max_merge_bytes,
            longer=longer,
            grows=grows,
        )
        self.ledger = ledger
        self.tree = tree
        self.block_size = tree.block_size
        self.clock = clock
        self.counts = PrefixCounts()
        self._beside: Beside[S] = Beside() if beside is None else beside
        self.evictions = EvictionLog(remembered)
        self._matches: dict[bytes, Match[S]] = {}  # by the last hash of their chain
        self._matches_version = self.tree.version
        self._nodes = ledger.reserve(Kind.NODES, 0)
        self._key_index = ledger.reserve(Kind.KEY_INDEX, 0)
        self._checkpoints = ledger.reserve(Kind.CHECKPOINTS, 0)
        self._index = ledger.reserve(Kind.INDEX, self.fixed_bytes)
        self.fingerprint = fingerprint
        self._span_tokens = span_tokens

    @property
    def fixed_bytes(self) -> int:
        """Bytes of an empty tree's bookkeeping: the policy and the log of evictions."""
        return self.tree.policy.nbytes + self.evictions.nbytes

    @property
    def nbytes(self) -> int:
        kinds = (self._nodes, self._key_index, self._checkpoints, self._index)
        return sum(kind.nbytes for kind in kinds)

    @property
    def evictable_bytes(self) -> int:
        tree = self.tree
        return tree.nbytes + tree.index_bytes - tree.pinned_bytes + self._beside.nbytes

    @property
    def pinned_relief_bytes(self) -> int:
        """Lower bound of the bytes that can be freed from pinned nodes. O(nodes)."""
        return self._beside.relief.pinned_bytes

    def index_bytes(self, blocks: int) -> int:
        return index_bytes(blocks, self.block_size)

    def match(self, block_hashes: Sequence[bytes]) -> Match[S]:
        """Return the longest cached prefix of a chain. Valid until the tree changes."""
        if not block_hashes:
            return self.tree.match(block_hashes)
        if self._matches_version != self.tree.version or len(self._matches) >= REMEMBERED_MATCHES:
            self._forget_matches()
        match = self._matches.get(block_hashes[-1])
        if match is None:
            match = self._matches[block_hashes[-1]] = self.tree.match(block_hashes)
        return match

    def block_hashes(
        self, tokens: Tokens, salt: str = "", *, after: bytes | None = None
    ) -> list[bytes]:
        """Hash the whole blocks of a tenant's prompt, or of the tokens `after` a block hash."""
        return hash_blocks(tokens, self.block_size, self.root(salt) if after is None else after)

    def root(self, salt: str) -> bytes:
        return root_hash(self.fingerprint, salt)

    def find(self, tokens: Tokens, salt: str = "") -> Match[S]:
        return self.match(self.block_hashes(tokens, salt))

    def views(self) -> list[NodeView]:
        return self.tree.views(self.clock())

    # ---- room

    def make_room(self, nbytes: int, why: Why = "limit") -> bool:
        """Evict nodes until `nbytes` are free; return False and evict none if impossible."""
        short = nbytes - self.ledger.room_bytes
        beyond = short - self.evictable_bytes
        if beyond > 0 and beyond > self.pinned_relief_bytes:
            return False
        return self.shrink(short, why) >= short

    def reserve(self, kind: Kind, nbytes: int) -> Reservation:
        """Make room and reserve `nbytes`; if LedgerFull or NeverFits is raised, none is evicted."""
        self.make_room(nbytes)
        return self.ledger.reserve(kind, nbytes)

    def shrink(self, nbytes: int, why: Why = "pressure") -> int:
        """Evict the least valuable nodes until `nbytes` are free; return the bytes freed."""
        self.tree.order.expire(self.clock())
        freed = self._beside.free_first(nbytes)
        while freed < nbytes and (node := self.tree.victim()) is not None:
            freed += self._evict(node, why)
            for above in upwards(node.parent):
                if not self._beside.relief.is_useless(above):
                    break
                freed += self._evict(above, why)
        return freed + self._beside.free_last(nbytes - freed)

    def drop(self, node: Node[S], why: Why = "lost") -> None:
        """Evict a node whose data is unusable and its descendants, except pinned ones."""
        below = [node]
        for above in below:
            below.extend(above.children.values())
        for last in reversed(below):
            if not (last.pins or last.children):
                self._evict(last, why)

    def clear(self) -> None:
        """Evict all unpinned nodes, and free the other memory that can be freed."""
        while (node := self.tree.victim()) is not None:
            self._evict(node, "cleared")
        self._beside.clear()

    def no_room(self, nbytes: int) -> str:
        return (
            f"{format_bytes(nbytes)} do not fit in the limit of "
            f"{format_bytes(self.ledger.limit_bytes)} beside the nodes in use; raise memory_limit"
        )

    # ---- reading

    def pin(self, match: Match[S]) -> Pin[S]:
        """Pin the nodes of a match until released, and count a use. Nothing is split."""
        return self.tree.pin(match.path[-1] if match.path else None, self.clock())

    def follow(self, pin: Pin[S], block_hashes: Sequence[bytes], blocks_done: int) -> int:
        """Extend a pin along the chain's cached blocks; return the number of blocks it covers."""
        match = self._match_at_least(block_hashes, blocks_done)
        self._lead(pin, match.path)
        return match.tokens // self.block_size

    def hold(self, pin: Pin[S], tokens: int, seconds: float) -> None:
        """For `seconds`, evict the nodes that start in the first `tokens` of a path last.

        Unlike pinned nodes, they are evicted if there is nothing else to evict.
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
        """Insert finished blocks after the first `blocks_done` of a path, and pin them.

        If other sequences have committed some of the blocks meanwhile, their nodes are pinned, and
        only the remaining blocks are copied from `segment` and inserted. `paid` shrinks by the
        bytes that the tree takes over. Unless refused, the caller then drops the segment and
        releases what `paid` still counts for it.

        A refusal has no effect: the caller keeps the segment and reads from it.

        Args:
            pin: pin of the sequence.
            blocks_done: number of whole blocks of the path that the sequence reads.
            block_hashes: hashes of the sequence's blocks, from its first one on.
            tokens: tokens of the segment's blocks.
            segment: KV of the blocks after the first `blocks_done`; not changed.
            paid: reservation that already counts the segment's bytes.
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
        split_tokens = known * self.block_size
        new_keys, new_values = block_hashes[blocks_done + known : end], values[split_tokens:]
        if known == 0:
            self._hang(pin, new_keys, new_values, segment, paid)
        else:
            with self.ledger.reserve(Kind.BUFFERS, segment.nbytes) as copies:
                self._hang(pin, new_keys, new_values, segment.split(split_tokens)[1], copies)
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
        """Insert an unpinned partial block after a pin's blocks; return None if memory is full."""
        if not self._end_at(pin, blocks_done):
            return None
        known = self.tree.match_partial(pin.node, root, tokens)
        if known is not None and len(known.tokens) == segment.tokens:
            return known
        kv_nbytes = segment.nbytes - segment.checkpoint_nbytes
        unpaid = max(0, kv_nbytes - paid.nbytes)
        if not self.make_room(self.index_bytes(1) + segment.checkpoint_nbytes + unpaid):
            return None
        self._index.resize(self._index.nbytes + self.index_bytes(1))
        self._checkpoints.resize(self._checkpoints.nbytes + segment.checkpoint_nbytes)
        try:
            leaf = self.tree.insert_partial(pin.node, root, tokens, segment, self.clock())
            paid.resize(paid.nbytes + unpaid - kv_nbytes)
        finally:
            self._settle()
        return leaf

    def find_partial(self, match: Match[S], root: bytes, tokens: Tokens) -> Node[S] | None:
        if match.ends_inside:
            return None
        return self.tree.match_partial(match.path[-1] if match.path else None, root, tokens)

    def use_partial(self, leaf: Node[S]) -> None:
        """Count a use of a partial block."""
        self.tree.pin(leaf, self.clock()).release()

    def drop_partial(self, leaf: Node[S]) -> None:
        """Drop a partial block whose only reader has moved past it."""
        if leaf in self.tree and leaf.hits <= 1:
            self.tree.remove(leaf)
            self._settle()

    def split(self, pin: Pin[S], match: Match[S]) -> bool:
        """Truncate a pinned path to a match by splitting its last node; False if memory is full."""
        if not match.ends_inside:
            return True
        node = match.path[-1]
        if not self.make_room(self._bytes_to_split(match)):
            return False
        with self._copying(node.copy_bytes, node.index_bytes):
            pin.withdraw(self.tree.split(node, match.blocks_in_last))
        return True

    def tidy(self, last: Pin[S] | Node[S] | None) -> int:
        """Merge small nodes of a path; return the number of nodes saved."""
        node = last.node if isinstance(last, Pin) else last
        merged = 0
        while node is not None:
            run = self._run_to_merge(node)
            if len(run) > 1:
                self._merge(run)
                merged += len(run) - 1
            node = node.parent
        return merged

    def cut(self, node: Node[S], blocks: int) -> bool:
        if node.copy_bytes + node.index_bytes > self.ledger.free_bytes:
            return False
        with self._copying(node.copy_bytes, node.index_bytes):
            self.tree.split(node, blocks)
        return True

    def exchange(self, node: Node[S], make: Callable[[S], S], nbytes: int) -> bool:
        """Replace a node's segment as of the next step; return False if `nbytes` are not free."""
        if nbytes > self.ledger.free_bytes:
            return False
        with self.ledger.reserve(Kind.BUFFERS, nbytes) as reserved:
            try:
                self.tree.exchange(node, make(node.segment))
            finally:
                reserved.resize(0)  # the tree counts it now
                self._settle()
        return True

    # ---- proof

    def recount(self) -> dict[Kind, int]:
        checkpoints = sum(node.segment.checkpoint_nbytes for node in self.tree)
        key_index = sum(node.segment.key_index_nbytes for node in self.tree)
        return {
            Kind.NODES: sum(node.segment.nbytes for node in self.tree) - checkpoints - key_index,
            Kind.KEY_INDEX: key_index,
            Kind.CHECKPOINTS: checkpoints,
            Kind.INDEX: sum(node.index_bytes for node in self.tree) + self.fixed_bytes,
        }

    def check(self) -> None:
        self.tree.check()
        counted = {
            Kind.NODES: self._nodes.nbytes,
            Kind.KEY_INDEX: self._key_index.nbytes,
            Kind.CHECKPOINTS: self._checkpoints.nbytes,
            Kind.INDEX: self._index.nbytes,
        }
        if counted != self.recount():
            raise AssertionError(f"{counted} counted, {self.recount()} found")

    @contextmanager
    def _copying(self, nbytes: int, index_bytes: int) -> Iterator[None]:
        """Reserve memory for copies while they are made, then update the totals."""
        with self.ledger.reserve(Kind.BUFFERS, nbytes + index_bytes):
            try:
                yield
            finally:
                self._settle()
        self.counts.copied_bytes += nbytes

    def _evict(self, node: Node[S], why: Why) -> int:
        for evicting in self._beside.evicting:
            evicting(node)
        before = self.nbytes
        logger.debug("evicting a node of %d tokens (%s)", len(node.tokens), why)
        self.evictions.note(node.block_hashes, self.clock(), why)
        self.counts.evicted_nodes += 1
        self.counts.evicted_bytes += self.tree.remove(node).nbytes
        self._settle()
        return before - self.nbytes

    def _settle(self) -> None:
        self._forget_matches()
        totals = self.tree.totals
        self._nodes.resize(totals.nbytes - totals.checkpoint_bytes - totals.key_index_bytes)
        self._key_index.resize(totals.key_index_bytes)
        self._checkpoints.resize(totals.checkpoint_bytes)
        self._index.resize(self.tree.index_bytes + self.fixed_bytes)

    def _forget_matches(self) -> None:
        self._matches.clear()
        self._matches_version = self.tree.version

    def _blocks_of(
        self,
        segment: S,
        values: TokenArray,
        block_hashes: Sequence[bytes],
        blocks_done: int,
        paid: Reservation,
    ) -> int:
        blocks, over = divmod(segment.tokens, self.block_size)
        few = len(block_hashes) < blocks_done + blocks
        if over or not blocks or len(values) != segment.tokens or few:
            raise ValueError(
                f"a segment of {segment.tokens} tokens, {len(values)} tokens and "
                f"{len(block_hashes)} keys do not make blocks of {self.block_size} "
                f"after block {blocks_done}"
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
        """Truncate a pinned path to its first `blocks`; return False if memory is full."""
        node, end = pin.node, blocks * self.block_size
        while node is not None and node.start >= end:
            node = node.parent
        pin.withdraw(node)
        if node is None or node.end == end:
            return True
        inside = Match(node.path(), end, (end - node.start) // self.block_size)
        return self.split(pin, inside)

    def _lead(self, pin: Pin[S], path: Sequence[Node[S]]) -> None:
        pinned = set(pin.path)
        shared = [node for node in path if node in pinned]
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
        """Insert a node, whose segment `paid` counts, below the pinned node, and pin it."""
        self._index.resize(self._index.nbytes + self.index_bytes(len(block_hashes)))
        try:
            pin.extend(self.tree.insert(pin.node, block_hashes, values, segment, self.clock()))
            # Shrunk before the tree's reservation grows, so memory for both is not needed.
            paid.resize(paid.nbytes - segment.nbytes)
        finally:
            self._settle()
        self.counts.stored_tokens += len(values)

    def _bytes_to_split(self, match: Match[S]) -> int:
        if not match.ends_inside:
            return 0
        node = match.path[-1]
        return node.copy_bytes + node.index_bytes + NODE_BYTES

    def _run_to_merge(self, last: Node[S]) -> list[Node[S]]:
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
