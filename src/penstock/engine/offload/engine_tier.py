"""One cold tier of an engine: reads and writes, each at its own pace.

    begin ──> memory of the segments-to-be, filled by the tier's thread ──> taken in
    note  ──> these blocks are new ──> those of one record are copied and offered between two steps

Nothing here waits for the store. Buffers that the tier's thread uses stay in the ledger until it is
done with them, also after a cancel. `tier_group` says which tier, and when.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.engine.offload.prefill_rate import FIRST_BYTES_PER_SECOND, PrefillRate, ReadRate
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.kv.block_format import BlockFormats
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState, StateForm, States
from penstock.ledger import Kind, Reservation
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.prefixes import MAX_MERGE_TOKENS, Prefixes
from penstock.prefix.tree import Pin
from penstock.tiers.host import RestoreBuffer, StateRestoreBuffer, host_block, host_states
from penstock.tiers.record import HostArray, Record
from penstock.tiers.worker import ColdTier, TierStats

QUEUE_RECORDS = 2
"""Copied records that wait to be written."""
FILE_RECORDS = 2
"""Copies of a record while its file is written: the bytes, and the buffer behind them."""
PENDING_KEYS = 16_384
"""Blocks, at most, that are worth writing and wait for their turn."""
TOKEN_BYTES = 4
"""Bytes of a token's number, which is in the file beside its KV."""
PENDING_TURNS = 64
"""Checkpoints, at most, that wait for their turn; the oldest are left out."""
KEY_BYTES = 80
"""Python overhead of one pending block hash."""
WORTH_WRITING = 2.0
"""Ratio of computing to reading a record from which one that was used once is written."""
WORTH_READING = 2.0
"""Ratio of computing to reading blocks from which they are read."""
LEAST_PATIENCE_SECONDS = 0.25
LOOK_SECONDS = 0.005
"""Longest wait of an idle engine for a tier between two steps."""
PRELOAD_SECONDS = 60.0
"""Longest wait for a chain that is read ahead of all requests."""
CLOSE_SECONDS = 30.0
"""Longest wait for pending writes when the engine ends."""


@dataclass(eq=False, slots=True)
class Restore:
    """Consecutive blocks of a chain, or the checkpoint behind them, on the way from a tier."""

    first: int
    """Blocks before them in the chain."""
    landing: RestoreBuffer | StateRestoreBuffer
    answer: Future[int]
    """Number of their records that were read, from the first one on."""
    paid: Reservation
    """Reservation of the buffers."""
    tier: EngineTier
    """Tier that they are read from."""
    blocks: int = 1
    """Number of blocks."""
    known: int = 0
    """Blocks before them that are in the tree and read again, as part of the first record."""
    known_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """Bytes of the buffers, without blocks that are in the tree."""
        return self.paid.nbytes - self.known_bytes

    def segment(self, blocks: int, block_size: int) -> Segment:
        """Return the first of these blocks, once they are read; a copy if there are others."""
        assert isinstance(self.landing, RestoreBuffer)
        segment = self.landing.segment()
        if blocks == self.blocks and not self.known:
            return segment
        start = self.known * block_size
        return segment.part(start, start + blocks * block_size).owned(coded=True)


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


