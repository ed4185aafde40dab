"""Reservations of an engine's bytes, and the room that they leave for sequences.

    open     ──> set_aside: weights, pool of tails, buffers of a step
    submit   ──> check_fits: could it run if it were alone?
    admit    ──> reserve: the bytes that it may ever hold, and those it adds to a step; or it waits
    end      ──> release

The module `costs` estimates the bytes; this one reserves them in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

from mlx.utils import tree_flatten

from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.largest_steps import check_largest_steps
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import LedgerFull, NeverFits
from penstock.kv.segment import Segment
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory import format_bytes
from penstock.prefix.prefixes import Prefixes

TAIL_TOKENS = 8
"""Least columns of a tail. More are copied out less often, and leave fewer parts to be read; fewer
waste less."""
MOST_TAIL_TOKENS = 32
"""Most columns of a tail."""
POOL_TOKENS = 64
"""Columns of all tails together while a batch has few places: eight tails of the least length."""


class Copying(Protocol):
    """A part of an engine that sets bytes aside for what it copies."""

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedReservations:
    """Reservations that last as long as an engine is open."""

    weights: Reservation
    """Bytes of the weights."""
    pool: Reservation
    """Bytes of the pool of tails."""
    step: Reservation
    """Bytes of a step's buffers, as measured at the start."""
    chunk: Reservation
    """Bytes that a chunk of the longest admitted sequence adds to a step's buffers."""


