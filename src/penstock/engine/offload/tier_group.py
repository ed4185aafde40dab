"""The cold tiers as the engine uses them: asks while a request waits, reads while others decode,
writes behind.

    enqueue ──> ask: how much of the chain has each tier? the system reads it ahead
    step    ──> fastest: from which of them it is read ──> EngineTier.begin ──> taken in
    commit    ──> note: these blocks are new ──> each tier has them written at its own pace
    turn    ──> note_checkpoint ──> the states at its end, behind the blocks

Nothing here waits for a tier, and no tier for another: what a slow one has not said in time is
not there. What was read from one goes to the others when it is asked for again, as everything
that is in memory and not with them.
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
    PENDING_TURNS,
    EngineTier,
    Restore,
)
from penstock.engine.offload.prefill_rate import PrefillRate
from penstock.engine.offload.tier_kinds import (
    TIER_KINDS,
    StoreOpener,
    TierContent,
    check_tiers,
)
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.kv.block_format import BlockFormats
from penstock.kv.segment import Segment
from penstock.kv.states import StateForm, States
from penstock.ledger import Reservation
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.worker import ColdTier, TierStats

LATE_SECONDS = 0.1
"""After which a tier that has not answered is not waited for, if another one has."""


class TierLookup:
    """What is asked of all tiers for one request: how many blocks of a chain they have."""

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
        """Whether nothing is waited for: all have answered, or one has all of the chain, or those
        that have not answered are late."""
        found = self.found()
        if any(blocks == self._blocks for blocks in found.values()):
            return True
        late = self._clock() >= self._late_at
        return len(found) == len(self._answers) or (late and bool(found))

    def found(self) -> dict[EngineTier, int]:
        """Return how many first blocks each tier has that has answered."""
        return {
            tier: 0 if answer.exception() else answer.result()
            for tier, answer in self._answers.items()
            if answer.done()
        }

    def late(self) -> TierLookup | None:
        """Return what is still to be answered; None if all is."""
        answers = {tier: answer for tier, answer in self._answers.items() if not answer.done()}
        return TierLookup(answers, self._blocks, self._clock) if answers else None


class TierGroup:
    """What the engine does with its cold tiers. Not thread-safe: the engine's thread.

    Args:
        tiers: at least one, by name as in `TIER_KINDS`, the nearest first.
        prefixes: of the engine.
        clock: seconds, by which an answer is late.
    """

    def __init__(
        self,
        tiers: Mapping[str, EngineTier],
        prefixes: Prefixes[Segment],
        clock: Callable[[], float],
    ) -> None:
        self.tiers = tiers
        self._clock = clock
        self._prefixes = prefixes
        self._late: deque[tuple[TierLookup, Sequence[bytes], bytes, int]] = deque(
            maxlen=PENDING_TURNS
        )

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes held whatever happens: of blocks that are being written, or arrive, and of the
        lists of those that are to be."""
        return sum(tier.nbytes for tier in self)

    @property
    def paid_bytes(self) -> int:
        """Bytes of segments that are being read."""
        return sum(tier.paid_bytes for tier in self)

    @property
    def has_states(self) -> bool:
        """Whether a sequence goes on where a checkpoint is, and nowhere else."""
        return any(tier.has_states for tier in self)

    @property
    def where(self) -> str:
        """Where the tiers are, in words."""
        return " or ".join(TIER_KINDS[name].where for name in self.tiers)

    def stats(self) -> dict[str, TierStats]:
        """Return what each tier has done, by its name."""
        return {name: tier.stats() for name, tier in self.tiers.items()}

    def held_tokens(self, block_hashes: Sequence[bytes], timeout_seconds: float) -> int | None:
        """Wait to be told how many first tokens of a chain are in a tier at most; None if that
        takes too long."""
        until = time.monotonic() + timeout_seconds
        found = []
        for answer in [tier.held(block_hashes) for tier in self]:
            with suppress(TimeoutError):
                found.append(answer.result(max(0.0, until - time.monotonic())))
        return max(found) * self._prefixes.block_size if found else None

    def fastest(self, found: Mapping[EngineTier, int], first: int) -> tuple[EngineTier, int] | None:
        """Return the tier from which reading the blocks from `first` on saves most time, and how
        many first blocks it has; None if computing them is as good.

        Args:
            found: what `TierLookup` has found.
            first: blocks that need not be read.
        """
        tier = max(found, key=lambda tier: tier.saved_seconds(first, found[tier]), default=None)
        if tier is None or not tier.saved_seconds(first, found[tier]):
            return None
        return tier, found[tier]

    # ---- reading

    def ask(self, block_hashes: Sequence[bytes]) -> TierLookup:
        """Ask how many blocks of a chain, from its first one on, each tier has, for a request;
        they are used, also those that are in the tree, and the others will be read."""
        known = self._prefixes.match(block_hashes).tokens // self._prefixes.block_size
        return TierLookup(
            {tier: tier.ask(block_hashes, known) for tier in self}, len(block_hashes), self._clock
        )

    def take_states(self, restore: Restore) -> States | None:
        """See `EngineTier.take_states`."""
        return restore.tier.take_states(restore)

    def take(self, restore: Restore, own: Reservation) -> int:
        """See `EngineTier.take`."""
        return restore.tier.take(restore, own)

    def cancel(self, restores: Sequence[Restore], own: Reservation) -> list[Restore]:
        """Take back what has not begun; the bytes are `own`'s. Return what has."""
        return [restore for restore in restores if not restore.tier.cancel(restore, own)]

    def leave(self, restores: Sequence[Restore]) -> None:
        """Let go of what nobody waits for any more, as soon as its tier does."""
        for restore in restores:
            restore.tier.leave(restore)

    def preload(self, checkpoints: Checkpoints | None = None) -> int:
        """Read what is worth most, as long as there is free memory; see `EngineTier.preload`."""
        return sum(tier.preload(checkpoints) for tier in self)

    # ---- writing

    def note(self, block_hashes: Sequence[bytes], root: bytes, first: int) -> None:
        """Note that the blocks of a chain from `first` on are new in the tree."""
        for tier in self:
            tier.note(block_hashes, root, first)

    def note_end(self, block_hashes: Sequence[bytes], root: bytes) -> None:
        """Note that a conversation ended behind a chain that was noted."""
        for tier in self:
            tier.note_end(block_hashes, root)

    def note_held(
        self, asked: TierLookup, block_hashes: Sequence[bytes], root: bytes, cached_blocks: int
    ) -> None:
        """Note that a chain that was asked for is in the tree, of which a tier may lack the end.
        Who has not answered is noted for when it has.

        Args:
            asked: for the chain.
            block_hashes: of it, as far as it is held.
            root: what the chain begins with.
            cached_blocks: in front of the place where the sequence resumes; there may be a
                checkpoint.
        """
        late = asked.late()
        for tier, blocks in asked.found().items():
            if blocks < len(block_hashes):
                tier.note(block_hashes, root, blocks, seen=True, ended=True)
                if tier.has_states:
                    tier.note_checkpoint(block_hashes[:cached_blocks], root, seen=True)
        if late is not None and block_hashes:
            self._late.append((late, block_hashes, root, cached_blocks))

    def note_checkpoint(
        self, block_hashes: Sequence[bytes], root: bytes, *, seen: bool = False
    ) -> None:
        """Note that there is a checkpoint behind the last block of a chain."""
        for tier in self:
            tier.note_checkpoint(block_hashes, root, seen=seen)

    def work(self, *, busy: bool) -> bool:
        """Copy a block for each tier and offer it, if there is one and the tier takes it; or wait a
        moment, if the engine has nothing else to do. False if there is nothing to be done."""
        for late in [each for each in self._late if each[0].done()]:
            self._late.remove(late)
            self.note_held(*late)
        offered = [tier.offer_next() for tier in self]
        if any(offered):
            return True
        waited_for = [tier for tier in self if not tier.is_written]
        if waited_for and not busy:
            waited_for[0].tier.wait(LOOK_SECONDS)
        return bool(waited_for)

    def clear(self) -> None:
        """Write nothing of what was noted so far, and remove this model's blocks where they are
        ours alone."""
        self._late.clear()
        for tier in self:
            tier.forget()
            tier.tier.clear(all_models=False)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was offered is written or dropped; tell whether it is."""
        until = time.monotonic() + timeout_seconds
        return all(tier.tier.flush(max(0.0, until - time.monotonic())) for tier in self)

    def waiting_nodes(self) -> set[int]:
        """Return the nodes, by their ids, that have blocks which wait to be written."""
        return set().union(*(tier.waiting_nodes() for tier in self))

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, as far as there is time, and end the tiers."""
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
    content = TierContent(
        prefixes.fingerprint,
        forms.spans,
        max(forms.most_record_bytes, 0 if state_form is None else state_form.nbytes),
    )
    check_tiers(limits)
    tiers: dict[str, EngineTier] = {}
    try:
        for kind in TIER_KINDS.values():
            if kind.is_named(limits):
                store = kind.opener(limits, content)
                tiers[kind.name] = EngineTier(
                    _tier_of(store),
                    prefixes,
                    forms,
                    prefill_rate,
                    in_place=in_place,
                    state_form=state_form,
                    buffer_bytes=store.buffer_bytes,
                    group=group,
                )
    except BaseException:
        for opened in tiers.values():
            opened.close()
        raise
    return TierGroup(tiers, prefixes, group.clock) if tiers else None


def _tier_of(store: StoreOpener) -> Callable[[int], ColdTier]:
    """Return a function that makes a store's tier, for the bytes that may wait in it."""
    return lambda queue_bytes: ColdTier(store.open, queue_bytes=queue_bytes, name=store.name)
