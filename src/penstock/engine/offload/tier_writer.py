"""Blocks to write to a cold tier: queued, copied and offered between two steps.

    note     ──> new blocks ──> those of one record are copied ──> ColdTier.offer
    note_end ──> a conversation may continue here ──> after a delay, its last blocks and states

Nothing here waits for the store. `engine_tier` reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.engine.offload.conversation_ends import ConversationEnd, ConversationEnds
from penstock.kv.block_format import BlockFormats
from penstock.kv.segment import Segment
from penstock.kv.states import StateForm
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.host import host_block, host_states
from penstock.tiers.record import HostArray, Record
from penstock.tiers.worker import ColdTier

PENDING_HASHES = 16_384
"""Maximum number of block hashes waiting to be written, unless the longest chain has more."""
PENDING_TURNS = 64
"""Maximum number of checkpoints waiting to be written, and of waiting conversation ends."""
PENDING_HASH_BYTES = 80
"""Python overhead of one pending block hash."""
LINGERING_HASH_BYTES = 8
"""Bytes of a block hash in a waiting conversation end: a reference to the tree's hash."""
PENDING_BYTES = PENDING_HASHES * (PENDING_HASH_BYTES + LINGERING_HASH_BYTES)
"""Bytes of the lists of pending blocks and conversation ends."""


@dataclass(slots=True)
class _Pending:
    """Pending blocks of a chain; their KV is in the tree."""

    block_hashes: tuple[bytes, ...]
    root: bytes
    first: int
    ended: bool
    """Whether the last blocks of the chain are written even if they do not fill a record."""

    def goes_on(self, block_hashes: Sequence[bytes], first: int) -> bool:
        end = len(self.block_hashes)
        return (
            self.first <= first <= end <= len(block_hashes)
            and block_hashes[end - 1] == self.block_hashes[-1]
        )


