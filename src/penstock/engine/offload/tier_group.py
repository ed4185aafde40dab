"""The cold tiers of an engine: lookups while a request waits, reads while others decode, writes.

    enqueue ──> ask: number of leading blocks in each tier; the system reads them ahead
    step    ──> fastest: the tier to read from ──> EngineTier.begin ──> committed
    commit    ──> note: new blocks ──> each tier writes them at its own pace
    turn    ──> note_checkpoint ──> the states at its end are written after the blocks

Nothing here waits for a tier, and no tier for another. A tier that does not answer in time counts
as empty. Blocks restored from one tier are written to the others when requested again.
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
from penstock.engine.offload.preload import Capture, Preloader
from penstock.engine.offload.tier_kind import StoreOpener, TierContent
from penstock.engine.offload.tier_kinds import TIER_KINDS, check_tiers
from penstock.engine.offload.tier_writer import PENDING_TURNS
from penstock.engine.prefill_rate import PrefillRate
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.kv.block_format import BlockFormats
from penstock.kv.block_spans import Spans
from penstock.kv.segment import Segment
from penstock.kv.states import NO_STATES, StateForm
from penstock.ledger import Reservation
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.worker import ColdTier, TierStats

LATE_SECONDS = 0.1
"""Maximum wait for the other tiers after the first answer."""


class TierLookup:
    """Lookup in all tiers for one request: the number of leading blocks of a chain in each."""

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
        """Return whether all tiers have answered, or waiting for the rest is not worthwhile."""
        blocks_by_tier = self.blocks_by_tier()
        if any(blocks == self._blocks for blocks in blocks_by_tier.values()):
            return True
        late = self._clock() >= self._late_at
        return len(blocks_by_tier) == len(self._answers) or (late and bool(blocks_by_tier))

    def blocks_by_tier(self) -> dict[EngineTier, int]:
        return {
            tier: 0 if answer.exception() else answer.result()
            for tier, answer in self._answers.items()
            if answer.done()
        }

    def late(self) -> TierLookup | None:
        """Return a lookup of the tiers that have not answered; None if all have."""
        answers = {tier: answer for tier, answer in self._answers.items() if not answer.done()}
        return TierLookup(answers, self._blocks, self._clock) if answers else None


class TierGroup:
    """Cold tiers of an engine, nearest first. Not thread-safe: owned by the engine's thread."""

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

    @property
    def nbytes(self) -> int:
        return sum(tier.nbytes for tier in self)

    @property
    def paid_bytes(self) -> int:
        return sum(tier.paid_bytes for tier in self)

    @property
    def has_states(self) -> bool:
        return any(tier.has_states for tier in self)

    @property
    def where(self) -> str:
        return " or ".join(TIER_KINDS[name].where for name in self.tiers)

    def stats(self) -> dict[str, TierStats]:
        return {name: tier.stats() for name, tier in self.tiers.items()}

    def held_tokens(self, block_hashes: Sequence[bytes], timeout_seconds: float) -> int | None:
        """Return the tokens of the longest prefix of a chain in any tier; None if all time out."""
        until = time.monotonic() + timeout_seconds
        blocks = []
        for answer in [tier.held(block_hashes) for tier in self]:
            with suppress(TimeoutError):
                blocks.append(answer.result(max(0.0, until - time.monotonic())))
        return max(blocks) * self._prefixes.block_size if blocks else None

    def fastest(
        self, blocks_by_tier: Mapping[EngineTier, int], first: int
    ) -> tuple[EngineTier, int] | None:
        """Return the tier that saves the most time, and its number of blocks; None if none does.

        Args:
            blocks_by_tier: number of leading blocks of the chain in each tier.
            first: index of the first block to restore.
        """
        saved = {tier: tier.saved_seconds(first, n) for tier, n in blocks_by_tier.items()}
        tier = max(saved, key=lambda tier: saved[tier], default=None)
        if tier is None or not saved[tier]:
            return None
        return tier, blocks_by_tier[tier]

    # ---- reading

    def ask(self, block_hashes: Sequence[bytes]) -> TierLookup:
        """Start a lookup of a request's chain in all tiers."""
        cached = self._prefixes.match(block_hashes).tokens // self._prefixes.block_size
        return TierLookup(
            {tier: tier.ask(block_hashes, cached) for tier in self}, len(block_hashes), self._clock
        )

    def cancel(self, restores: Sequence[Restore], reservation: Reservation) -> list[Restore]:
        return [restore for restore in restores if not restore.tier.cancel(restore, reservation)]

    def leave(self, restores: Sequence[Restore]) -> None:
        for restore in restores:
            restore.tier.leave(restore)

    def preload(self, capture: Capture) -> int:
        return sum(Preloader(tier, self._prefixes, capture).run() for tier in self)

    # ---- writing

    def note(
        self, block_hashes: Sequence[bytes], root: bytes, first: int, *, seen: bool = False
    ) -> None:
        """Queue the blocks of a chain from `first` on to be written; see `TierWriter.note`."""
        for tier in self:
            tier.writer.note(block_hashes, root, first, seen=seen)

    def note_end(self, block_hashes: Sequence[bytes], root: bytes) -> None:
        for tier in self:
            tier.writer.note_end(block_hashes, root)

    def note_held(
        self, lookup: TierLookup, block_hashes: Sequence[bytes], root: bytes, cached_blocks: int
    ) -> None:
        """Queue the blocks of a cached chain that a tier lacks; for late tiers, when they answer.

        The sequence resumes after `cached_blocks`; a checkpoint there is queued as well.
        """
        late = lookup.late()
        for tier, blocks in lookup.blocks_by_tier().items():
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
        for tier in self:
            tier.writer.note_checkpoint(block_hashes, root, seen=seen, answered=answered)

    def save(self, node: Node[Segment]) -> None:
        """Write the conversation ends that need a node before it is evicted."""
        for tier in self:
            tier.writer.save(node)

    def work(self, *, busy: bool) -> bool:
        """Offer records, or wait for a tier unless `busy`; return False if nothing is pending."""
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
        """Drop queued blocks, and remove this model's blocks from tiers that are not shared."""
        self._late.clear()
        for tier in self:
            tier.writer.forget()
        return {name: tier.tier.clear(all_models=False) for name, tier in self.tiers.items()}

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all queued blocks are written or dropped; return False on timeout."""
        until = time.monotonic() + timeout_seconds
        for tier in self:
            tier.write_all(until)
        return all(tier.tier.flush(max(0.0, until - time.monotonic())) for tier in self)

    def waiting_nodes(self) -> set[int]:
        return set().union(*(tier.writer.waiting_nodes() for tier in self))

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        for tier in self:
            tier.close(timeout_seconds)

    def __len__(self) -> int:
        return len(self.tiers)

    def __iter__(self) -> Iterator[EngineTier]:
        return iter(self.tiers.values())


def open_tiers(
    limits: EngineSettings,
    prefixes: Prefixes[Segment],
    forms: BlockFormats,
    prefill_rate: PrefillRate,
    *,
    in_place: bool,
    state_form: StateForm = NO_STATES,
    group: ProcessGroup,
) -> TierGroup:
    """Open the configured cold tiers; see `EngineTier` for arguments and errors."""
    check_tiers(limits)
    named = [kind for kind in TIER_KINDS.values() if kind.is_named(limits)]
    if not named:
        return TierGroup({}, prefixes, group.clock)
    content = TierContent(
        prefixes.fingerprint,
        forms.spans,
        max(forms.most_record_bytes, state_form.nbytes),
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
    return TierGroup(tiers, prefixes, group.clock, records=records)


def _records_a_step(limits: EngineSettings, spans: Spans) -> int:
    """Return the number of records copied per step: those of a whole chunk if KV is spilled."""
    if limits.active_kv_size is None:
        return 1
    return -(-limits.step_tokens // (spans.blocks * limits.block_size))


def _tier_of(store: StoreOpener) -> Callable[[int], ColdTier]:
    return lambda queue_bytes: ColdTier(
        store.open, queue_bytes=queue_bytes, name=store.name, tombstone=store.tombstone
    )