class EngineTier:
    """One of an engine's cold tiers. Not thread-safe: the engine's thread.

    Args:
        open_tier: makes the tier, for the number of bytes that may wait in it.
        prefixes: of the engine.
        forms: how blocks are held.
        prefill_rate: measured speed of the model.
        in_place: whether files can be read into MLX's arrays.
        state_form: of the recurrent layers' states; None if the model has none.
        buffer_bytes: held by the store itself, besides blocks that are written.
        group: the ranks of the engine; an answer of a tier counts when all have it.

    Raises:
        LedgerFull, NeverFits: there is no room for blocks that are being written.
    """

    def __init__(
        self,
        open_tier: Callable[[int], ColdTier],
        prefixes: Prefixes[Segment],
        forms: BlockFormats,
        prefill_rate: PrefillRate,
        *,
        in_place: bool,
        state_form: StateForm | None = None,
        buffer_bytes: int = 0,
        group: ProcessGroup,
    ) -> None:
        self.prefill_rate = prefill_rate
        self.read_pace = ReadRate(group.mean(1 / FIRST_BYTES_PER_SECOND))
        self._group = group
        self._state_form = state_form
        self._state_bytes = 0 if state_form is None else state_form.nbytes
        self._prefixes = prefixes
        self._forms = forms
        self._in_place = in_place
        self._spans = spans = forms.spans
        tokens_bytes = TOKEN_BYTES * spans.blocks * prefixes.block_size
        self._most_record_bytes = forms.most_record_bytes + tokens_bytes
        copies = (QUEUE_RECORDS + FILE_RECORDS) * self._most_record_bytes
        copies += forms.coded_record_bytes  # of the one that is encoded for its file
        copies += (1 + FILE_RECORDS) * self._state_bytes + buffer_bytes
        ledger = prefixes.ledger
        self._buffers = ledger.reserve(Kind.BUFFERS, copies + PENDING_KEYS * KEY_BYTES)
        self._pending: deque[_Pending] = deque()
        self._pending_keys = 0
        self._turns: deque[tuple[bytes, ...]] = deque(maxlen=PENDING_TURNS)
        self._dropped = 0
        self._restores: set[Restore] = set()
        self._left: list[Restore] = []
        self._read = (0, 0.0)
        self.tier = open_tier(QUEUE_RECORDS * self._most_record_bytes + self._state_bytes)

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes reserved for buffers of writes, and for the list of pending blocks."""
        return self._buffers.nbytes

    @property
    def paid_bytes(self) -> int:
        """Bytes of buffers that are being read into."""
        return sum(restore.paid.nbytes for restore in (*self._restores, *self._left))

    def stats(self) -> TierStats:
        """Return the tier's figures; blocks evicted before they were written count as dropped."""
        stats = self.tier.stats()
        stats.dropped_blocks += self._dropped
        return stats

    @property
    def is_written(self) -> bool:
        """Whether no write is pending."""
        return not (self.has_pending or self.tier.is_busy)

    @property
    def has_pending(self) -> bool:
        """Whether blocks or checkpoints wait to be offered to the tier."""
        return bool(self._pending or self._turns)

    def held(self, block_hashes: Sequence[bytes]) -> Future[int]:
        """Ask how many first blocks of a chain could be read."""
        return self.tier.held(block_hashes, resumable=self.has_states)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers: a sequence resumes only at a checkpoint."""
        return self._state_form is not None

    def saved_seconds(self, first: int, stop: int) -> float:
        """Return the seconds by which reading blocks is faster than computing them.

        Args:
            first: the first of the blocks.
            stop: the block behind the last.

        Returns:
            0 if reading is not worth it; reads that have begun come first.
        """
        if stop <= first:
            return 0.0
        ahead = sum(restore.paid.nbytes for restore in self._restores)
        nbytes = self._nbytes(self._spans.start(first), stop) + self._state_bytes
        seconds = self.read_pace.seconds(ahead + nbytes)
        computed = self._prefill_seconds(stop - first)
        return computed - seconds if WORTH_READING * seconds < computed else 0.0

    def patience_seconds(self, first: int, stop: int) -> float:
        """Return how long to wait for the blocks first..stop-1 before computing them.

        Longer than the read should take, and never longer than computing them does.
        """
        expected = self.read_pace.seconds(self._nbytes(first, stop))
        return min(self._prefill_seconds(stop - first), max(LEAST_PATIENCE_SECONDS, 4 * expected))

    # ---- reading

    def ask(self, block_hashes: Sequence[bytes], known: int) -> Future[int]:
        """Ask how many first blocks of a request's chain the tier has.

        This counts as a use of the blocks, and lets the system read ahead those behind the first
        `known` ones. With recurrent layers the answer ends at the last checkpoint.
        """
        return self._group.answer(self.tier.prepare(block_hashes, known, resumable=self.has_states))

    def begin(self, block_hashes: Sequence[bytes], first: int, own: Reservation) -> list[Restore]:
        """Begin to read the blocks of a chain from block `first` on, in several restores.

        Return none if there is no room for the blocks before `first` of the same record.

        Args:
            block_hashes: up to the last block to be read.
            first: blocks before them.
            own: reservation of the sequence, which passes the bytes on.
        """
        size, begun = self._prefixes.block_size, []
        for ends in self._runs(first, len(block_hashes)):
            start, stop = self._spans.start(first), ends[-1]
            known_bytes = self._forms.nbytes(start, first)
            if not self._prefixes.make_room(known_bytes):
                break
            paid = self._prefixes.ledger.reserve(Kind.TAILS, known_bytes)
            own.pass_on(paid, self._forms.nbytes(first, stop))
            landing = RestoreBuffer(
                self._forms.of(first),
                len(ends),
                (stop - start) // len(ends) * size,
                in_place=self._in_place,
            )
            records = [block_hashes[end - 1] for end in ends]
            answer = self._group.answer(self.tier.restore(records, landing.targets))
            begun.append(
                Restore(
                    first, landing, answer, paid, self, stop - first, first - start, known_bytes
                )
            )
            first = stop
        self._restores.update(begun)
        return begun

    def _runs(self, first: int, stop: int) -> Iterator[list[int]]:
        """Yield the ends of the records of the blocks first..stop-1.

        Records of one size come together, up to the size of a node.
        """
        spans, most = self._spans, max(1, MAX_MERGE_TOKENS // self._prefixes.block_size)
        while first < stop:
            start, ends = spans.start(first), [min(spans.end(first), stop)]
            blocks = ends[0] - start
            while ends[-1] != spans.cut and ends[-1] + blocks <= min(stop, start + most):
                if spans.end(ends[-1]) != ends[-1] + blocks:
                    break
                ends.append(ends[-1] + blocks)
            yield ends
            first = ends[-1]

    def begin_states(self, block_hashes: Sequence[bytes]) -> Restore | None:
        """Begin to read the checkpoint behind a chain; return None if there is no room."""
        assert self._state_form is not None
        if not self._prefixes.make_room(self._state_bytes):
            return None
        paid = self._prefixes.ledger.reserve(Kind.TAILS, self._state_bytes)
        landing = StateRestoreBuffer(self._state_form, in_place=self._in_place)
        answer = self._group.answer(
            self.tier.restore([checkpoint_hash(block_hashes[-1])], landing.targets)
        )
        restore = Restore(len(block_hashes), landing, answer, paid, self)
        self._restores.add(restore)
        return restore

    def take_states(self, restore: Restore) -> States | None:
        """Return the states of a restore that is done, if they were read.

        Their bytes are released: the caller reserves them at once.
        """
        self._restores.remove(restore)
        restore.paid.release()
        there = not restore.answer.exception() and restore.answer.result()
        assert isinstance(restore.landing, StateRestoreBuffer)
        return restore.landing.states() if there else None

    def take(self, restore: Restore, own: Reservation) -> int:
        """Return how many blocks of a restore were read, and pass its bytes to `own`.

        Bytes of blocks that are in the tree are released: the caller reserves them at once.
        """
        self._restores.remove(restore)
        restore.paid.pass_on(own, restore.own_bytes)
        restore.paid.release()
        counts = self.tier.stats().counts
        nbytes, seconds = self._read
        self._read = (counts.read_bytes, counts.read_seconds)
        self.read_pace.restored(counts.read_bytes - nbytes, counts.read_seconds - seconds)
        records = 0 if restore.answer.exception() else restore.answer.result()
        there = records * (restore.known + restore.blocks) // restore.landing.blocks
        return max(0, there - restore.known)

    def cancel(self, restore: Restore, own: Reservation) -> bool:
        """Cancel a restore that has not begun and pass its bytes to `own`; return whether it is."""
        if not restore.answer.cancel():
            return False
        self._restores.remove(restore)
        if isinstance(restore.landing, RestoreBuffer):  # states are no part of the own
            restore.paid.pass_on(own, restore.own_bytes)
        restore.paid.release()
        return True

    def leave(self, restore: Restore) -> None:
        """Abandon a restore; its bytes are released as soon as the store is done with it."""
        restore.answer.cancel()
        self._restores.remove(restore)
        self._left.append(restore)
        self.sweep()

    def sweep(self) -> None:
        """Release the bytes of abandoned restores that are done."""
        for restore in [left for left in self._left if left.answer.done()]:
            self._left.remove(restore)
            restore.paid.release()

    def preload(self, checkpoints: Checkpoints | None = None) -> int:
        """Read the most valuable chains into free memory; nothing is evicted for them.

        With recurrent layers each chain ends at its last checkpoint, which is read too.

        Args:
            checkpoints: of the tree, for a model with states.

        Returns:
            Tokens that the tree has more than before.
        """
        prefixes, ledger = self._prefixes, self._prefixes.ledger
        before, size = prefixes.tree.tokens, prefixes.block_size
        for block_hashes in self.tier.chains(ledger.free_bytes).result(PRELOAD_SECONDS):
            if self.has_states:
                block_hashes = block_hashes[: self.held(block_hashes).result(PRELOAD_SECONDS)]
            match = prefixes.match(block_hashes)
            blocks = len(block_hashes) - match.tokens // size
            nbytes = self._forms.nbytes(match.tokens // size, len(block_hashes))
            # A node that ends inside is cut in two, which takes a copy of it.
            num_cached_tokens = match.path[-1].segment.nbytes if match.ends_inside else 0
            first = match.tokens // size
            start = self._spans.start(first)
            if start < first:  # in the tree, and read all the same; the others are copied out
                num_cached_tokens += nbytes + 2 * self._forms.nbytes(start, first)
            room = nbytes + num_cached_tokens + prefixes.index_bytes(blocks) + 2 * self._state_bytes
            if room > ledger.free_bytes or not (blocks or (block_hashes and self.has_states)):
                continue
            with prefixes.pin(match) as pin:
                if blocks:
                    with ledger.reserve(Kind.TAILS, nbytes) as own:
                        self._preload(block_hashes, pin, match.tokens // size, own)
                if checkpoints is not None:
                    self._preload_states(block_hashes, pin, checkpoints)
        return prefixes.tree.tokens - before

    def _preload_states(
        self, block_hashes: Sequence[bytes], pin: Pin[Segment], checkpoints: Checkpoints
    ) -> None:
        """Read the checkpoint behind a chain that is in the tree, unless it is there."""
        end = len(block_hashes) * self._prefixes.block_size
        held, _ = checkpoints.resume(pin.path, end)
        if held == end or self._prefixes.match(block_hashes).tokens < end:
            return
        restore = self.begin_states(block_hashes)
        if restore is None:
            return
        wait([restore.answer], PRELOAD_SECONDS)
        if not restore.answer.done():
            self.leave(restore)
            return
        states = self.take_states(restore)
        if states is not None:
            checkpoints.capture(pin.path, end, RecurrentState(states, own=True), turn_end=True)

    def _preload(
        self, block_hashes: Sequence[bytes], pin: Pin[Segment], first: int, own: Reservation
    ) -> None:
        restores = self.begin(block_hashes, first, own)
        try:
            while restores:
                restores[0].answer.result(PRELOAD_SECONDS)
                restore = restores.pop(0)
                nbytes = restore.paid.nbytes if restore.known else 0
                if self.take(restore, own) < restore.blocks:
                    break
                landing, end = restore.landing, restore.first + restore.blocks
                assert isinstance(landing, RestoreBuffer)
                size = self._prefixes.block_size
                with self._prefixes.ledger.reserve(Kind.BUFFERS, nbytes):
                    committed = self._prefixes.insert(
                        pin,
                        restore.first,
                        block_hashes[:end],
                        landing.tokens[restore.known * size :],
                        restore.segment(restore.blocks, size),
                        own,
                    )
                if committed.refused is not None:
                    break
        finally:
            for restore in restores:
                self.leave(restore)

    # ---- writing

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
            if not (self.has_states and pending.ended):  # a checkpoint lies behind that record
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
        self.sweep()
        if self.tier.is_off:
            self.forget()
        if self._pending and self.tier.has_room(self._most_record_bytes):
            self._offer(self._pending[0])
            return True
        if self._turns and not self._pending and self.tier.has_room(self._state_bytes):
            self._offer_states(self._turns.popleft())
            return True
        return False

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

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write pending records as long as there is time, and close the tier."""
        until = time.monotonic() + timeout_seconds
        while self.has_pending and time.monotonic() < until:
            if not self.offer_next():
                self.tier.wait(LOOK_SECONDS)
        self.forget()
        self.tier.close(max(1.0, until - time.monotonic()))
        for restore in list(self._restores):
            self.leave(restore)
        if not self._left:  # else the disk hangs, and its thread holds what it reads into
            self._buffers.release()

    # ---- parts

    def _is_short(self, block_hashes: Sequence[bytes]) -> bool:
        """Tell whether a chain is raw in memory, though tiers hold its blocks coded."""
        return len(block_hashes) < self._forms.least_blocks

    def _is_dear(self) -> bool:
        """Tell whether computing a record takes so long that it is written after its first use."""
        seconds = self.read_pace.seconds(self._most_record_bytes)
        return self._prefill_seconds(self._spans.blocks) > WORTH_WRITING * seconds

    def _prefill_seconds(self, blocks: int) -> float:
        return self.prefill_rate.prefill_seconds(blocks * self._prefixes.block_size)

    def _nbytes(self, first: int, stop: int) -> int:
        """Return the bytes of the blocks first..stop-1 in files."""
        tokens = (stop - first) * self._prefixes.block_size
        return self._forms.nbytes(first, stop) + TOKEN_BYTES * tokens

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
        self.tier.offer(
            Record(
                key=block_hashes[stop - 1],
                parent=block_hashes[first - 1] if first else pending.root,
                depth=first,
                arrays=arrays,
                blocks=stop - first,
                replaces=() if self.has_states else block_hashes[first : stop - 1],
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
                self.tier.offer(
                    Record(
                        key=checkpoint_hash(block_hashes[-1]),
                        parent=block_hashes[-1],
                        depth=len(block_hashes),
                        arrays=host_states(checkpoint.states),
                    )
                )

    def _abandon(self, pending: _Pending) -> None:
        self._dropped += len(pending.block_hashes) - pending.first
        self._drop(pending)

    def _drop(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        self._pending_keys -= len(pending.block_hashes)