class TierWriter:
    """Queue of blocks and checkpoints to write. Not thread-safe: owned by the engine's thread.

    `is_dear` returns whether a record takes long enough to compute to be written after one use.
    """

    def __init__(
        self,
        tier: ColdTier,
        prefixes: Prefixes[Segment],
        forms: BlockFormats,
        state_form: StateForm,
        record_bytes: int,
        is_dear: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._prefixes = prefixes
        self._forms = forms
        self._spans = forms.spans
        self._state_form = state_form
        self._has_states = bool(state_form.arrays)
        self._record_bytes = record_bytes
        self._is_dear = is_dear
        self._pending: deque[_Pending] = deque()
        self._pending_hashes = 0
        self._turns: deque[tuple[bytes, ...]] = deque(maxlen=PENDING_TURNS)
        self._ends = ConversationEnds(
            prefixes.block_size, PENDING_TURNS, clock, max_blocks=PENDING_HASHES
        )
        self.dropped_blocks = 0
        """Number of blocks evicted before they were written."""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending or self._turns)

    def note(
        self,
        block_hashes: Sequence[bytes],
        root: bytes,
        first: int,
        *,
        seen: bool = False,
        ended: bool = False,
    ) -> None:
        """Queue blocks in the tree, from `first` on, to be written if the tier lacks them.

        Blocks not `seen` before are only written if they are expensive to compute. If the
        conversation `ended`, its last blocks are written even if they do not fill a record.
        """
        if self._is_short(block_hashes) or not (seen or self._is_dear()):
            return
        if not self._has_states:  # full records include their blocks
            self._ends.drop_passed(block_hashes[: self._whole(block_hashes)])
        if first < self._forms.least_blocks:  # the chain was too short before
            first = 0
        if first < self._whole(block_hashes):
            self._wait(block_hashes, root, first)
        if ended and not self._has_states:
            self._linger(block_hashes, root, requested=seen)

    def note_end(self, block_hashes: Sequence[bytes], root: bytes, *, seen: bool = False) -> None:
        """Queue the end of a conversation whose chain was passed to `note`.

        Its last blocks are written even if they do not fill a record, unless it continues soon.
        """
        if not self._is_short(block_hashes) and (seen or self._is_dear()):
            self._linger(block_hashes, root)

    def note_checkpoint(
        self,
        block_hashes: Sequence[bytes],
        root: bytes,
        *,
        seen: bool = False,
        answered: bool = False,
    ) -> None:
        """Queue a checkpoint at the end of a chain, where a conversation resumes.

        It is written after the blocks, unless the conversation continues soon.
        """
        if self._is_short(block_hashes) or not block_hashes or not (seen or self._is_dear()):
            return
        for end in self._ends.add(block_hashes, root, answered=answered):
            self._release(end)

    def offer_next(self) -> bool:
        """Offer a copy of the next record or checkpoint to the tier; False if none or no room."""
        if self._tier.is_off:
            self.forget()
        for end in self._ends.take_due():
            self._release(end)
        if self._pending and self._tier.has_room(self._record_bytes):
            self._offer(self._pending[0])
            return True
        if not self._turns or self._pending or not self._tier.has_room(self._state_form.nbytes):
            return False
        self._offer_states(self._turns.popleft())
        return True

    def waiting_nodes(self) -> set[int]:
        size = self._prefixes.block_size
        waiting = [(pending.block_hashes, pending.first) for pending in self._pending]
        waiting += [(end.block_hashes, self._whole(end.block_hashes)) for end in self._ends]
        return {
            node.id
            for block_hashes, first in waiting
            for node in self._prefixes.match(block_hashes).path
            if node.end > first * size
        }

    def release_ends(self) -> None:
        """Stop delaying conversation ends: write all of them as soon as the tier has room."""
        for end in self._ends.take_all():
            self._release(end)

    def save(self, node: Node[Segment]) -> None:
        for end in self._ends.take_needing(node):
            self._release(end, urgent=True)
            while self._pending and self._pending[0].block_hashes == end.block_hashes:
                if not self._tier.has_room(self._record_bytes):
                    break
                self._offer(self._pending[0])
            if self._has_states and self._tier.has_room(self._state_form.nbytes):
                self._offer_states(end.block_hashes)

    def forget(self) -> None:
        while self._pending:
            self._abandon(self._pending[0])
        self._turns.clear()
        self._ends.take_all()

    def _is_short(self, block_hashes: Sequence[bytes]) -> bool:
        """Return whether a chain is too short to be quantized, as tiers store blocks."""
        return len(block_hashes) < self._forms.least_blocks

    def _whole(self, block_hashes: Sequence[bytes]) -> int:
        return self._spans.start(len(block_hashes))

    def _linger(
        self, block_hashes: Sequence[bytes], root: bytes, *, requested: bool = False
    ) -> None:
        """Queue the last blocks of a chain, delayed, if they do not fill a record."""
        if self._whole(block_hashes) < len(block_hashes):
            for end in self._ends.add(block_hashes, root, requested=requested):
                self._release(end)

    def _release(self, end: ConversationEnd, *, urgent: bool = False) -> None:
        block_hashes = end.block_hashes
        whole = self._whole(block_hashes)
        if whole < len(block_hashes):
            self._wait(block_hashes, end.root, whole, ended=True, urgent=urgent)
        if self._has_states and block_hashes not in self._turns:
            self._turns.append(block_hashes)

    def _wait(
        self,
        block_hashes: Sequence[bytes],
        root: bytes,
        first: int,
        *,
        ended: bool = False,
        urgent: bool = False,
    ) -> None:
        first = self._spans.start(first)
        for pending in [entry for entry in self._pending if entry.goes_on(block_hashes, first)]:
            if not (self._has_states and pending.ended):  # that record precedes a checkpoint
                first = pending.first
                self._drop(pending)
        entry = _Pending(tuple(block_hashes), root, first, ended)
        self._pending.appendleft(entry) if urgent else self._pending.append(entry)
        self._pending_hashes += len(block_hashes)
        # The longest may be longer alone: the chain of a sequence whose KV is spilled. Records that
        # follow a lost one are not written, so it would stay in memory from there on.
        while self._pending_hashes > PENDING_HASHES and len(self._pending) > 1:
            longest = max(self._pending, key=lambda chain: len(chain.block_hashes))
            self._abandon(next(chain for chain in self._pending if chain is not longest))

    def _offer(self, pending: _Pending) -> None:
        block_hashes, first = pending.block_hashes, pending.first
        stop = self._spans.end(first)
        if pending.ended:
            stop = min(stop, len(block_hashes))
        if first >= stop or stop > len(block_hashes):
            self._drop(pending)
            return
        arrays = self._copied(block_hashes[:stop], first)
        if arrays is None:  # later blocks would be useless without these
            self._abandon(pending)
            return
        self._tier.offer(
            Record(
                key=block_hashes[stop - 1],
                parent=block_hashes[first - 1] if first else pending.root,
                depth=first,
                arrays=arrays,
                blocks=stop - first,
                replaces=() if self._has_states else block_hashes[first : stop - 1],
            )
        )
        pending.first = stop
        if stop == len(block_hashes):
            self._drop(pending)

    def _copied(self, block_hashes: Sequence[bytes], first: int) -> dict[str, HostArray] | None:
        """Return a copy of a chain's blocks from `first` on, in the tier's format.

        Quantizes blocks that are not quantized yet. None if a block is not in the tree, or if MLX
        is out of memory.
        """
        match, size = self._prefixes.match(block_hashes), self._prefixes.block_size
        start, stop = first * size, len(block_hashes) * size
        if match.tokens < stop:
            return None
        pieces, tokens = [], []
        for node in match.path:
            part = slice(max(0, start - node.start), stop - node.start)
            if node.end <= start:
                continue
            piece = None
            with suppress(MemoryError, RuntimeError):  # MLX is out of memory
                end = min(part.stop, len(node.tokens))
                piece = self._forms.converted(node.segment.part(part.start, end), first)
            if piece is None:
                return None
            pieces.append(piece)
            tokens.append(node.tokens[part])
        return host_block(pieces[0], np.concatenate(tokens), *pieces[1:])

    def _offer_states(self, block_hashes: Sequence[bytes]) -> None:
        match = self._prefixes.match(block_hashes)
        end = len(block_hashes) * self._prefixes.block_size
        if match.tokens < end:
            return
        node = match.path[-1]
        for checkpoint in node.segment.checkpoints:
            form = StateForm.of(checkpoint.states)
            if node.start + checkpoint.offset == end and form == self._state_form:
                self._tier.offer(
                    Record(
                        key=checkpoint_hash(block_hashes[-1]),
                        parent=block_hashes[-1],
                        depth=len(block_hashes),
                        arrays=host_states(checkpoint.states),
                    )
                )

    def _abandon(self, pending: _Pending) -> None:
        self.dropped_blocks += len(pending.block_hashes) - pending.first
        self._drop(pending)

    def _drop(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        self._pending_hashes -= len(pending.block_hashes)
