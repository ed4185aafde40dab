"""The places of a batch: who is let in, how far each has come, and how it gives back all that it
has.

    admit   ──> a path is pinned, bytes are reserved, a slot of the pool is taken: all, or nothing
    preempt    ──> given back, but for the tokens; it is let in again later
    finish  ──> given back, then the handle is told
    fail    ──> the same, and its slot is wiped

The scheduler says whose turn it is; here it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.windows import Reader
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler, State
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.stats import Counters
from penstock.errors import PenstockError


class Admission:
    """All open sequences, in the queue or in a place. Not thread-safe: the engine's thread.

    Args:
        scheduler: says who is next.
        budget: the bytes of the engine.
        stores: of keys and values.
        tiers: reads for sequences, if there is a cold tier.
        counters: of the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        *,
        budget: MemoryBudget,
        stores: KVStores,
        tiers: TierGroup | None,
        counters: Counters,
    ) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._scheduler = scheduler
        self._budget = budget
        self._stores = stores
        self._tails = stores.tails
        self._tiers = tiers
        self._counters = counters

    # ---- questions

    def readers(self) -> Iterator[Reader]:
        """Yield what is read of which paths."""
        for sequence in self.sequences.values():
            if sequence.kv.pin is not None:
                yield sequence.kv.pin.path, sequence.kv.num_cached_tokens

    def check(self) -> None:
        """Raise AssertionError if a slot, a pin or a reservation is lost, or taken twice."""
        sequences, tails = self.sequences.values(), self._tails
        slots = [s.kv.slot for s in sequences if s.kv.slot is not None]
        if len(slots) + tails.free_slots != tails.slots or len(set(slots)) != len(slots):
            raise AssertionError(f"slots {slots} taken, {tails.free_slots} free")
        pins, tree = sum(s.kv.pin is not None for s in sequences), self._stores.prefixes.tree
        if pins != tree.pins:
            raise AssertionError(f"{tree.pins} pins, {pins} owners")
        for sequence in sequences:
            sequence.kv.check()

    # ---- coming

    def add(self, sequences: Items[Sequence]) -> None:
        """Put the sequences of a request into the queue.

        Raises:
            QueueFull: too many are waiting; none of them is added.
        """
        self._scheduler.add(*sequences)
        self.sequences.update((sequence.id, sequence) for sequence in sequences)

    def admit(self) -> None:
        """Let in who fits, in order; who does not fit lets nobody pass."""
        for sequence in self._scheduler.in_line():
            while not (self._scheduler.free_places and self._try_admit(sequence)):
                lower = self._scheduler.to_preempt(sequence)
                if not lower or not self._worth_preempting(sequence, lower):
                    return
                self.preempt(lower[0])

    def catch_up(self) -> None:
        """Let who is prefilling share what others have committed meanwhile."""
        for sequence in self._scheduler.sequences(State.PREFILLING):
            gained = sequence.kv.extend()
            if gained:
                sequence.kv.spare(gained * self._budget.token_bytes)
                self.count_hit(sequence, gained)
                self.advance(sequence)

    # ---- getting on

    def count_hit(self, sequence: Sequence, tokens: int, *, restored: bool = False) -> None:
        """Count prompt tokens that this answer did not have to compute.

        What it finds again after it was preempted is its own work, and no hit.
        """
        if sequence.was_preempted:
            return
        sequence.cached_tokens += tokens
        self._counters.hit_tokens += tokens
        self._counters.restored_tokens += tokens if restored else 0

    def advance(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on if nothing of it is left to prefill."""
        if not sequence.remaining_tokens and sequence.state is State.PREFILLING:
            self._scheduler.act(sequence, "prefilled")

    # ---- going

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out; it is let in again later and finds its committed path."""
        node = sequence.kv.node
        self._release(sequence)
        sequence.was_preempted = True
        self._counters.preemptions += 1
        self._scheduler.act(sequence, "preempt")
        self._stores.tidy(node)

    def finish(
        self, sequence: Sequence, tell: Callable[[Sequence], None], *, failed: bool = False
    ) -> None:
        """Give all back, then tell the handle: who reads the end finds the bytes free.

        Of one that failed, the end may be no numbers.
        """
        if not failed:
            sequence.kv.end_answer()
        node = sequence.kv.node
        sequence.kv.end_turn(sequence.cached_tokens)
        del self.sequences[sequence.id]
        self._release(sequence)
        self._scheduler.act(sequence, "finish")
        self._counters.finished += 1
        tell(sequence)
        self._stores.tidy(node)

    def fail(self, sequence: Sequence, error: PenstockError) -> None:
        """End an answer with an error; what it wrote may be no numbers, and is wiped."""
        self._counters.failed += 1
        sequence.kv.wipe_slot()
        self.finish(sequence, lambda s: s.end("error", error=error), failed=True)

    def drop_overdue(self, now_seconds: float) -> None:
        """End the answers whose time is over."""
        for sequence in self._scheduler.overdue(now_seconds):
            self.finish(sequence, lambda s: s.end("timeout"))

    # ---- parts

    def _try_admit(self, sequence: Sequence) -> bool:
        """Attach a path, reserve the rest, take a slot; False, and nothing taken, if it must
        wait."""
        sequence.kv.hash_blocks()
        taken = self._take(sequence)
        if not taken and self._tails.free_slots == self._tails.slots:
            # A node that is longer than what the sequence reads of it may take the room that
            # it needs. Nothing else runs: without the path, all nodes can be evicted.
            taken = self._take(sequence, shared=False)
        if not taken:
            return False
        sequence.kv.take_slot()
        self._scheduler.act(sequence, "admit")
        if not sequence.admitted:
            sequence.admitted = True
            sequence.kv.unshare()
            self._counters.prompt_tokens += sequence.prompt_tokens
            self.count_hit(sequence, sequence.kv.num_cached_tokens)
        self.advance(sequence)
        return True

    def _take(self, sequence: Sequence, *, shared: bool = True) -> bool:
        """Attach the cached path, if it may be shared, and reserve the bytes of all other tokens;
        False, and nothing taken, without room."""
        # It is a reader from now on: its path is not evicted to make room for the rest.
        sequence.kv.attach(None if shared else [])
        if self._budget.reserve(sequence):
            return True
        sequence.kv.undo_attach()
        return False

    def _worth_preempting(self, sequence: Sequence, others: Items[Sequence]) -> bool:
        """Tell whether a sequence would fit if all of the others were preempted."""
        return self._budget.would_fit(sequence, sequence.kv.reachable_tokens, others)

    def _release(self, sequence: Sequence) -> None:
        """Give back everything that a sequence holds; its tokens stay."""
        if self._tiers is not None:
            self._tiers.leave(sequence.restores)
            sequence.restores = []
        sequence.resumed_at = None
        sequence.kv.detach()
        self._budget.release(sequence, self.sequences.values())
