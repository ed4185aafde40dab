"""Restore blocks of admitted sequences from cold tiers instead of computing them.

    prefilling ──> begin: a tier has more blocks of the chain, and reading them is faster
        restoring  ──> take: blocks read are inserted into the tree
                              ──> all blocks were read, or the deadline has passed: prefilling

With recurrent layers, the checkpoint is read after the blocks, and the sequence resumes only once
it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.offload.engine_tier import EngineTier, Restore
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler, State
from penstock.engine.schedule.sequence import Sequence
from penstock.kv.segment import Segment
from penstock.ledger import Kind
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.host import RestoreBuffer, StateRestoreBuffer

ASK_SECONDS = 0.5
"""Maximum wait for the tiers' answer to a lookup, in seconds."""


class Restoring:
    """Reads blocks from cold tiers for sequences. Not thread-safe: owned by the engine's thread.

    Args:
        prefixes: prefix tree that takes the restored blocks.
        budget: reserves bytes for tokens that are computed because they could not be restored.
        clock: time in seconds, for deadlines.
    """

    def __init__(
        self,
        tiers: TierGroup,
        prefixes: Prefixes[Segment],
        scheduler: Scheduler[Sequence],
        *,
        admission: Admission,
        stores: KVStores,
        budget: MemoryBudget,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._prefixes = prefixes
        self._scheduler = scheduler
        self._admission = admission
        self._stores = stores
        self._budget = budget
        self._clock = clock
        self._size = prefixes.block_size

    def begin(self) -> None:
        """Start restoring blocks that would take longer to compute."""
        restored = self._scheduler.restoring_hashes()
        for sequence in self._scheduler.placed():
            lookup = sequence.tier_lookup
            if lookup is None or sequence.next_block_hash in restored:
                continue
            if not lookup.done():
                if sequence.state is State.PREFILLING:
                    self._scheduler.act(sequence, "fetch")
                    sequence.restore_deadline = self._clock() + ASK_SECONDS
                continue
            blocks_by_tier = lookup.blocks_by_tier()
            max_blocks = self._most_blocks(sequence)
            # Looked up once, unless only some of the blocks fit into memory now.
            longest = max(blocks_by_tier.values(), default=0)
            sequence.tier_lookup = lookup if longest > max_blocks else None
            blocks_by_tier = {tier: min(n, max_blocks) for tier, n in blocks_by_tier.items()}
            matched_blocks = self._stores.matched(sequence.block_hashes) // self._size
            root = self._prefixes.root(sequence.request.salt)
            cached_blocks = sequence.kv.num_cached_tokens // self._size
            self._tiers.note_held(
                lookup, sequence.block_hashes[:matched_blocks], root, cached_blocks
            )
            if sequence.state is State.PREFILLING and self._begin(sequence, blocks_by_tier):
                restored |= self._scheduler.restoring_hashes()

    def take(self) -> None:
        """Insert restored blocks into the tree; have blocks that miss the deadline computed."""
        for sequence in self._scheduler.sequences(State.RESTORING):
            while sequence.restores and sequence.restores[0].answer.done():
                self._take_in(sequence, sequence.restores.pop(0))
            impatient = self._clock() > sequence.restore_deadline
            if sequence.restores and impatient:
                self._lose_patience(sequence)
            lookup = sequence.tier_lookup
            if lookup is not None and impatient:
                lookup = sequence.tier_lookup = None
            if not sequence.restores and (lookup is None or lookup.done()):
                self._scheduler.act(sequence, "fetched")
                if sequence.resumed_at is None or self._go_on(sequence):
                    self._admission.advance(sequence)
                    self._admission.spill(sequence)

    def _most_blocks(self, sequence: Sequence) -> int:
        """Return the index of the block up to which restored blocks fit into memory."""
        if not self._stores.spills:
            return len(sequence.block_hashes)
        cached = sequence.kv.num_cached_tokens
        return (cached + self._budget.in_flight_tokens) // self._size

    def _begin(self, sequence: Sequence, blocks_by_tier: dict[EngineTier, int]) -> bool:
        cached = sequence.kv.num_cached_tokens // self._size
        if self._stores.by_block:  # the last token's block is computed
            max_blocks = sequence.kv.readable_tokens // self._size
            blocks_by_tier = {tier: min(n, max_blocks) for tier, n in blocks_by_tier.items()}
        blocked = bool(sequence.kv.own_spans)
        if not self._stores.figures.is_recurrent and sequence.kv.resumed_tokens:
            blocked = False  # its states are those of the path, so it can resume a block earlier
        fastest = None if blocked else self._tiers.fastest(blocks_by_tier, cached)
        if fastest is None:
            return False
        assert sequence.kv.reservation is not None
        self._admission.count_hit(sequence, -sequence.kv.drop_partial())
        tier, in_tier = fastest
        block_hashes, states = sequence.block_hashes[:in_tier], None
        sequence.restore_deadline = self._clock() + tier.patience_seconds(cached, in_tier)
        if tier.has_states:
            states = tier.begin_states(block_hashes)
            if states is None:
                return False
            sequence.resumed_at = sequence.kv.num_cached_tokens
            cached = sequence.kv.follow(block_hashes)  # for cached blocks, only the states are read
        sequence.restores = tier.begin(block_hashes, cached, sequence.kv.reservation)
        if states is not None:
            sequence.restores.append(states)
        self._scheduler.act(sequence, "fetch")
        return True

    def _go_on(self, sequence: Sequence) -> bool:
        """Resume at the deepest restored position with states; False if preempted instead."""
        before, sequence.resumed_at = sequence.resumed_at, None
        sequence.kv.resume()
        if not self._budget.reserve_anew(sequence):
            self._admission.preempt(sequence)
            return False
        self._admission.count_hit(
            sequence, sequence.kv.num_cached_tokens - (before or 0), restored=True
        )
        return True

    def _take_in(self, sequence: Sequence, restore: Restore) -> None:
        """Insert restored blocks into the tree; cancel the reads after a missing block."""
        assert sequence.kv.reservation is not None
        if isinstance(restore.buffer, StateRestoreBuffer):
            self._take_in_states(sequence, restore)
            return
        start, size = sequence.kv.num_cached_tokens, self._size
        nbytes = restore.paid.nbytes
        blocks = restore.tier.take(restore, sequence.kv.reservation)
        if restore.first * size != start:  # an earlier block is missing
            return
        copied = nbytes if restore.cached_blocks or blocks < restore.blocks else 0
        if blocks and self._prefixes.make_room(copied):
            with self._prefixes.ledger.reserve(Kind.BUFFERS, copied):
                sequence.kv.splice(restore.segment(blocks, size))
        # The last token of a prompt is always computed, for its logits.
        sequence.kv.leave_last()
        if sequence.resumed_at is None:
            self._admission.count_hit(
                sequence, sequence.kv.num_cached_tokens - start, restored=True
            )
        self._admission.advance(sequence)
        if sequence.kv.num_cached_tokens < min(
            start + restore.blocks * size, sequence.kv.readable_tokens
        ):
            sequence.restores = self._tiers.cancel(sequence.restores, sequence.kv.reservation)
            sequence.tier_lookup = None  # or it would be read again and again

    def _take_in_states(self, sequence: Sequence, restore: Restore) -> None:
        """Capture a restored checkpoint if all blocks before it are in the tree."""
        states = restore.tier.take_states(restore)
        if states is not None:
            sequence.kv.capture_restored(restore.first * self._size, states)

    def _lose_patience(self, sequence: Sequence) -> None:
        """Have a sequence compute blocks that missed the deadline, if memory for both is free."""
        assert sequence.kv.reservation is not None
        sequence.restores = self._tiers.cancel(sequence.restores, sequence.kv.reservation)
        nbytes = sum(
            restore.own_bytes
            for restore in sequence.restores
            if isinstance(restore.buffer, RestoreBuffer)
        )
        if self._prefixes.make_room(nbytes):
            self._tiers.leave(sequence.restores)
            sequence.restores = []
            sequence.kv.reservation.resize(sequence.kv.reservation.nbytes + nbytes)
