"""One cold tier of an engine: restores, measured speed, and buffers.

    begin ──> memory of the future segments, filled by the tier's thread ──> take ──> committed

`tier_writer` writes, `preload` reads ahead, and `tier_group` chooses the tier. Nothing here waits
for the store. Buffers used by the tier's thread stay in the ledger until it has finished, even
after a cancel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.engine.offload.tier_writer import PENDING_BYTES, TierWriter
from penstock.engine.prefill_rate import FIRST_BYTES_PER_SECOND, PrefillRate, ReadRate
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.kv.block_format import BlockFormats
from penstock.kv.segment import Segment
from penstock.kv.states import NO_STATES, StateForm, States
from penstock.ledger import Kind, Reservation
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.host import RestoreBuffer, StateRestoreBuffer
from penstock.tiers.worker import ColdTier, TierStats

QUEUE_RECORDS = 2
"""Maximum number of copied records waiting to be written, unless KV is spilled."""
FILE_RECORDS = 2
"""Number of copies of a record while its file is written: its bytes, and a buffer."""
TOKEN_BYTES = 4
"""Bytes of a token id in the file."""
WORTH_WRITING = 2.0
"""Ratio of the times to compute and read a record from which it is written after one use."""
WORTH_READING = 2.0
"""Minimum ratio of the times to compute and read blocks for them to be restored."""
LEAST_PATIENCE_SECONDS = 0.25
LOOK_SECONDS = 0.005
"""Maximum wait of an idle engine for a tier between two steps."""
CLOSE_SECONDS = 30.0
"""Maximum wait for pending writes when the engine closes."""


@dataclass(eq=False, slots=True)
class Restore:
    """Consecutive blocks of a chain, or the checkpoint after them, being read from a tier."""

    first: int
    """Number of blocks before these in the chain."""
    buffer: RestoreBuffer | StateRestoreBuffer
    answer: Future[int]
    """Future of the number of leading records that were read."""
    paid: Reservation
    tier: EngineTier
    blocks: int = 1
    cached_blocks: int = 0
    """Number of blocks before `first` that are in the tree, but also in the first record."""
    cached_bytes: int = 0
    """Bytes of the buffers for the `cached_blocks`."""

    @property
    def own_bytes(self) -> int:
        """Bytes of the buffers, excluding blocks in the tree."""
        return self.paid.nbytes - self.cached_bytes

    def segment(self, blocks: int, block_size: int) -> Segment:
        """Return the first `blocks` of these blocks, once read; a copy unless they are all."""
        assert isinstance(self.buffer, RestoreBuffer)
        segment = self.buffer.segment()
        if blocks == self.blocks and not self.cached_blocks:
            return segment
        start = self.cached_blocks * block_size
        return segment.part(start, start + blocks * block_size).owned(coded=True)


class EngineTier:
    """One of an engine's cold tiers. Not thread-safe: owned by the engine's thread.

    Args:
        open_tier: opens the tier, given the maximum bytes queued for writing.
        in_place: whether files can be read into MLX's arrays.
        state_form: format of the recurrent layers' states; without arrays if the model has none.
        buffer_bytes: memory of the store itself, besides blocks being written.
        queue_records: maximum number of copied records that wait to be written.
        group: process group of the ranks; a tier's answer counts once all ranks have it.
    """

    def __init__(
        self,
        open_tier: Callable[[int], ColdTier],
        prefixes: Prefixes[Segment],
        forms: BlockFormats,
        prefill_rate: PrefillRate,
        *,
        in_place: bool,
        state_form: StateForm = NO_STATES,
        buffer_bytes: int = 0,
        queue_records: int = QUEUE_RECORDS,
        group: ProcessGroup,
    ) -> None:
        self.prefill_rate = prefill_rate
        self.read_rate = ReadRate(group.mean(1 / FIRST_BYTES_PER_SECOND))
        self._group = group
        self._state_form = state_form
        self.state_bytes = state_form.nbytes
        self._prefixes = prefixes
        self.forms = forms
        self._in_place = in_place
        self._spans = spans = forms.spans
        tokens_bytes = TOKEN_BYTES * spans.blocks * prefixes.block_size
        self._most_record_bytes = forms.most_record_bytes + tokens_bytes
        copies = (queue_records + FILE_RECORDS) * self._most_record_bytes
        copies += forms.converted_record_bytes  # one record is converted for its file
        copies += (1 + FILE_RECORDS) * self.state_bytes + buffer_bytes
        ledger = prefixes.ledger
        self._buffers = ledger.reserve(Kind.BUFFERS, copies + PENDING_BYTES)
        self._restores: set[Restore] = set()
        self._left: list[Restore] = []
        self._read = (0, 0.0)
        self.tier = open_tier(queue_records * self._most_record_bytes + self.state_bytes)
        self.writer = TierWriter(
            self.tier, prefixes, forms, state_form, self._most_record_bytes, self._is_dear
        )

    @property
    def nbytes(self) -> int:
        """Bytes reserved for buffers of writes, and for the list of pending blocks."""
        return self._buffers.nbytes

    @property
    def paid_bytes(self) -> int:
        return sum(restore.paid.nbytes for restore in (*self._restores, *self._left))

    def stats(self) -> TierStats:
        """Return the tier's statistics."""
        stats = self.tier.stats()
        stats.dropped_blocks += self.writer.dropped_blocks
        return stats

    @property
    def is_written(self) -> bool:
        return not (self.writer.has_pending or self.tier.is_busy)

    def held(self, block_hashes: Sequence[bytes]) -> Future[int]:
        return self.tier.call(lambda store: store.held(block_hashes, resumable=self.has_states), 0)

    @property
    def has_states(self) -> bool:
        return bool(self._state_form.arrays)

    def saved_seconds(self, first: int, stop: int) -> float:
        """Return the seconds saved by restoring blocks `first..stop - 1`; 0 if not worthwhile."""
        if stop <= first:
            return 0.0
        ahead = sum(restore.paid.nbytes for restore in self._restores)
        nbytes = self._nbytes(self._spans.start(first), stop) + self.state_bytes
        seconds = self.read_rate.seconds(ahead + nbytes)
        computed = self._prefill_seconds(stop - first)
        return computed - seconds if WORTH_READING * seconds < computed else 0.0

    def patience_seconds(self, first: int, stop: int) -> float:
        """Return the seconds to wait for the blocks `first..stop - 1` before computing them.

        More than the expected read time, and at most the time of computing them.
        """
        expected = self.read_rate.seconds(self._nbytes(first, stop))
        return min(self._prefill_seconds(stop - first), max(LEAST_PATIENCE_SECONDS, 4 * expected))

    # ---- reading

    def ask(self, block_hashes: Sequence[bytes], cached_blocks: int) -> Future[int]:
        """Return a future of the number of leading blocks of a request's chain in the tier.

        Counts as a use of the blocks, and lets the system read ahead those after the first
        `cached_blocks`. With recurrent layers, only blocks up to the last checkpoint count.
        """
        states = self.has_states
        return self._group.answer(
            self.tier.call(
                lambda store: store.prepare(block_hashes, cached_blocks, resumable=states), 0
            )
        )

    def begin(
        self, block_hashes: Sequence[bytes], first: int, reservation: Reservation
    ) -> list[Restore]:
        """Start reading the blocks of a chain from block `first` on, in several restores.

        The sequence's reservation pays for them. Returns no restores if the preceding blocks of the
        same record, which are read as well, do not fit in memory.
        """
        size, begun = self._prefixes.block_size, []
        for ends in self._runs(first, len(block_hashes)):
            start, stop = self._spans.start(first), ends[-1]
            cached_bytes = self.forms.nbytes(start, first)
            if not self._prefixes.make_room(cached_bytes):
                break
            paid = self._prefixes.ledger.reserve(Kind.TAILS, cached_bytes)
            reservation.pass_on(paid, self.forms.nbytes(first, stop))
            buffer = RestoreBuffer(
                self.forms.of(first),
                len(ends),
                (stop - start) // len(ends) * size,
                in_place=self._in_place,
            )
            records = [block_hashes[end - 1] for end in ends]
            answer = self._group.answer(self.tier.restore(records, buffer.targets))
            begun.append(
                Restore(
                    first, buffer, answer, paid, self, stop - first, first - start, cached_bytes
                )
            )
            first = stop
        self._restores.update(begun)
        return begun

    def _runs(self, first: int, stop: int) -> Iterator[list[int]]:
        most_tokens = self._prefixes.tree.max_merge_tokens
        spans, most_blocks = self._spans, max(1, most_tokens // self._prefixes.block_size)
        while first < stop:
            start, ends = spans.start(first), [min(spans.end(first), stop)]
            blocks = ends[0] - start
            while ends[-1] != spans.cut and ends[-1] + blocks <= min(stop, start + most_blocks):
                if spans.end(ends[-1]) != ends[-1] + blocks:
                    break
                ends.append(ends[-1] + blocks)
            yield ends
            first = ends[-1]

    def begin_states(self, block_hashes: Sequence[bytes]) -> Restore | None:
        if not self._prefixes.make_room(self.state_bytes):
            return None
        paid = self._prefixes.ledger.reserve(Kind.TAILS, self.state_bytes)
        buffer = StateRestoreBuffer(self._state_form, in_place=self._in_place)
        answer = self._group.answer(
            self.tier.restore([checkpoint_hash(block_hashes[-1])], buffer.targets)
        )
        restore = Restore(len(block_hashes), buffer, answer, paid, self)
        self._restores.add(restore)
        return restore

    def take_states(self, restore: Restore) -> States | None:
        """Return the states of a finished restore; None if they were not read.

        Their bytes are released; the caller must reserve them immediately.
        """
        self._restores.remove(restore)
        restore.paid.release()
        there = not restore.answer.exception() and restore.answer.result()
        assert isinstance(restore.buffer, StateRestoreBuffer)
        return restore.buffer.states() if there else None

    def take(self, restore: Restore, reservation: Reservation) -> int:
        """Return the number of blocks read by a restore, and transfer its reserved bytes.

        Bytes of blocks already in the tree are released; the caller must reserve them immediately.
        """
        assert isinstance(restore.buffer, RestoreBuffer)
        self._restores.remove(restore)
        restore.paid.pass_on(reservation, restore.own_bytes)
        restore.paid.release()
        counts = self.tier.stats().counts
        nbytes, seconds = self._read
        self._read = (counts.read_bytes, counts.read_seconds)
        self.read_rate.restored(counts.read_bytes - nbytes, counts.read_seconds - seconds)
        records = 0 if restore.answer.exception() else restore.answer.result()
        cached = restore.cached_blocks
        there = records * (cached + restore.blocks) // restore.buffer.blocks
        return max(0, there - cached)

    def cancel(self, restore: Restore, reservation: Reservation) -> bool:
        """Cancel a restore and return its bytes; False if it has already started."""
        if not restore.answer.cancel():
            return False
        self._restores.remove(restore)
        if isinstance(restore.buffer, RestoreBuffer):  # states were not paid for by it
            restore.paid.pass_on(reservation, restore.own_bytes)
        restore.paid.release()
        return True

    def leave(self, restore: Restore) -> None:
        """Abandon a restore; its bytes are released once the store has finished it."""
        restore.answer.cancel()
        self._restores.remove(restore)
        self._left.append(restore)
        self.sweep()

    def sweep(self) -> None:
        for restore in [left for left in self._left if left.answer.done()]:
            self._left.remove(restore)
            restore.paid.release()

    def write_all(self, until_seconds: float) -> None:
        self.writer.release_ends()
        while self.writer.has_pending and time.monotonic() < until_seconds:
            self.sweep()
            if not self.writer.offer_next():
                self.tier.wait(LOOK_SECONDS)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        until = time.monotonic() + timeout_seconds
        self.write_all(until)
        self.writer.forget()
        self.tier.close(max(1.0, until - time.monotonic()))
        for restore in list(self._restores):
            self.leave(restore)
        if not self._left:  # else the disk hangs, and its thread still uses the buffers
            self._buffers.release()

    def _is_dear(self) -> bool:
        """Return whether a record takes long enough to compute to be written after one use."""
        seconds = self.read_rate.seconds(self._most_record_bytes)
        return self._prefill_seconds(self._spans.blocks) > WORTH_WRITING * seconds

    def _prefill_seconds(self, blocks: int) -> float:
        return self.prefill_rate.prefill_seconds(blocks * self._prefixes.block_size)

    def _nbytes(self, first: int, stop: int) -> int:
        tokens = (stop - first) * self._prefixes.block_size
        return self.forms.nbytes(first, stop) + TOKEN_BYTES * tokens