class MemoryBudget:
    """The bytes of an engine and of its sequences. Not thread-safe: the engine's thread.

    Args:
        aside: reservations from the time when the engine was made.
        estimator: estimates the bytes of sequences and steps.
        prefixes: the tree; its unpinned nodes are evicted to make room for sequences.
        copying: parts that set bytes aside for blocks that are written or encoded, and for windows
            that are copied.
        token_bytes: bytes of one token's KV in all layers.
    """

    def __init__(
        self,
        aside: FixedReservations,
        estimator: MemoryEstimator,
        prefixes: Prefixes[Segment],
        *,
        copying: Items[Copying],
        token_bytes: int,
    ) -> None:
        self.token_bytes = token_bytes
        self._aside = aside
        self._estimator = estimator
        self._prefixes = prefixes
        self._ledger = prefixes.ledger
        self._copying = copying
        self._prompts = prefixes.ledger.reserve(Kind.PROMPTS, 0)

    # ---- questions

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights."""
        return self._aside.weights.nbytes

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's buffers, besides those of long sequences."""
        return self._aside.step.nbytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are set aside, whatever sequences come."""
        kinds = (self._aside.weights, self._aside.pool, self._aside.step, self._prompts)
        fixed = sum(kind.nbytes for kind in kinds) + self._prefixes.fixed_bytes
        return fixed + self._copies_bytes

    def check_fits(self, sequence: Sequence) -> None:
        """Raise NeverFits if a sequence could not run even if it were alone."""
        fixed, limit = self.fixed_bytes, self._ledger.limit_bytes
        needed = self._needed_bytes(sequence.max_kv_tokens, len(sequence.block_hashes))
        if fixed + needed <= limit:
            return
        room, most = max(0, limit - fixed), self.most_tokens()
        prompt, tokens = sequence.prompt_tokens, sequence.max_kv_tokens + 1
        # Clients look for these words, and for numbers without commas.
        long = f"prompt is too long: {prompt} tokens > {max(0, most - 1)} maximum. "
        raise NeverFits(
            f"{long if prompt >= most else ''}This model's maximum context length is {most} tokens "
            f"in this memory; {tokens} were asked for ({prompt} in the prompt, "
            f"{tokens - prompt} in the answer). KV for {tokens:,} tokens needs "
            f"{format_bytes(needed)}; the limit of {format_bytes(limit)} leaves "
            f"{format_bytes(room)} beside weights, tails and buffers of {format_bytes(fixed)}. "
            f"Lower max_tokens or max_kv_size, shorten the prompt, or raise memory_limit",
            needed,
            room,
            limit,
        )

    def most_tokens(self) -> int:
        """Return how many tokens a prompt and its answer can have together, alone; up to 2**31."""
        room = self._ledger.limit_bytes - self.fixed_bytes
        fits, over = 0, 2**31
        while over - fits > 1:
            tokens = (fits + over) // 2
            blocks = self._estimator.shared_tokens(tokens) // self._prefixes.block_size
            if self._needed_bytes(tokens - 1, blocks) <= room:
                fits = tokens
            else:
                over = tokens
        return fits

    def check_limit(self, limit_bytes: int) -> None:
        """Raise NeverFits if the bytes that are set aside are over a limit."""
        fixed = self.fixed_bytes
        if fixed > limit_bytes:
            raise NeverFits(
                f"weights, tails, buffers and index take {format_bytes(fixed)}; "
                f"the limit cannot be {format_bytes(limit_bytes)}",
                fixed,
                limit_bytes,
                limit_bytes,
            )

    def would_fit(
        self, sequence: Sequence, num_cached_tokens: int, others: Iterable[Sequence]
    ) -> bool:
        """Tell whether a sequence would fit if all of the others were preempted.

        Args:
            sequence: not admitted yet.
            num_cached_tokens: tokens of it that the tree holds.
            others: admitted ones.
        """
        needed = self._estimator.sequence_bytes(
            sequence.max_kv_tokens
        ) + self._estimator.decode_bytes(sequence.max_kv_tokens)
        needed += max(
            0, self._estimator.prefill_bytes(sequence.max_kv_tokens) - self._aside.chunk.nbytes
        )
        freed = self._ledger.free_bytes + self._prefixes.evictable_bytes
        for other in others:
            held = [
                r.nbytes for r in (other.kv.reservation, other.step_reservation) if r is not None
            ]
            path = other.kv.pin.path if other.kv.pin is not None else ()
            freed += sum(held) + sum(n.segment.nbytes + n.index_bytes for n in path if n.pins == 1)
        return needed - num_cached_tokens * self.token_bytes <= freed

    def check(
        self, sequences: Iterable[Sequence], tails: Tails, *, weights: int, reading: int
    ) -> None:
        """Raise AssertionError if the bytes in the ledger are not those that are in use.

        Args:
            sequences: all that are open.
            tails: the pool.
            weights: bytes of the model's, counted again.
            reading: bytes of what is being read from cold tiers.
        """
        reserved = [(s.kv.reservation, s.step_reservation) for s in sequences]
        promised = sum(own.nbytes for own, _ in reserved if own is not None)
        steps = sum(step.nbytes for _, step in reserved if step is not None)
        buffers = self._aside.step.nbytes + steps + self._aside.chunk.nbytes
        self._ledger.check(
            {
                **self._prefixes.recount(),
                Kind.WEIGHTS: weights,
                Kind.TAILS: self._aside.pool.nbytes + promised + reading,
                Kind.BUFFERS: buffers + self._copies_bytes,
                Kind.PROMPTS: self._prompts.nbytes,
            }
        )
        pool = self._aside.pool.nbytes
        if tails.nbytes not in (0, pool):
            raise AssertionError(f"tails of {tails.nbytes} bytes, {pool} counted")

    # ---- acts

    def set_aside_prompts(self, nbytes: int) -> int:
        """Set bytes aside for texts and tokens of prompts, and return their number.

        At most half of the free bytes are set aside.
        """
        self._prefixes.make_room(max(0, nbytes - self._prompts.nbytes))
        room = self._ledger.free_bytes + self._prompts.nbytes
        self._prompts.resize(min(nbytes, room // 2))
        return self._prompts.nbytes

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve a sequence's KV behind its cached tokens, and the bytes that it adds to a step.

        Returns:
            False, with nothing reserved, if there is no room.
        """
        most = sequence.max_kv_tokens
        try:
            own = self._prefixes.reserve(
                Kind.TAILS, self._estimator.sequence_bytes(most, sequence.kv.num_cached_tokens)
            )
        except (LedgerFull, NeverFits):
            return False
        try:
            step = self._prefixes.reserve(Kind.BUFFERS, self._estimator.decode_bytes(most))
        except (LedgerFull, NeverFits):
            own.release()
            return False
        chunk = self._aside.chunk
        more = self._estimator.prefill_bytes(most) - chunk.nbytes
        if more > 0 and not self._prefixes.make_room(more):
            step.release()
            own.release()
            return False
        chunk.resize(chunk.nbytes + max(0, more))
        sequence.kv.reservation, sequence.step_reservation = own, step
        return True

    def reserve_anew(self, sequence: Sequence) -> bool:
        """Reserve a sequence's KV anew, after its cached tokens have changed.

        Returns:
            False, with nothing changed, if there is no room.
        """
        assert sequence.kv.reservation is not None
        more = (
            self._estimator.sequence_bytes(sequence.max_kv_tokens, sequence.kv.num_cached_tokens)
            - sequence.kv.reservation.nbytes
        )
        if more > 0 and not self._prefixes.make_room(more):
            return False
        sequence.kv.reservation.resize(sequence.kv.reservation.nbytes + more)
        return True

    def release(self, sequence: Sequence, sequences: Iterable[Sequence]) -> None:
        """Release a sequence's reservations.

        The chunk's reservation shrinks to the need of the longest sequence that remains.
        """
        for reservation in (sequence.kv.reservation, sequence.step_reservation):
            if reservation is not None:
                reservation.release()
        sequence.kv.reservation = sequence.step_reservation = None
        admitted = [other for other in sequences if other.kv.reservation is not None]
        chunks = (self._estimator.prefill_bytes(other.max_kv_tokens) for other in admitted)
        self._aside.chunk.resize(max(chunks, default=0))

    def close(self) -> None:
        """Give back the pool and the buffers of a step; the weights stay counted."""
        self._aside.pool.resize(0)
        self._aside.step.resize(0)
        self._prompts.resize(0)

    # ---- parts

    def _needed_bytes(self, tokens: int, blocks: int) -> int:
        """Return the bytes that a sequence of so many KV tokens and blocks takes alone."""
        estimator = self._estimator
        step = estimator.decode_bytes(tokens) + estimator.prefill_bytes(tokens)
        return estimator.sequence_bytes(tokens) + step + self._prefixes.index_bytes(blocks + 1)

    @property
    def _copies_bytes(self) -> int:
        """Bytes set aside for blocks that are written or encoded, and for copies of windows."""
        return sum(part.nbytes for part in self._copying)


