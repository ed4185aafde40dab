"""What a cold tier is still to write: noted blocks, copied and offered between two steps.

    note ──> these blocks are new ──> those of one record are copied ──> ColdTier.offer

Nothing here waits for the store. `engine_tier` reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.kv.block_format import BlockFormats
from penstock.kv.segment import Segment
from penstock.kv.states import StateForm
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.host import host_block, host_states
from penstock.tiers.record import HostArray, Record
from penstock.tiers.worker import ColdTier

PENDING_KEYS = 16_384
"""Blocks, at most, that are worth writing and wait for their turn."""
PENDING_TURNS = 64
"""Checkpoints, at most, that wait for their turn; the oldest are left out."""
KEY_BYTES = 80
"""Python overhead of one pending block hash."""
PENDING_BYTES = PENDING_KEYS * KEY_BYTES
"""Bytes of the list of pending blocks."""


@dataclass(slots=True)
class _Pending:
    """Pending blocks of a chain, from `first` on; their KV is in the tree."""

    block_hashes: tuple[bytes, ...]
    root: bytes
    first: int
    """First block of the next record."""
    ended: bool
    """Whether the last blocks of the chain are written even if they make no whole record."""

    def goes_on(self, block_hashes: Sequence[bytes], first: int) -> bool:
        """Tell whether a chain's blocks from `first` on lie behind these."""
        at = len(self.block_hashes)
        return (
            self.first <= first <= at <= len(block_hashes)
            and block_hashes[at - 1] == self.block_hashes[-1]
        )


