"""The blocks of one sequence in the prefix tree: its chain of hashes, and the path that it reads.

    attach  ──> match, pin: the cached tokens from which every layer can resume
    extend  ──> follow: blocks that other sequences have committed meanwhile
    commit  ──> insert: whole blocks that were computed, or read from a tier
    detach  ──> release

Blocks that are new in the tree are announced to the tiers here.
"""

from __future__ import annotations

from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.schedule.kv_stores import KVStores
from penstock.kv.attention_plan import KVSpan
from penstock.kv.segment import Segment
from penstock.ledger import Reservation
from penstock.prefix.node import Match, Node
from penstock.prefix.pin import Pin


class CachedPath:
    """The path of one sequence, and its only writer. Not thread-safe: the engine's thread.

    The sequence reads the first `num_cached_tokens` of the pinned path.

    Args:
        stores: the engine's.
        tokens: prompt and answer; grows as the answer does.
        block_hashes: those of the whole blocks of `tokens`, as far as they may be shared.
        salt: the tenant's.
        hold_tokens: first tokens that stay cached for a while after the end; 0 for none.
        hold_seconds: duration of that.
        transient: whether its blocks are evicted at its end, and go to no tier without need.
        prompt_logprobs: of the prompt, whose logits are then read; None if they are not.
    """

    def __init__(
        self,
        stores: KVStores,
        tokens: list[int],
        block_hashes: list[bytes],
        *,
        salt: str = "",
        hold_tokens: int = 0,
        hold_seconds: float | None = None,
        transient: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.tokens = tokens
        self.block_hashes = block_hashes
        self.pin: Pin[Segment] | None = None
        self.num_cached_tokens = 0
        self.matched_tokens = 0
        """Tokens that the tree held at admission: other sequences may branch there, too."""
        self.transient = transient
        self.prompt_logprobs = prompt_logprobs
        self._matched_version: tuple[int, int] | None = None
        """Version of the tree, and of scored blocks, in which its path was looked up; or None."""
        self._stores = stores
        self._size = stores.block_size
        self._salt = salt
        self._hold_tokens = hold_tokens
        self._hold_seconds = hold_seconds

    # ---- questions

    @property
    def node(self) -> Node[Segment] | None:
        """Deepest node of the path; None without one."""
        return None if self.pin is None else self.pin.node

    @property
    def last_boundary(self) -> int:
        """End of the last whole block in front of the last token."""
        return (len(self.tokens) - 1) // self._size * self._size

    @property
    def readable_tokens(self) -> int:
        """Most tokens of a path that the sequence reads.

        Where the logits of the prompt are read, it is the tokens whose logits were.
        """
        most = self._stores.readable_tokens(len(self.tokens))
        logprobs = self.prompt_logprobs
        if logprobs is None:
            return most
        self._stores.scored.fill(logprobs, self.block_hashes)
        if logprobs.done:
            return most
        return min(most, logprobs.read_positions // self._size * self._size)

    @property
    def reachable_tokens(self) -> int:
        """Number of tokens cached now behind which the sequence could resume."""
        match = self._stores.prefixes.match(self.block_hashes)
        resumed, _ = self._stores.resume(match.path, min(match.tokens, self.readable_tokens))
        return resumed

    @property
    def _version(self) -> tuple[int, int]:
        """Version of all that decides how much of the path is read."""
        scored = 0 if self.prompt_logprobs is None else self._stores.scored.version
        return self._stores.prefixes.tree.version, scored

    def cached_spans(self) -> list[KVSpan]:
        """Return the spans of the path that the sequence reads, in order."""
        path = self.pin.path if self.pin is not None else ()
        return [
            KVSpan(node.segment, node.start, min(node.end, self.num_cached_tokens) - node.start)
            for node in path
            if node.start < self.num_cached_tokens
        ]

    def _root_at(self, position: int) -> bytes:
        """Return the hash of the block that ends at a position, or the root hash."""
        blocks = position // self._size
        return self.block_hashes[blocks - 1] if blocks else self._stores.prefixes.root(self._salt)

    def _holds_next(self) -> bool:
        """Tell whether the path holds the token behind the cached ones as well.

        It is the last token of a prompt cached to its end, computed for its logits alone.
        """
        block, node = self.num_cached_tokens // self._size, self.node
        if node is None or node.end <= self.num_cached_tokens or block >= len(self.block_hashes):
            return False
        held = node.block_hashes[block - node.start // self._size]
        return bool(held == self.block_hashes[block])

    # ---- the chain

    def hash_blocks(self) -> None:
        """Hash the whole blocks that are new since the last call, as far as they may be shared."""
        size, prefixes = self._size, self._stores.prefixes
        blocks = min(len(self.tokens), self._stores.shared_tokens) // size
        if blocks > len(self.block_hashes):
            rest = self.tokens[len(self.block_hashes) * size : blocks * size]
            after = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes += prefixes.block_hashes(rest, self._salt, after=after)

    def unshare(self) -> None:
        """Copy tokens and hashes, which the answers of a request share until admission."""
        self.tokens, self.block_hashes = list(self.tokens), list(self.block_hashes)

    # ---- the path

    def _pin(self, match: Match[Segment], cached_tokens: int, *, whole: bool) -> None:
        """Pin a path, of which the sequence reads so many tokens.

        Args:
            match: the path.
            cached_tokens: tokens of the path that are read.
            whole: whether it is the match of all blocks of the sequence.
        """
        self.pin = self._stores.prefixes.pin(match)
        self._index_path()
        self.num_cached_tokens = cached_tokens
        self.matched_tokens = match.tokens
        self._matched_version = self._version if whole else None

    def _index_path(self) -> None:
        """Index the keys of nodes that came without an index."""
        if self.pin is not None:
            self._stores.index(self.pin.path)

    def _release(self) -> None:
        """Let go of the path."""
        if self.pin is not None:
            self.pin.release()
        self.pin, self.num_cached_tokens = None, 0

    def _read_to(self, cached_tokens: int) -> None:
        """Read so many tokens of the path from now on."""
        self.num_cached_tokens = cached_tokens

    def _follow_others(self) -> int:
        """Move the pin on to blocks that other sequences have committed; return the whole blocks.

        Looks nothing up while the tree is as it was.
        """
        cached_blocks = self.num_cached_tokens // self._size
        version = self._version
        if self.pin is None or version == self._matched_version:
            return cached_blocks
        if cached_blocks >= len(self.block_hashes):
            return cached_blocks
        self._matched_version = version
        return self._stores.prefixes.follow(self.pin, self.block_hashes, cached_blocks)

    def follow(self, block_hashes: list[bytes]) -> int:
        """Move on to all blocks of a chain that the tree has, and return the cached blocks.

        There need not be states at their end.
        """
        assert self.pin is not None
        stores, size = self._stores, self._size
        blocks = stores.prefixes.follow(self.pin, block_hashes, self.num_cached_tokens // size)
        if (
            stores.windows is None
            or stores.windows.resume(self.pin.path, blocks * size) == blocks * size
        ):
            self.num_cached_tokens = blocks * size
        return self.num_cached_tokens // size

    def leave_last(self) -> None:
        """Leave the last token of the prompt to be computed, for its logits."""
        self.num_cached_tokens = min(self.num_cached_tokens, self.readable_tokens)

    def forget(self) -> None:
        """Evict all blocks of the sequence that no other one reads."""
        prefixes = self._stores.prefixes
        if path := prefixes.match(self.block_hashes).path:
            prefixes.drop(path[0], "cleared")

    def _insert(self, segment: Segment, paid: Reservation) -> bool:
        """Insert whole blocks behind the cached tokens into the tree; False without room.

        Args:
            segment: of the blocks.
            paid: counts the segment; goes down by the bytes that the tree has taken over.
        """
        assert self.pin is not None
        stores, size, start = self._stores, self._size, self.num_cached_tokens
        if stores.windows is not None and not stores.windows.fill(
            self.pin, self.block_hashes, segment, start
        ):
            return False
        inserted = stores.prefixes.insert(
            self.pin,
            start // size,
            self.block_hashes,
            self.tokens[start : start + segment.tokens],
            segment,
            paid,
        )
        if inserted.refused is not None:
            return False
        if stores.requantizer is not None:
            stores.requantizer.changed()
        end = inserted.blocks_readable * size
        if stores.windows is not None and stores.windows.resume(self.pin.path, end) < end:
            return False  # KV that was filled in had to be evicted for the rest
        if start < self._hold_tokens:
            self._hold()  # before it is merged with nodes that are not to be held
        self.num_cached_tokens = end
        return True

    def _withdraw(self, keep: int) -> None:
        """Let go of the nodes behind the first `keep` tokens."""
        assert self.pin is not None
        self._hold()
        path = [node for node in self.pin.path if node.start < keep]
        self.pin.withdraw(path[-1] if path else None)
        self.num_cached_tokens = min(self.num_cached_tokens, path[-1].end if path else 0)

    def _hold(self) -> None:
        """Prefer the first nodes of the path from now on, if the request asks for it."""
        if self.pin is not None and self._hold_tokens and self._hold_seconds:
            self._stores.prefixes.hold(self.pin, self._hold_tokens, self._hold_seconds)

    # ---- tiers

    def _note_blocks(self, first: int) -> None:
        """Have the cached blocks from the `first` on written to the tiers."""
        stores = self._stores
        spills = stores.spilling is not None  # what has to leave memory is always written
        if stores.tiers is not None and (spills or not self.transient):
            block_hashes = self.block_hashes[: self.num_cached_tokens // self._size]
            stores.tiers.note(block_hashes, stores.prefixes.root(self._salt), first, seen=spills)

    def note_again(self) -> None:
        """Have all cached blocks that the tiers lack written to them."""
        self._note_blocks(0)

    def _note_checkpoint(self, at: int, *, answered: bool = False) -> None:
        """Have the states that were captured under a boundary written to the tiers."""
        stores = self._stores
        if stores.tiers is not None and not self.transient:
            root = stores.prefixes.root(self._salt)
            block_hashes = self.block_hashes[: at // self._size]
            stores.tiers.note_checkpoint(block_hashes, root, answered=answered)

    def end_turn(self, known_tokens: int) -> None:
        """Retain the states with which a conversation goes on behind this answer.

        Args:
            known_tokens: first tokens that were cached before.
        """
        if self.transient:
            return
        stores = self._stores
        if stores.checkpoints is not None and self.pin is not None:
            at = stores.checkpoints.end_turn(self.pin.path, self.num_cached_tokens)
            self._note_checkpoint(at, answered=True)
        elif stores.tiers is not None and self.num_cached_tokens - known_tokens >= self._size:
            block_hashes = self.block_hashes[: self.num_cached_tokens // self._size]
            stores.tiers.note_end(block_hashes, stores.prefixes.root(self._salt))
