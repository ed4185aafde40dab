"""What is read back from cold tiers for a sequence in a place, instead of being computed.

    prefilling ──> begin: a tier has more of the chain, and reading it is quicker
    restoring  ──> take: what has come hangs in the tree; what takes too long is computed
               ──> all is there, or nobody waits for it any more: prefilling again

Of a model with states the blocks come first and the checkpoint behind them last: until it is there
a sequence has no place from which it could go on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from penstock.engine.offload.engine_tier import EngineTier, Restore
from penstock.engine.offload.tier_group import Cold
from penstock.engine.schedule.admission import Places
from penstock.engine.schedule.budget import Room
from penstock.engine.schedule.committing import Sealing
from penstock.engine.schedule.paths import Paths
from penstock.engine.schedule.scheduler import Scheduler, State
from penstock.engine.schedule.sequence import Sequence
from penstock.kv.segment import Segment
from penstock.ledger import Kind
from penstock.prefix.prefixes import Prefixes
from penstock.tiers.host import Landing, StateLanding

ASK_SECONDS = 0.5
"""How long a prompt waits to be told how much of it is on the disk."""


class Restoring:
    """Reads from cold tiers for sequences. Not thread-safe: the engine's thread.

    Args:
        cold: the tiers.
        prefixes: what is read becomes part of.
        scheduler: says who has a place, and is told who waits for the disk.
        places: of the sequences.
        paths: of the sequences.
        sealing: hangs into the tree what has come.
        room: for what has to be computed after all.
        clock: seconds, by which patience ends.
    """

    def __init__(
        self,
        cold: Cold,
        prefixes: Prefixes[Segment],
        scheduler: Scheduler,
        *,
        places: Places,
        paths: Paths,
        sealing: Sealing,
        room: Room,
        clock: Callable[[], float],
    ) -> None:
        self._cold = cold
        self._prefixes = prefixes
        self._scheduler = scheduler
        self._places = places
        self._paths = paths
        self._sealing = sealing
        self._room = room
        self._clock = clock
        self._size = prefixes.block_size

    def on_disk(self, keys: Items[bytes]) -> int | None:
        """Wait to be told how many first tokens of a chain are in a tier at most; None if that
        takes too long."""
        return self._cold.on_disk(keys, ASK_SECONDS)

    def begin(self) -> None:
        """Have read from the disk what would take longer to compute."""
        restored = self._scheduler.restoring_keys()
        for job in self._scheduler.placed():
            sequence = self._places.sequences[job.id]
            answer = sequence.on_disk
            if answer is None or job.next_key in restored:
                continue
            if not answer.done():
                if job.state is State.PREFILLING:
                    self._scheduler.act(job.id, "fetch")
                    sequence.patient_until = self._clock() + ASK_SECONDS
                continue
            sequence.on_disk = None  # asked once
            found = answer.found()
            held = self._paths.matched(sequence.keys) // self._size
            root, cut = self._prefixes.root(sequence.request.salt), sequence.cut // self._size
            self._cold.note_held(answer, sequence.keys[:held], root, cut)
            if job.state is State.PREFILLING and self._begin(sequence, found):
                restored |= self._scheduler.restoring_keys()

    def take(self) -> None:
        """Take in what was read from the disk, and compute what takes too long to come."""
        for job in self._scheduler.jobs(State.RESTORING):
            sequence = self._places.sequences[job.id]
            while sequence.restores and sequence.restores[0].answer.done():
                self._take_in(sequence, sequence.restores.pop(0))
            impatient = self._clock() > sequence.patient_until
            if sequence.restores and impatient:
                self._lose_patience(sequence)
            asked = sequence.on_disk
            if asked is not None and impatient:
                asked = sequence.on_disk = None
            if not sequence.restores and (asked is None or asked.done()):
                self._scheduler.act(sequence.id, "fetched")
                if sequence.went_on_at is None or self._go_on(sequence):
                    self._places.report(sequence, 0)

    # ---- parts

    def _begin(self, sequence: Sequence, found: dict[EngineTier, int]) -> bool:
        """Have the blocks of a chain read that a cold tier has, if that is worth it."""
        done = sequence.cut // self._size
        if self._paths.by_block:  # the last token's block is computed
            most = self._paths.readable(sequence) // self._size
            found = {tier: min(blocks, most) for tier, blocks in found.items()}
        fastest = None if sequence.runs else self._cold.fastest(found, done)
        if fastest is None:
            return False
        assert sequence.own is not None
        tier, on_disk = fastest
        keys, states = sequence.keys[:on_disk], None
        sequence.patient_until = self._clock() + tier.patience_seconds(done, on_disk)
        if tier.has_states:
            states = tier.begin_states(keys)
            if states is None:
                return False
            sequence.went_on_at = sequence.cut
            done = self._paths.follow(sequence, keys)  # those need the states alone
        sequence.restores = tier.begin(keys, done, sequence.own)
        if states is not None:
            sequence.restores.append(states)
        self._scheduler.act(sequence.id, "fetch")
        return True

    def _go_on(self, sequence: Sequence) -> bool:
        """Go on at the deepest place, of all that was read, with states; False if there is no
        room to compute what is behind it: the sequence is parked then."""
        assert sequence.pin is not None
        before, sequence.went_on_at = sequence.went_on_at, None
        most = min(sequence.cut, self._paths.readable(sequence))
        sequence.cut, sequence.live = self._paths.resume(sequence.pin.path, most)
        if not self._room.reserve_anew(sequence):
            self._places.park(sequence)
            return False
        self._places.count_hit(sequence, sequence.cut - (before or 0), restored=True)
        return True

    def _take_in(self, sequence: Sequence, restore: Restore) -> None:
        """Hang restored blocks into the tree; if some are missing, nothing behind them is read."""
        assert sequence.own is not None
        if isinstance(restore.landing, StateLanding):
            self._take_in_states(sequence, restore)
            return
        start, size = sequence.cut, self._size
        nbytes = restore.paid.nbytes
        blocks = self._cold.take(restore, sequence.own)
        if restore.first * size != start:  # those in front of them are missing
            return
        if blocks == restore.blocks:
            self._sealing.insert(sequence, restore.landing.segment())
        elif blocks and self._prefixes.make_room(nbytes):
            with self._prefixes.ledger.reserve(Kind.BUFFERS, nbytes):
                self._sealing.insert(sequence, restore.landing.segment().split(blocks * size)[0])
        # The last token of a prompt is computed in any case, for its logits.
        sequence.cut = min(sequence.cut, self._paths.readable(sequence))
        if sequence.went_on_at is None:
            self._places.count_hit(sequence, sequence.cut - start, restored=True)
        self._places.report(sequence, 0)
        if sequence.cut < min(start + restore.blocks * size, self._paths.readable(sequence)):
            sequence.restores = self._cold.cancel(sequence.restores, sequence.own)

    def _take_in_states(self, sequence: Sequence, restore: Restore) -> None:
        """File a restored checkpoint, if all the blocks in front of it are there."""
        states = self._cold.take_states(restore)
        if states is not None:
            self._sealing.file(sequence, restore.first * self._size, states)

    def _lose_patience(self, sequence: Sequence) -> None:
        """Compute what the disk has not brought, if there is room for both."""
        assert sequence.own is not None
        sequence.restores = self._cold.cancel(sequence.restores, sequence.own)
        nbytes = sum(
            restore.paid.nbytes
            for restore in sequence.restores
            if isinstance(restore.landing, Landing)
        )
        if self._prefixes.make_room(nbytes):
            self._cold.leave(sequence.restores)
            sequence.restores = []
            sequence.own.resize(sequence.own.nbytes + nbytes)