def reserve_fixed(
    weights: Reservation,
    ledger: Ledger,
    limits: EngineSettings,
    runner: Runner,
    estimator: MemoryEstimator,
    group: ProcessGroup,
) -> tuple[FixedReservations, Tails]:
    """Reserve and make the pool of tails, then measure a step and reserve its bytes.

    Of a group, the rank whose step takes most counts.

    Raises:
        LedgerFull, NeverFits: there is no room for both beside the weights.
        StepTooLarge: there is no room even for a fraction of them; nothing was reserved.
    """
    slots, block_size = limits.max_batch_size, limits.block_size
    columns = min(MOST_TAIL_TOKENS, POOL_TOKENS // slots, block_size // 2)
    columns = min(max(TAIL_TOKENS, columns), block_size)
    check_largest_steps(ledger, limits, runner, group, columns)
    pool = ledger.reserve(Kind.TAILS, slots * columns * runner.token_bytes)
    tails = Tails(slots, columns, runner.shapes)
    step = ledger.reserve(Kind.BUFFERS, group.most(estimator.measure_step(tails)))
    tails.drop()  # until a sequence decodes
    chunk = ledger.reserve(Kind.BUFFERS, 0)
    return FixedReservations(weights=weights, pool=pool, step=step, chunk=chunk), tails


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights."""
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in arrays)
