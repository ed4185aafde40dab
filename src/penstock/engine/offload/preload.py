"""Preloading: restores the most valuable chains of a cold tier into free memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from typing import Protocol

from penstock.engine.offload.engine_tier import EngineTier, Restore
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.ledger import Kind, Reservation
from penstock.prefix.checkpoints import resume
from penstock.prefix.node import Match, Node
from penstock.prefix.pin import Pin
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.host import RestoreBuffer

PRELOAD_SECONDS = 60.0
"""Timeout of the restore of a chain."""


class Capture(Protocol):
    def __call__(
        self, path: Sequence[Node[Segment]], position: int, state: RecurrentState, *, turn_end: bool
    ) -> None: ...


class Preloader:
    """Restores the most valuable chains of a tier into free memory, evicting nothing.

    With recurrent layers, a chain ends at its last checkpoint, which is restored, too.
    """

    def __init__(
        self,
        tier: EngineTier,
        prefixes: Prefixes[Segment],
        capture: Capture,
    ) -> None:
        self._tier = tier
        self._prefixes = prefixes
        self._forms = tier.forms
        self._capture = capture

    def run(self) -> int:
        ledger, before = self._prefixes.ledger, self._prefixes.tree.tokens
        none: list[list[bytes]] = []
        chains = self._tier.tier.call(lambda store: store.chains(ledger.free_bytes), none)
        for block_hashes in chains.result(PRELOAD_SECONDS):
            if self._tier.has_states:
                resumable = self._tier.held(block_hashes).result(PRELOAD_SECONDS)
                block_hashes = block_hashes[:resumable]
            self._read(block_hashes)
        return self._prefixes.tree.tokens - before

    def _read(self, block_hashes: Sequence[bytes]) -> None:
        """Restore the part of a chain that is missing in the tree, if all of it fits."""
        match, ledger = self._prefixes.match(block_hashes), self._prefixes.ledger
        first = match.tokens // self._prefixes.block_size
        missing = first < len(block_hashes)
        if not missing and not (self._tier.has_states and block_hashes):
            return
        if self._needed_bytes(block_hashes, match) > ledger.free_bytes:
            return
        with self._prefixes.pin(match) as pin:
            if missing:
                nbytes = self._forms.nbytes(first, len(block_hashes))
                with ledger.reserve(Kind.TAILS, nbytes) as reservation:
                    self._read_blocks(block_hashes, pin, first, reservation)
            if self._tier.has_states:
                self._read_states(block_hashes, pin)

    def _needed_bytes(self, block_hashes: Sequence[bytes], match: Match[Segment]) -> int:
        first = match.tokens // self._prefixes.block_size
        start, stop = self._forms.spans.start(first), len(block_hashes)
        nbytes = self._forms.nbytes(first, stop)
        room = nbytes + self._prefixes.index_bytes(stop - first) + 2 * self._tier.state_bytes
        if match.ends_inside:  # the node is split, which takes a copy of it
            room += match.path[-1].segment.nbytes
        if start < first:  # cached blocks of the record are read as well, and the others copied
            room += nbytes + 2 * self._forms.nbytes(start, first)
        return room

    def _read_blocks(
        self, block_hashes: Sequence[bytes], pin: Pin[Segment], first: int, reservation: Reservation
    ) -> None:
        restores = self._tier.begin(block_hashes, first, reservation)
        try:
            while restores:
                restores[0].answer.result(PRELOAD_SECONDS)
                if not self._insert(restores.pop(0), block_hashes, pin, reservation):
                    break
        finally:
            for restore in restores:
                self._tier.leave(restore)

    def _insert(
        self,
        restore: Restore,
        block_hashes: Sequence[bytes],
        pin: Pin[Segment],
        reservation: Reservation,
    ) -> bool:
        nbytes = restore.paid.nbytes if restore.cached_blocks else 0
        if self._tier.take(restore, reservation) < restore.blocks:
            return False
        assert isinstance(restore.buffer, RestoreBuffer)
        size = self._prefixes.block_size
        with self._prefixes.ledger.reserve(Kind.BUFFERS, nbytes):
            committed = self._prefixes.insert(
                pin,
                restore.first,
                block_hashes[: restore.first + restore.blocks],
                restore.buffer.tokens[restore.cached_blocks * size :],
                restore.segment(restore.blocks, size),
                reservation,
            )
        return committed.refused is None

    def _read_states(self, block_hashes: Sequence[bytes], pin: Pin[Segment]) -> None:
        end = len(block_hashes) * self._prefixes.block_size
        resume_tokens, _ = resume(pin.path, end)
        if resume_tokens == end or self._prefixes.match(block_hashes).tokens < end:
            return
        restore = self._tier.begin_states(block_hashes)
        if restore is None:
            return
        wait([restore.answer], PRELOAD_SECONDS)
        if not restore.answer.done():
            self._tier.leave(restore)
            return
        states = self._tier.take_states(restore)
        if states is not None:
            self._capture(pin.path, end, RecurrentState(states, exclusive=True), turn_end=True)
