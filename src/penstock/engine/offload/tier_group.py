"""The cold tiers of an engine: lookups while a request waits, reads while others decode, writes.

    enqueue ──> ask: how much of the chain has each tier? the system reads it ahead
    step    ──> fastest: from which of them it is read ──> EngineTier.begin ──> taken in
    commit    ──> note: these blocks are new ──> each tier has them written at its own pace
    turn    ──> note_checkpoint ──> the states at its end, behind the blocks

Nothing here waits for a tier, and no tier for another. A tier that does not answer in time has
nothing. Blocks restored from one tier go to the others when a request asks for them again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from penstock.config import EngineSettings
from penstock.engine.offload.engine_tier import (
    CLOSE_SECONDS,
    LOOK_SECONDS,
    QUEUE_RECORDS,
    EngineTier,
    Restore,
)
from penstock.engine.offload.prefill_rate import PrefillRate
from penstock.engine.offload.preload import Preloader
from penstock.engine.offload.tier_kinds import (
    TIER_KINDS,
    StoreOpener,
    TierContent,
    check_tiers,
)
from penstock.engine.offload.tier_writer import PENDING_TURNS
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.kv.block_format import BlockFormats
from penstock.kv.block_spans import Spans
from penstock.kv.segment import Segment
from penstock.kv.states import StateForm
from penstock.ledger import Reservation
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.worker import ColdTier, TierStats

LATE_SECONDS = 0.1
"""Longest wait for a tier that has not answered, once another one has."""


class TierLookup:
    """A question to all tiers for one request: how many first blocks of a chain they have."""

    def __init__(
        self,
        answers: Mapping[EngineTier, Future[int]],
        blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self._answers = answers
        self._blocks = blocks
        self._clock = clock
        self._late_at = clock() + LATE_SECONDS

    def done(self) -> bool:
        """Tell whether there is nothing to wait for.

        All have answered, or one has the whole chain, or one has answered and the others are late.
        """
        blocks_by_tier = self.found()
        if any(blocks == self._blocks for blocks in blocks_by_tier.values()):
            return True
        late = self._clock() >= self._late_at
        return len(blocks_by_tier) == len(self._answers) or (late and bool(blocks_by_tier))

    def found(self) -> dict[EngineTier, int]:
        """Return the number of first blocks in each tier that has answered."""
        return {
            tier: 0 if answer.exception() else answer.result()
            for tier, answer in self._answers.items()
            if answer.done()
        }

    def late(self) -> TierLookup | None:
        """Return the part without an answer yet; None if all tiers have answered."""
        answers = {tier: answer for tier, answer in self._answers.items() if not answer.done()}
        return TierLookup(answers, self._blocks, self._clock) if answers else None


class TierGroup:
    """The cold tiers of an engine. Not thread-safe: the engine's thread.

    Args:
        tiers: at least one, by name as in `TIER_KINDS`, the nearest first.
        prefixes: of the engine.
        clock: seconds, by which an answer is late.
        records: most records that are offered to a tier between two steps.
    """

    def __init__(
        self,
        tiers: Mapping[str, EngineTier],
        prefixes: Prefixes[Segment],
        clock: Callable[[], float],
        *,
        records: int = 1,
    ) -> None:
        self.tiers = tiers
        self._records = records
        self._clock = clock
        self._prefixes = prefixes
        self._late: deque[tuple[TierLookup, Sequence[bytes], bytes, int]] = deque(
            maxlen=PENDING_TURNS
        )

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes reserved for buffers of the tiers, and for the lists of pending blocks."""
        return sum(tier.nbytes for tier in self)

    @property
    def paid_bytes(self) -> int:
        """Bytes of segments that are being read."""
        return sum(tier.paid_bytes for tier in self)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers: a sequence resumes only at a checkpoint."""
        return any(tier.has_states for tier in self)

    @property
    def where(self) -> str:
        """Places of the tiers, in words."""
        return " or ".join(TIER_KINDS[name].where for name in self.tiers)

    def stats(self) -> dict[str, TierStats]:
        """Return the figures of each tier, by its name."""
        return {name: tier.stats() for name, tier in self.tiers.items()}

    def held_tokens(self, block_hashes: Sequence[bytes], timeout_seconds: float) -> int | None:
        """Return how many first tokens of a chain the tiers have, the one with most.

        Args:
            block_hashes: the chain.
            timeout_seconds: longest wait for the answers.

        Returns:
            Tokens; None if no tier has answered in time.
        """
        until = time.monotonic() + timeout_seconds
        blocks = []
        for answer in [tier.held(block_hashes) for tier in self]:
            with suppress(TimeoutError):
                blocks.append(answer.result(max(0.0, until - time.monotonic())))
        return max(blocks) * self._prefixes.block_size if blocks else None

    def fastest(
        self, blocks_by_tier: Mapping[EngineTier, int], first: int
    ) -> tuple[EngineTier, int] | None:
        """Return the tier that saves most time, and its number of first blocks.

        Args:
            blocks_by_tier: see `TierLookup.found`.
            first: blocks that need not be read.

        Returns:
            None if computing the blocks is as fast.
        """
        saved = {tier: tier.saved_seconds(first, n) for tier, n in blocks_by_tier.items()}
        tier = max(saved, key=lambda tier: saved[tier], default=None)
        if tier is None or not saved[tier]:
            return None
        return tier, blocks_by_tier[tier]

    # ---- reading

    def ask(self, block_hashes: Sequence[bytes]) -> TierLookup:
        """Ask every tier how many first blocks of a request's chain it has.

        This counts as a use of the blocks, and lets the system read ahead those not in the tree.
        """
        cached = self._prefixes.match(block_hashes).tokens // self._prefixes.block_size
        return TierLookup(
            {tier: tier.ask(block_hashes, cached) for tier in self}, len(block_hashes), self._clock
        )

    def cancel(self, restores: Sequence[Restore], own: Reservation) -> list[Restore]:
        """Cancel restores that have not begun and pass their bytes to `own`; return the others."""
        return [restore for restore in restores if not restore.tier.cancel(restore, own)]

    def leave(self, restores: Sequence[Restore]) -> None:
        """Abandon restores; their bytes are released as soon as their tiers are done with them."""
        for restore in restores:
            restore.tier.leave(restore)

    def preload(self, checkpoints: Checkpoints | None = None) -> int:
        """Restore the most valuable chains into free memory; return the tokens they have."""
        return sum(Preloader(tier, self._prefixes, checkpoints).run() for tier in self)

    # ---- writing

    def note(
        self, block_hashes: Sequence[bytes], root: bytes, first: int, *, seen: bool = False
    ) -> None:
        """Take note of new blocks in the tree: those of a chain from `first` on.

        Args:
            block_hashes: the chain.
            root: hash before the first block.
            first: blocks before the new ones.
            seen: whether they are written in any case.
        """
        for tier in self:
            tier.writer.note(block_hashes, root, first, seen=seen)

    def note_end(self, block_hashes: Sequence[bytes], root: bytes) -> None:
        """Take note of the end of a conversation behind a chain that was noted."""
        for tier in self:
            tier.writer.note_end(block_hashes, root)

    def note_held(
        self, lookup: TierLookup, block_hashes: Sequence[bytes], root: bytes, cached_blocks: int
    ) -> None:
        """Take note of a chain in the tree whose end a tier may lack.

        For a tier that has not answered yet this is done when it has.

        Args:
            lookup: of the chain.
            block_hashes: the chain, as far as it is in the tree.
            root: hash before the first block.
            cached_blocks: blocks before the position where the sequence resumes, which may have a
                checkpoint.
        """
        late = lookup.late()
        for tier, blocks in lookup.found().items():
            if blocks < len(block_hashes):
                tier.writer.note(block_hashes, root, blocks, seen=True, ended=True)
                if tier.has_states:
                    tier.writer.note_checkpoint(block_hashes[:cached_blocks], root, seen=True)
        if late is not None and block_hashes:
            self._late.append((late, block_hashes, root, cached_blocks))

    def note_checkpoint(
        self,
        block_hashes: Sequence[bytes],
        root: bytes,
        *,
        seen: bool = False,
        answered: bool = False,
    ) -> None:
        """Take note of a checkpoint behind the last block of a chain."""
        for tier in self:
            tier.writer.note_checkpoint(block_hashes, root, seen=seen, answered=answered)

    def save(self, node: Node[Segment]) -> None:
        """Have the ends of conversations written that need a node about to be evicted."""
        for tier in self:
            tier.writer.save(node)

    def work(self, *, busy: bool) -> bool:
        """Offer records to the tiers that have room, or wait a moment for them.

        Args:
            busy: whether the engine has something else to do, so that it does not wait.

        Returns:
            False if there is nothing to write.
        """
        for late in [note for note in self._late if note[0].done()]:
            self._late.remove(late)
            self.note_held(*late)
        for tier in self:
            tier.sweep()
        offered = [tier.writer.offer_next() for _ in range(self._records) for tier in self]
        if any(offered):
            return True
        waited_for = [tier for tier in self if not tier.is_written]
        if waited_for and not busy:
            waited_for[0].tier.wait(LOOK_SECONDS)
        return bool(waited_for)

    def clear(self) -> dict[str, Future[int | None]]:
        """Forget the noted blocks, and remove this model's blocks from tiers that only we use.

        Returns:
            How many each tier has removed, by its name; None of one that is off.
        """
        self._late.clear()
        for tier in self:
            tier.writer.forget()
        return {name: tier.tier.clear(all_models=False) for name, tier in self.tiers.items()}

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was noted is written or dropped; return whether it is."""
        until = time.monotonic() + timeout_seconds
        for tier in self:
            tier.write_all(until)
        return all(tier.tier.flush(max(0.0, until - time.monotonic())) for tier in self)

    def waiting_nodes(self) -> set[int]:
        """Return the ids of nodes with blocks that wait to be written."""
        return set().union(*(tier.writer.waiting_nodes() for tier in self))

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write pending records as long as there is time, and close the tiers."""
        for tier in self:
            tier.close(timeout_seconds)

    def __iter__(self) -> Iterator[EngineTier]:
        return iter(self.tiers.values())


def open_tiers(
    limits: EngineSettings,
    prefixes: Prefixes[Segment],
    forms: BlockFormats,
    prefill_rate: PrefillRate,
    *,
    in_place: bool,
    state_form: StateForm | None = None,
    group: ProcessGroup,
) -> TierGroup | None:
    """Open the cold tiers that an engine's settings name; return None if they name none.

    See `EngineTier` for the arguments.

    Raises:
        LedgerFull, NeverFits: there is no room for blocks that are being written.
        SettingError: a limit is too small for anything, or a URL names no store.
    """
    check_tiers(limits)
    named = [kind for kind in TIER_KINDS.values() if kind.is_named(limits)]
    if not named:
        return None
    content = TierContent(
        prefixes.fingerprint,
        forms.spans,
        max(forms.most_record_bytes, 0 if state_form is None else state_form.nbytes),
    )
    tiers: dict[str, EngineTier] = {}
    records = _records_a_step(limits, forms.spans)
    try:
        for kind in named:
            store = kind.opener(limits, content)
            tiers[kind.name] = EngineTier(
                _tier_of(store),
                prefixes,
                forms,
                prefill_rate,
                in_place=in_place,
                state_form=state_form,
                buffer_bytes=store.buffer_bytes,
                queue_records=max(QUEUE_RECORDS, records),
                group=group,
            )
    except BaseException:
        for opened in tiers.values():
            opened.close()
        raise
    opened_tiers = TierGroup(tiers, prefixes, group.clock, records=records)
    prefixes.evicting = opened_tiers.save
    return opened_tiers


def _records_a_step(limits: EngineSettings, spans: Spans) -> int:
    """Return how many records are copied a step: all of a chunk, if written blocks leave memory."""
    if limits.active_kv_size is None:
        return 1
    return -(-limits.step_tokens // (spans.blocks * limits.block_size))


def _tier_of(store: StoreOpener) -> Callable[[int], ColdTier]:
    """Return a function that makes a store's tier, for the bytes that may wait in it."""
    return lambda queue_bytes: ColdTier(
        store.open, queue_bytes=queue_bytes, name=store.name, tombstone=store.tombstone
    )