class TierWriter:
    """The blocks and checkpoints that a cold tier lacks. Not thread-safe: the engine's thread.

    Args:
        tier: takes the records.
        prefixes: of the engine.
        forms: how blocks are held.
        state_form: of the recurrent layers' states; None if the model has none.
        record_bytes: of the largest record.
        is_dear: tells whether computing a record takes so long that it is written after its first
            use.
    """

    def __init__(
        self,
        tier: ColdTier,
        prefixes: Prefixes[Segment],
        forms: BlockFormats,
        state_form: StateForm | None,
        record_bytes: int,
        is_dear: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._prefixes = prefixes
        self._forms = forms
        self._spans = forms.spans
        self._state_form = state_form
        self._record_bytes = record_bytes
        self._is_dear = is_dear
        self._pending: deque[_Pending] = deque()
        self._pending_keys = 0
        self._turns: deque[tuple[bytes, ...]] = deque(maxlen=PENDING_TURNS)
        self.dropped_blocks = 0
        """Blocks that were evicted before they were written."""

    @property
    def has_pending(self) -> bool:
        """Whether blocks or checkpoints wait to be offered to the tier."""
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
        """Take note of blocks in the tree, from `first` on, that the tier may lack.

        Those that are worth it are written when there is time.

        Args:
            block_hashes: the chain, up to the last of the blocks.
            root: hash before the first block.
            first: blocks before them.
            seen: whether they were asked for before.
            ended: whether a conversation ended there: its last blocks are written even if they
                make no whole record, until there is more of the chain.
        """
        if self._is_short(block_hashes):
            return
        if first < self._forms.least_blocks:  # it was too short when those were noted
            first = 0
        whole = len(block_hashes) >= self._spans.end(first)
        if first >= len(block_hashes) or not (whole or ended) or not (seen or self._is_dear()):
            return
        first = self._spans.start(first)
        for pending in [entry for entry in self._pending if entry.goes_on(block_hashes, first)]:
            if not (
                self._state_form is not None and pending.ended
            ):  # a checkpoint lies behind that record
                first = pending.first
                self._drop(pending)
        self._pending.append(_Pending(tuple(block_hashes), root, first, ended))
        self._pending_keys += len(block_hashes)
        while self._pending_keys > PENDING_KEYS:
            self._abandon(self._pending[0])

    def note_end(self, block_hashes: Sequence[bytes], root: bytes, *, seen: bool = False) -> None:
        """Take note of the end of a conversation behind a chain that was noted.

        Its last blocks are written even if they make no whole record.
        """
        if block_hashes and self._spans.end(len(block_hashes) - 1) > len(block_hashes):
            self.note(block_hashes, root, len(block_hashes) - 1, seen=seen, ended=True)

    def note_checkpoint(
        self, block_hashes: Sequence[bytes], root: bytes, *, seen: bool = False
    ) -> None:
        """Take note of a checkpoint behind a chain, at which a conversation resumes.

        It is written after the blocks.
        """
        turn = tuple(block_hashes)
        if self._is_short(turn):
            return
        if block_hashes and turn not in self._turns and (seen or self._is_dear()):
            self.note_end(block_hashes, root, seen=True)
            self._turns.append(turn)

    def offer_next(self) -> bool:
        """Offer a copy of the next record or checkpoint to the tier, if it has room.

        Returns:
            Whether one was offered.
        """
        if self._tier.is_off:
            self.forget()
        if self._pending and self._tier.has_room(self._record_bytes):
            self._offer(self._pending[0])
            return True
        form = self._state_form
        if form is None or not self._turns or self._pending or not self._tier.has_room(form.nbytes):
            return False
        self._offer_states(self._turns.popleft())
        return True

    def waiting_nodes(self) -> set[int]:
        """Return the ids of nodes with blocks that wait to be written."""
        size = self._prefixes.block_size
        return {
            node.id
            for pending in self._pending
            for node in self._prefixes.match(pending.block_hashes).path
            if node.end > pending.first * size
        }

    def forget(self) -> None:
        """Drop all pending blocks and checkpoints."""
        while self._pending:
            self._abandon(self._pending[0])
        self._turns.clear()

    # ---- parts

    def _is_short(self, block_hashes: Sequence[bytes]) -> bool:
        """Tell whether a chain is raw in memory, though tiers hold its blocks coded."""
        return len(block_hashes) < self._forms.least_blocks

    def _offer(self, pending: _Pending) -> None:
        """Offer the next record, if its blocks are still in the tree."""
        block_hashes, first = pending.block_hashes, pending.first
        stop = self._spans.end(first)
        if pending.ended:
            stop = min(stop, len(block_hashes))
        if first >= stop or stop > len(block_hashes):
            self._drop(pending)
            return
        arrays = self._copied(block_hashes[:stop], first)
        if arrays is None:  # nor would those behind it have a beginning
            self._abandon(pending)
            return
        self._tier.offer(
            Record(
                key=block_hashes[stop - 1],
                parent=block_hashes[first - 1] if first else pending.root,
                depth=first,
                arrays=arrays,
                blocks=stop - first,
                replaces=() if self._state_form else block_hashes[first : stop - 1],
            )
        )
        pending.first = stop
        if stop == len(block_hashes):
            self._drop(pending)

    def _copied(self, block_hashes: Sequence[bytes], first: int) -> dict[str, HostArray] | None:
        """Return a copy of a chain's blocks from `first` on, in the codec of the tier.

        Blocks that still wait in the tree to be quantized are quantized here.

        Returns:
            None if not all of them are in the tree, or MLX has no room for the codes.
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
            held = None
            with suppress(MemoryError, RuntimeError):  # MLX found no room for the codes
                end = min(part.stop, len(node.tokens))
                held = self._forms.held(node.segment.part(part.start, end), first)
            if held is None:
                return None
            pieces.append(held)
            tokens.append(node.tokens[part])
        return host_block(pieces[0], np.concatenate(tokens), *pieces[1:])

    def _offer_states(self, block_hashes: Sequence[bytes]) -> None:
        """Offer a checkpoint, if it is still in the tree."""
        match = self._prefixes.match(block_hashes)
        end = len(block_hashes) * self._prefixes.block_size
        if match.tokens < end:
            return
        node = match.path[-1]
        for checkpoint in node.segment.checkpoints:
            form = StateForm.of(checkpoint.states)
            if node.start + checkpoint.at == end and form == self._state_form:
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
        self._pending_keys -= len(pending.block_hashes)
