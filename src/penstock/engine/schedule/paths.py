"""Which path a sequence reads: pinned where it is let in, followed as others commit behind it, left
when it ends.

    admit  ──> enter: the first tokens that are held, as far as it can go on from there
    wait   ──> catch_up: what others have committed meanwhile
    end    ──> leave ──> tidy: small nodes that nobody reads any more are merged

A sequence goes on where every layer can: where all windows in front are whole, and there are
states. `committing` makes paths longer.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.windows import Path, Windows
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.stats import Counters
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStores:
    """What holds keys and values beyond a sequence's end; None for what a model or an engine's
    settings do without."""

    prefixes: Prefixes[Segment]
    checkpoints: Checkpoints | None
    windows: Windows | None
    requantizer: Requantizer | None
    tiers: TierGroup | None


class Paths:
    """The paths of an engine's sequences. Not thread-safe: the engine's thread.

    Args:
        held: by the engine.
        shared_tokens: up to which position KV depends on the tokens alone, not on the window; a
            multiple of the block size.
        tally: of the engine.
    """

    def __init__(self, held: KVStores, *, shared_tokens: int, counters: Counters) -> None:
        self.shared_tokens = shared_tokens
        self._prefixes = held.prefixes
        self._checkpoints = held.checkpoints
        self._windows = held.windows
        self._requantizer = held.requantizer
        self.counters = counters

    # ---- questions

    @property
    def by_block(self) -> bool:
        """Whether prompts are read block by block: every block is read as codes by those behind
        it, and as it was computed by its own tokens."""
        return self._requantizer is not None and self._requantizer.active and self.shared_tokens > 0

    def readable(self, sequence: Sequence) -> int:
        """Return the most tokens of a path that a sequence reads: all but its last one, which is
        computed for its logits; read block by block, those in front of that one's block."""
        if self.by_block:
            return sequence.last_boundary(self._prefixes.block_size)
        return len(sequence.tokens) - 1

    def resume(self, path: Path, max_kv_tokens: int) -> tuple[int, RecurrentState | None]:
        """Return at which position of a path, `max_kv_tokens` at most, a sequence can go on: all
        windows in front of it are whole, and there are states, with which it does."""
        while True:
            if self._windows is not None:
                max_kv_tokens = self._windows.resume(path, max_kv_tokens)
            if self._checkpoints is None:
                return max_kv_tokens, None
            found, recurrent_state = self._checkpoints.resume(path, max_kv_tokens)
            if self._windows is None or found in (0, max_kv_tokens):
                return found, recurrent_state
            max_kv_tokens = found

    def matched(self, block_hashes: Items[bytes]) -> int:
        """Return how many first tokens of a chain are held."""
        return self._prefixes.match(block_hashes).tokens

    def reachable(self, sequence: Sequence) -> int:
        """Return from where a sequence could go on."""
        match = self._prefixes.match(sequence.block_hashes)
        num_cached_tokens, _ = self.resume(match.path, min(match.tokens, self.readable(sequence)))
        return num_cached_tokens

    def holds_next(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's path holds the token behind its cut as well: the last one of
        a prompt that is held to its end, which is computed for its logits alone."""
        block = sequence.num_cached_tokens // self._prefixes.block_size
        node = None if sequence.pin is None else sequence.pin.node
        if (
            node is None
            or node.end <= sequence.num_cached_tokens
            or block >= len(sequence.block_hashes)
        ):
            return False
        return (
            node.block_hashes[block - node.start // self._prefixes.block_size]
            == sequence.block_hashes[block]
        )

    def explain(self, tokens: Items[int], salt: str) -> tuple[int | None, str]:
        """Return from where a prompt would go on, and why not from the end of what is held; None
        if from there, in a model in which that is so until memory is short."""
        if self._checkpoints is None and self._windows is None:
            return None, ""
        match = self._prefixes.find(tokens, salt)
        most = min(match.tokens, max(0, len(tokens) - 1))
        resumes, _ = self.resume(match.path, most)
        whole = most if self._windows is None else self._windows.resume(match.path, most)
        if self._checkpoints is None and whole == most:
            return None, ""
        why = ""
        if whole < most:
            why = (
                f"; layers with windows go on from token {whole:,} at most, of {match.tokens:,} "
                f"held: when memory was short they dropped what goes on neither at the end of a "
                f"conversation nor where some part; what is read again is held again"
            )
        if resumes < whole:
            why += (
                f"; recurrent layers go on from token {resumes:,}, the deepest of the "
                f"{match.tokens:,} held at which their states were kept: they are at the ends "
                f"of turns and chunks, and fewer further back"
            )
        return resumes, why

    def check(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError if a path is pinned by nobody, or lacks what its sequence sees.

        Args:
            sequences: all that are open.
        """
        pins = sum(s.pin is not None for s in sequences)
        if pins != self._prefixes.tree.pins:
            raise AssertionError(f"{self._prefixes.tree.pins} pins, {pins} owners")
        for sequence in sequences:
            if self._windows is not None and sequence.pin is not None:
                self._windows.check(
                    sequence.pin.path, sequence.num_cached_tokens, sequence.position
                )

    # ---- acts

    def hash_blocks(self, sequence: Sequence) -> None:
        """Extend a sequence's chain of names to the whole blocks that may be shared."""
        sequence.hash_blocks(self._prefixes, self.shared_tokens)

    def enter(self, sequence: Sequence, matched: int) -> None:
        """Let a sequence read the first `matched` tokens that are held, or as far as it can go on
        from there."""
        blocks = matched // self._prefixes.block_size
        match = self._prefixes.match(sequence.block_hashes[:blocks])
        num_cached_tokens, recurrent_state = self.resume(
            match.path, min(matched, self.readable(sequence))
        )
        sequence.pin, sequence.num_cached_tokens = self._prefixes.pin(match), num_cached_tokens
        sequence.recurrent_state, sequence.matched_tokens = recurrent_state, match.tokens

    def back_out(self, sequence: Sequence) -> None:
        """Undo `enter`."""
        assert sequence.pin is not None
        sequence.pin.release()
        sequence.pin, sequence.num_cached_tokens, sequence.recurrent_state = None, 0, None

    def catch_up(self, sequence: Sequence) -> int:
        """Let a sequence read what others have committed of its tokens meanwhile, if it can go on
        behind that; return the tokens that it need not compute."""
        size = self._prefixes.block_size
        done = sequence.num_cached_tokens // size
        if sequence.own_spans or not sequence.left or sequence.pin is None:
            return 0
        if done >= len(sequence.block_hashes):
            return 0
        blocks = self._prefixes.follow(sequence.pin, sequence.block_hashes, done)
        if blocks <= done:
            return 0
        most = min(blocks * size, self.readable(sequence))
        num_cached_tokens, recurrent_state = self.resume(sequence.pin.path, most)
        if num_cached_tokens <= sequence.num_cached_tokens:
            return 0
        gained = num_cached_tokens - sequence.num_cached_tokens
        sequence.num_cached_tokens, sequence.recurrent_state = num_cached_tokens, recurrent_state
        return gained

    def follow(self, sequence: Sequence, block_hashes: Items[bytes]) -> int:
        """Move a sequence's cut behind what the tree has of a chain, though it has no states
        there; return how many blocks that are."""
        assert sequence.pin is not None
        size = self._prefixes.block_size
        known = (
            self._prefixes.follow(sequence.pin, block_hashes, sequence.num_cached_tokens // size)
            * size
        )
        if self._windows is None or self._windows.resume(sequence.pin.path, known) == known:
            sequence.num_cached_tokens = known
        return sequence.num_cached_tokens // size

    def hold(self, sequence: Sequence) -> None:
        """Prefer the first nodes of a sequence's path from now on, if its request asks for it."""
        if sequence.pin is not None and sequence.hold_tokens:
            seconds = sequence.request.hold_seconds
            self._prefixes.hold(sequence.pin, sequence.hold_tokens, seconds)

    def leave(self, sequence: Sequence) -> None:
        """Let go of a sequence's path."""
        if self._requantizer is not None:
            self._requantizer.changed()
        if sequence.pin is None:
            return
        self.hold(sequence)
        sequence.pin.release()
        sequence.pin = None

    def tidy(self, node: Node[Segment] | None) -> None:
        """Merge small nodes of a path that somebody has left; it may fail, and nothing is lost."""
        try:
            self._prefixes.tidy(node)
        except (MemoryError, RuntimeError):  # MLX found no room for the copy
            self.counters.out_of_memory += 1
