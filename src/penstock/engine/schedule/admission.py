"""Admission, growth, preemption and completion of the sequences of a batch.

    admit   ──> pin the cached path, reserve bytes, take a slot; all or none
        grow    ──> reserve bytes for the next tokens; when out of memory, preempt the lowest
        preempt ──> release everything but the tokens; the sequence is admitted again later
        finish  ──> release everything, then deliver the end of the answer
        fail    ──> the same, after wiping the slot

The scheduler decides which sequence is next; `Admission` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Protocol

from penstock.engine.offload.engine_tier import Restore
from penstock.engine.retention.retention import PathReader
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.fair_shares import Path
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import PLACED, Scheduler, State
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import Displaced, LedgerFull, NeverFits, PenstockError, SpilledLost


class Restorers(Protocol):
    def leave(self, restores: Items[Restore]) -> None: ...


class Admission:
    """Open sequences, waiting or admitted. Not thread-safe: owned by the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        *,
        budget: MemoryBudget,
        stores: KVStores,
        tiers: Restorers,
    ) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._scheduler = scheduler
        self._budget = budget
        self._stores = stores
        self._tails = stores.tails
        self._tiers = tiers
        self._counters = stores.counters

    def readers(self) -> Iterator[PathReader]:
        """Yield the path that each sequence reads, and the number of leading tokens read."""
        for sequence in self.sequences.values():
            if sequence.kv.pin is not None:
                yield sequence.kv.pin.path, sequence.kv.num_cached_tokens

    def check(self) -> None:
        """Raise AssertionError if a slot, pin or reservation leaked or is used twice."""
        sequences, tails = self.sequences.values(), self._tails
        slots = [s.kv.slot for s in sequences if s.kv.slot is not None]
        if len(slots) + tails.free_slots != tails.slots or len(set(slots)) != len(slots):
            raise AssertionError(f"slots {slots} taken, {tails.free_slots} free")
        pins, tree = sum(s.kv.pin is not None for s in sequences), self._stores.prefixes.tree
        if pins != tree.pins:
            raise AssertionError(f"{tree.pins} pins, {pins} owners")
        for sequence in sequences:
            sequence.kv.check()

    # ---- queueing and admission

    def add(self, sequences: Items[Sequence]) -> None:
        """Queue the sequences of a request, all or none; raises QueueFull."""
        self._scheduler.add(*sequences)
        self.sequences.update((sequence.id, sequence) for sequence in sequences)

    def make_queue_room(self, owners: Path, added: int) -> None:
        """Make room in the queue by removing other clients' requests, or raise QueueFull."""
        displaced = self._scheduler.to_displace(owners, added)
        waiting = self._scheduler.waiting_by_client
        for sequence in displaced:
            client = sequence.owners[0]
            self.fail(sequence, Displaced(waiting[client], self._scheduler.max_queue))

    def admit(self) -> None:
        """Admit waiting sequences in order until one does not fit; no later one overtakes it."""
        while (sequence := self._scheduler.next_in_line()) is not None:
            while not (self._scheduler.free_places and self._try_admit(sequence)):
                others = self._others_to_preempt(sequence)
                if not others:
                    return
                self.preempt(others[0])

    def catch_up(self) -> None:
        """Let prefilling sequences reuse blocks that other sequences have committed meanwhile."""
        for sequence in self._scheduler.sequences(State.PREFILLING):
            gained = sequence.kv.extend()
            if gained:
                sequence.kv.spare(gained * self._budget.token_bytes)
                self.count_hit(sequence, gained)
                self.advance(sequence)
                self.spill(sequence)

    def spill(self, sequence: Sequence) -> None:
        """Spill KV to the cold tiers, and reserve memory for the next tokens of a prompt.

        First commits blocks that did not fit into the tree before, because the reservation covers
        only a few tokens. Waits for the tiers when memory is short. A sequence that still does not
        fit is preempted. If it is the only one, it is readmitted once without a shared path, which
        may hold more KV than it reads; after that it fails.
        """
        stores = self._stores
        if not stores.spills or sequence.kv.reservation is None:
            return
        paths = [other.kv for other in self.sequences.values()]
        stores.spill(paths)
        if sequence.kv.commit_again() and self._budget.top_up(sequence):
            return
        stores.spill(paths, wait=True)
        if sequence.kv.commit_again() and self._budget.top_up(sequence):
            return
        alone = self._scheduler.placed() == [sequence]
        if not (alone and sequence.stuck):
            sequence.stuck = sequence.stuck or alone
            self.preempt(sequence)
            return
        why = "the cold tiers did not write the KV to spill in time"
        needed, free = sequence.kv.reservation.nbytes, self._stores.prefixes.ledger.free_bytes
        limit = self._stores.prefixes.ledger.limit_bytes
        message = f"{why}; free space in them, raise memory_limit or lower active_kv_size"
        self.fail(sequence, LedgerFull(message, needed, free, limit))

    def compute_again(self, error: SpilledLost) -> None:
        """Preempt the sequences that read lost blocks, and drop those blocks from the tree."""
        parts = self._stores.retentions
        lost = {node.id for part in parts for node in part.lost_nodes(error.places)}
        for sequence in self._scheduler.placed():
            path = () if sequence.kv.pin is None else sequence.kv.pin.path
            if any(node.id in lost for node in path):
                self.preempt(sequence)
        for part in parts:
            part.drop_lost(error.places)

    # ---- progress

    def grow(self) -> None:
        """Reserve bytes for the next tokens of all running sequences, highest priority first.

        When out of memory, preempts the scheduler's lowest sequence. A sequence that is alone and
        cannot grow ends with the finish reason "length".
        """
        self._end_outgrown()
        for sequence in self._scheduler.placed():
            while sequence.state is State.RUNNING and sequence.needs_growth:
                if self._budget.grow(sequence):
                    break
                lowest = self._scheduler.lowest()
                if lowest is sequence and self._scheduler.placed() == [sequence]:
                    self._outgrow(sequence)
                else:
                    self.preempt(lowest)

    def count_hit(self, sequence: Sequence, tokens: int, *, restored: bool = False) -> None:
        """Count prompt tokens read from the cache, and with `restored` from a cold tier.

        Not counted after a preemption, when a sequence finds its own KV in the cache.
        """
        if sequence.was_preempted:
            return
        sequence.cached_tokens += tokens
        self._counters.hit_tokens += tokens
        self._counters.restored_tokens += tokens if restored else 0
        sequence.note_prompt()

    def advance(self, sequence: Sequence) -> None:
        """Move a prefilled sequence to RUNNING, or finish it if `max_tokens` is 0.

        If its positions are not known yet, the planner moves it later.
        """
        if sequence.remaining_tokens or sequence.state is not State.PREFILLING:
            return
        if not sequence.inputs.positioned:
            return
        if sequence.request.max_tokens:
            self._scheduler.act(sequence, "prefilled")
        else:
            self.finish(sequence, lambda s: s.end("length"))

    # ---- leaving

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence: release its slot and bytes, and queue it again."""
        sequence.kv.keep_end()
        node = sequence.kv.node
        self._release(sequence)
        sequence.was_preempted = True
        self._counters.preemptions += 1
        self._scheduler.act(sequence, "preempt")
        self._stores.tidy(node)

    def finish(
        self, sequence: Sequence, end: Callable[[Sequence], None], *, failed: bool = False
    ) -> None:
        """Release all bytes of a sequence, then end its answer.

        So the bytes are free when the client sees the end. The KV of a failed sequence, which may
        contain NaN, is not cached.
        """
        if not failed:
            sequence.kv.keep_end()
            if sequence.generated_tokens:
                self._budget.lengths.note(sequence.generated_tokens)
        node = sequence.kv.node
        sequence.kv.end_turn(sequence.cached_tokens)
        del self.sequences[sequence.id]
        self._release(sequence)
        if sequence.kv.transient:
            sequence.kv.forget()
            node = None
        self._scheduler.act(sequence, "finish")
        self._counters.finished += 1
        end(sequence)
        self._stores.tidy(node)

    def fail(self, sequence: Sequence, error: PenstockError) -> None:
        """Fail a sequence with an error, and wipe the KV in its slot, which may contain NaN."""
        self._counters.failed += 1
        sequence.kv.wipe_slot()
        self.finish(sequence, lambda s: s.end("error", error=error), failed=True)

    def fit(self, limit_bytes: int) -> None:
        """Apply a lower memory limit: evict cold nodes, then preempt the lowest priorities.

        Waiting sequences that can no longer fit fail with `NeverFits`; if they have generated
        tokens, they end with "length".
        """
        prefixes = self._stores.prefixes
        prefixes.shrink(prefixes.ledger.set_limit(limit_bytes), "limit")
        for sequence in [s for state in PLACED for s in self._scheduler.sequences(state)[::-1]]:
            if prefixes.ledger.room_bytes >= 0:
                break
            self.preempt(sequence)
            prefixes.shrink(-prefixes.ledger.room_bytes, "limit")
        self._end_outgrown()
        for sequence in self._scheduler.in_line():
            try:
                self._budget.check_fits(sequence)
            except NeverFits as error:
                self.fail(sequence, error)

    def drop_overdue(self, now_seconds: float) -> None:
        for sequence in self._scheduler.overdue(now_seconds):
            self.finish(sequence, lambda s: s.end("timeout"))

    # ---- helpers

    def _try_admit(self, sequence: Sequence) -> bool:
        """Attach a path, reserve bytes and take a slot; False, without effect, if out of memory."""
        sequence.kv.hash_blocks()
        alone = not self._scheduler.placed()
        # With others, it may be preempted for them; it is then tried again alone.
        sequence.stuck = sequence.stuck and alone
        if sequence.stuck:
            sequence.kv.drop_unread()
        taken = self._take(sequence)
        if not taken and alone:
            # A node longer than the part that the sequence reads, or the bookkeeping of many nodes,
            # may take the memory that it needs. Nothing else runs, so nodes off a shorter path can
            # be evicted.
            taken = any(self._take(sequence, path) for path in sequence.kv.shorter_paths())
        if not taken:
            return False
        sequence.kv.take_slot()
        self._scheduler.act(sequence, "admit")
        if not sequence.admitted:
            sequence.admitted = True
            sequence.kv.unshare()
            self._counters.prompt_tokens += sequence.prompt_tokens
            self.count_hit(sequence, sequence.kv.position)
        self.advance(sequence)
        return True

    def _take(self, sequence: Sequence, block_hashes: list[bytes] | None = None) -> bool:
        """Attach the cached path and reserve bytes for the next tokens.

        Args:
            sequence: a waiting sequence.
            block_hashes: blocks to look up; None means all of its blocks.

        Returns:
            False, with nothing changed, if out of memory.
        """
        # The pin keeps the path from being evicted to make room for the rest.
        sequence.kv.attach(block_hashes)
        has_room = self._budget.has_room(sequence, self._scheduler.placed())
        if has_room and self._budget.reserve(sequence):
            return True
        sequence.kv.undo_attach()
        return False

    def _others_to_preempt(self, sequence: Sequence) -> Items[Sequence]:
        """Return the sequences to preempt, in order, to admit a waiting one; empty if that fails.

        A turn is ended early only if the tree keeps all KV that the sequence has computed.
        """
        placed, reachable = self._scheduler.placed(), sequence.kv.reachable_tokens
        for others, evict in (
            (self._scheduler.to_preempt(sequence), True),
            (self._scheduler.to_preempt_early(sequence), False),
        ):
            staying = [other for other in placed if other not in others]
            if others and self._budget.would_fit(sequence, reachable, others, staying, evict=evict):
                return others
        return ()

    def _outgrow(self, sequence: Sequence) -> None:
        """End a sequence that is alone and cannot grow, after readmitting it once with all memory.

        On readmission, index bytes and nodes longer than the part that it reads can be evicted.
        While other models hold bytes, it waits for them instead.
        """
        if self._stores.prefixes.ledger.crowded and self._budget.fits_alone(sequence):
            self.preempt(sequence)
            return
        if sequence.stuck or not self._budget.fits_alone(sequence):
            self.finish(sequence, lambda s: s.end("length"))
            return
        sequence.stuck = True
        self.preempt(sequence)

    def _end_outgrown(self) -> None:
        """End queued sequences with generated tokens that could not continue even if alone."""
        for sequence in self._scheduler.in_line():
            if sequence.generated_tokens and not self._budget.fits_alone(sequence):
                self.finish(sequence, lambda s: s.end("length"))

    def _release(self, sequence: Sequence) -> None:
        self._tiers.leave(sequence.restores)
        sequence.restores = []
        sequence.resumed_at = None
        if sequence.draft_kv is not None:
            sequence.draft_kv.release()
            sequence.draft_kv = None
        sequence.inputs.release()
        sequence.kv.detach()
        self._budget.release(sequence, self.sequences.values())
