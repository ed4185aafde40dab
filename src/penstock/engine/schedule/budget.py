"""Memory budget: reservations of the engine and its sequences in the ledger.

    open     ──> set_aside: weights, pool of tails, buffers of a step
    submit   ──> check_fits: would the prompt and one generated token fit alone?
        admit    ──> has_room: for the expected lengths of this and the running sequences
                                  reserve: KV of prompt and next tokens, buffers of a step
        decode   ──> grow: KV of the next tokens, when the reserved ones are used up
    end      ──> release

`costs` estimates the bytes; this module reserves them in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.model.prompt_logprobs import BlockTree, PromptLogprobs
from penstock.engine.schedule.answer_lengths import AnswerLengths
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.errors import NeverFits
from penstock.kv.segment import Segment
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Reservation
from penstock.memory.sizes import format_bytes
from penstock.prefix.pin import Pin

GROWTH_TOKENS = 32
"""Number of tokens for which bytes are reserved at a time during decoding."""


class Copying(Protocol):
    @property
    def nbytes(self) -> int: ...


class KVTree(BlockTree, Protocol):
    @property
    def fixed_bytes(self) -> int: ...
    @property
    def evictable_bytes(self) -> int: ...
    @property
    def pinned_relief_bytes(self) -> int: ...
    def index_bytes(self, blocks: int) -> int: ...
    def recount(self) -> dict[Kind, int]: ...


class ReservedKV(Protocol):
    reservation: Reservation | None
    """Bytes of KV outside the tree, computed or still to compute; None while waiting."""

    @property
    def pin(self) -> Pin[Segment] | None:
        """Pinned path in the prefix tree; None while waiting."""

    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens; None if not requested."""


class Admissible(Protocol):
    step_reservation: Reservation | None
    """Bytes that the sequence adds to a step's buffers; None while waiting."""
    reserved_tokens: int

    @property
    def kv(self) -> ReservedKV: ...
    @property
    def tokens(self) -> Items[int]: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def max_kv_tokens(self) -> int: ...
    @property
    def stuck(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedReservations:
    """Reservations that last as long as the engine."""

    weights: Reservation
    pool: Reservation
    step: Reservation
    """Bytes of a step's buffers, measured at startup."""
    chunk: Reservation
    """Bytes that a chunk of the longest admitted sequence adds to a step's buffers."""


class MemoryBudget:
    """Memory of an engine and its sequences. Not thread-safe: owned by the engine's thread.

    Args:
        prefixes: prefix tree, whose unpinned nodes are evicted to make room for sequences.
        copying: components that reserve bytes for copies of blocks and windows.
        token_bytes: bytes of one token's KV in all layers, key index included.
        draft_bytes: bytes of the draft model, excluding its KV.
    """

    def __init__(
        self,
        aside: FixedReservations,
        estimator: MemoryEstimator,
        prefixes: KVTree,
        *,
        copying: Items[Copying],
        token_bytes: int,
        draft_bytes: int = 0,
    ) -> None:
        self.token_bytes = token_bytes
        self.lengths = AnswerLengths()
        self.evict_grammars: Callable[[], int] = lambda: self._grammars.nbytes
        """Callback that evicts unused compiled grammars and returns the bytes of the others."""
        self._aside = aside
        self._estimator = estimator
        self._prefixes = prefixes
        self._ledger = prefixes.ledger
        self._copying = copying
        self._draft_bytes = draft_bytes
        self._prompts = prefixes.ledger.reserve(Kind.PROMPTS, 0)
        self._grammars = prefixes.ledger.reserve(Kind.GRAMMARS, 0)

    @property
    def weights_bytes(self) -> int:
        return self._aside.weights.nbytes

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's buffers, excluding the part that depends on sequence lengths."""
        return self._aside.step.nbytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes reserved whether or not any sequence runs."""
        aside = self._aside
        kinds = (aside.weights, aside.pool, aside.step, self._prompts, self._grammars)
        fixed = sum(kind.nbytes for kind in kinds) + self._prefixes.fixed_bytes
        return fixed + self._copies_bytes + self._draft_bytes

    @property
    def in_flight_tokens(self) -> int:
        """Maximum number of a sequence's tokens in memory that cannot be spilled yet."""
        return self._estimator.in_flight_tokens

    def check_fits(self, sequence: Admissible) -> None:
        """Raise NeverFits if a sequence could not get one more token even alone."""
        if self.fits_alone(sequence) or (self._evict_grammars() and self.fits_alone(sequence)):
            return
        fixed, limit, tokens = self.fixed_bytes, self._ledger.limit_bytes, len(sequence.tokens)
        logits = self._logits_bytes(sequence) + _score_bytes(sequence)
        needed = self._needed_bytes(tokens) + logits
        room, max_tokens = max(0, limit - fixed), self.most_tokens(logits)
        beside = f" with {format_bytes(logits)} of logits for its tokens" if logits else ""
        # Clients search for these phrases, and parse numbers without commas.
        raise NeverFits(
            f"prompt is too long: {tokens} tokens > {max(0, max_tokens - 1)} maximum. "
            f"This model's maximum context length is {max_tokens} tokens in this memory; "
            f"{tokens + 1} were requested ({tokens} in the prompt, 1 in the answer). "
            f"KV for {tokens + 1:,} tokens needs "
            f"{format_bytes(needed)}{beside}; the limit of {format_bytes(limit)} leaves "
            f"{format_bytes(room)} beside weights, tails and buffers of {format_bytes(fixed)}. "
            f"Lower max_kv_size, shorten the prompt, or raise memory_limit",
            needed,
            room,
            limit,
        )

    def fits_alone(self, sequence: Admissible) -> bool:
        room = self._ledger.limit_bytes - self.fixed_bytes
        needed = self._needed_bytes(len(sequence.tokens)) + self._logits_bytes(sequence)
        return needed + _score_bytes(sequence) <= room

    def most_tokens(self, logits_bytes: int = 0) -> int:
        """Return the maximum length of prompt and answer that fits alone; at most 2**31."""
        room = self._ledger.limit_bytes - self.fixed_bytes - logits_bytes
        fits, over = 0, 2**31
        while over - fits > 1:
            tokens = (fits + over) // 2
            if self._needed_bytes(tokens - 1) <= room:
                fits = tokens
            else:
                over = tokens
        return fits

    def missing_bytes(self, sequence: Admissible) -> int:
        """Return the bytes that a waiting sequence would lack after all cold KV is evicted.

        Only other models that share the ledger can hold them.
        """
        needed = self._needed_bytes(len(sequence.tokens) + GROWTH_TOKENS)
        needed += self._logits_bytes(sequence) + _score_bytes(sequence) - self._aside.chunk.nbytes
        return max(0, needed - self._ledger.room_bytes - self._prefixes.evictable_bytes)

    def check_limit(self, limit_bytes: int) -> None:
        fixed = self.fixed_bytes
        if fixed > limit_bytes:
            raise NeverFits(
                f"weights, tails, buffers and index take {format_bytes(fixed)}; "
                f"the limit cannot be {format_bytes(limit_bytes)}",
                fixed,
                limit_bytes,
                limit_bytes,
            )

    def has_room(self, sequence: Admissible, placed: Iterable[Admissible]) -> bool:
        """Return whether the expected bytes of a sequence fit together with the admitted ones'.

        Evictable bytes count as free. A sequence that is alone always has room: it may grow until
        memory is full.
        """
        placed = list(placed)
        if not placed:
            return True
        room = self._ledger.free_bytes + self._prefixes.evictable_bytes
        needed = self._expected_bytes(sequence, sequence.kv.num_cached_tokens, placed)
        return needed <= room or needed <= room + self._prefixes.pinned_relief_bytes

    def would_fit(
        self,
        sequence: Admissible,
        num_cached_tokens: int,
        others: Iterable[Admissible],
        staying: Items[Admissible],
        *,
        evict: bool = True,
    ) -> bool:
        """Return whether a sequence would fit if `others` were preempted.

        Args:
            sequence: waiting sequence.
            num_cached_tokens: number of its tokens that it would read from the cache.
            others: admitted sequences to preempt.
            staying: admitted sequences to keep.
            evict: whether unpinned nodes, including those of `others`, would be evicted as well.
        """
        freed = self._ledger.free_bytes + (self._prefixes.evictable_bytes if evict else 0)
        for other in others:
            reservations = (other.kv.reservation, other.step_reservation)
            freed += sum(reserved.nbytes for reserved in reservations if reserved is not None)
            path = other.kv.pin.path if evict and other.kv.pin is not None else ()
            freed += sum(n.segment.nbytes + n.index_bytes for n in path if n.pins == 1)
        if staying:
            return self._expected_bytes(sequence, num_cached_tokens, staying) <= freed
        tokens, cached = len(sequence.tokens), num_cached_tokens * self.token_bytes
        needed = self._alone_bytes(tokens) + self._logits_bytes(sequence) + _score_bytes(sequence)
        return needed - self._aside.chunk.nbytes - cached <= freed

    def check(
        self,
        sequences: Iterable[Admissible],
        tails: Tails,
        *,
        weights: int,
        draft: int,
        reading: int,
        scored: int,
        features: int,
    ) -> None:
        """Raise AssertionError if the ledger differs from a recount of the bytes in use."""
        reserved = [(s.kv.reservation, s.step_reservation) for s in sequences]
        promised = sum(kv.nbytes for kv, _ in reserved if kv is not None)
        steps = sum(step.nbytes for _, step in reserved if step is not None)
        buffers = self._aside.step.nbytes + steps + self._aside.chunk.nbytes
        self._ledger.check(
            {
                **self._prefixes.recount(),
                Kind.WEIGHTS: weights,
                Kind.DRAFT: draft,
                Kind.TAILS: self._aside.pool.nbytes + promised + reading,
                Kind.BUFFERS: buffers + self._copies_bytes,
                Kind.PROMPTS: self._prompts.nbytes + scored,
                Kind.GRAMMARS: self._grammars.nbytes,
                Kind.FEATURES: features,
            }
        )
        pool = self._aside.pool.nbytes
        if tails.nbytes not in (0, pool):
            raise AssertionError(f"tails of {tails.nbytes} bytes, {pool} counted")

    def set_aside_prompts(self, nbytes: int) -> int:
        """Reserve up to `nbytes` for prompts, at most half of the free bytes; return the number."""
        self._prefixes.make_room(max(0, nbytes - self._prompts.nbytes))
        room = self._ledger.free_bytes + self._prompts.nbytes
        self._prompts.resize(min(nbytes, room // 2))
        return self._prompts.nbytes

    def reserve_grammars(self, nbytes: int) -> None:
        """Reserve memory for all compiled grammars; raises LedgerFull or NeverFits."""
        self._prefixes.make_room(max(0, nbytes - self._grammars.nbytes))
        self._grammars.resize(nbytes)

    def reserve(self, sequence: Admissible) -> bool:
        """Reserve bytes for uncached KV and the next tokens; False, with no effect, if full."""
        sequence.kv.reservation = self._ledger.reserve(Kind.TAILS, 0)
        sequence.step_reservation = self._ledger.reserve(Kind.BUFFERS, 0)
        sequence.reserved_tokens = 0
        if self.grow(sequence):
            return True
        sequence.kv.reservation.release()
        sequence.step_reservation.release()
        sequence.kv.reservation = sequence.step_reservation = None
        return False

    def grow(self, sequence: Admissible) -> bool:
        """Reserve bytes for the next few tokens, or all if stuck; False if not even one fits."""
        tokens, limit = len(sequence.tokens), sequence.max_kv_tokens
        ahead = [min(tokens - 1 + more, limit) for more in (GROWTH_TOKENS, 1)]
        if sequence.stuck:
            alone = self.most_tokens(self._logits_bytes(sequence) + _score_bytes(sequence))
            ahead = [max(tokens, min(limit, alone - 1))]
        return any(self._reserve_up_to(sequence, end) for end in ahead)

    def reserve_anew(self, sequence: Admissible) -> bool:
        """Adjust the KV reservation to the cached tokens; False, with no effect, if full."""
        assert sequence.kv.reservation is not None
        cached = sequence.kv.num_cached_tokens
        more = (
            self._estimator.sequence_bytes(sequence.reserved_tokens, cached)
            - sequence.kv.reservation.nbytes
        )
        if more > 0 and not self._make_room(more):
            return False
        sequence.kv.reservation.resize(sequence.kv.reservation.nbytes + more)
        return True

    def top_up(self, sequence: Admissible) -> bool:
        """Refill a reservation after tokens were committed or spilled; False if out of memory."""
        reservation = sequence.kv.reservation
        assert reservation is not None
        tokens = max(0, sequence.reserved_tokens - sequence.kv.num_cached_tokens)
        more = max(0, self._estimator.next_bytes(tokens) - reservation.nbytes)
        if not self._make_room(more):
            return False
        reservation.resize(reservation.nbytes + more)
        return True

    def release(self, sequence: Admissible, sequences: Iterable[Admissible]) -> None:
        for reservation in (sequence.kv.reservation, sequence.step_reservation):
            if reservation is not None:
                reservation.release()
        sequence.kv.reservation = sequence.step_reservation = None
        sequence.reserved_tokens = 0
        admitted = [other for other in sequences if other.kv.reservation is not None]
        chunks = (self._chunk_bytes(other, other.reserved_tokens) for other in admitted)
        self._aside.chunk.resize(max(chunks, default=0))

    def close(self) -> None:
        self._aside.pool.resize(0)
        self._aside.step.resize(0)
        self._prompts.resize(0)
        self._grammars.resize(0)

    def _make_room(self, nbytes: int) -> bool:
        """Evict cold nodes, then unused grammars; False if that does not free enough."""
        if self._prefixes.make_room(nbytes):
            return True
        return self._evict_grammars() and self._prefixes.make_room(nbytes)

    def _evict_grammars(self) -> bool:
        """Evict unused compiled grammars; False if there are none."""
        before = self._grammars.nbytes
        if before:
            self._grammars.resize(min(before, self.evict_grammars()))
        return self._grammars.nbytes < before

    def _reserve_up_to(self, sequence: Admissible, tokens: int) -> bool:
        """Reserve KV for the first `tokens` tokens; False, with no effect, if out of memory."""
        reservation, step, chunk = (
            sequence.kv.reservation,
            sequence.step_reservation,
            self._aside.chunk,
        )
        assert reservation is not None and step is not None
        estimator, before = self._estimator, sequence.reserved_tokens
        cached = sequence.kv.num_cached_tokens
        kv = needed = estimator.sequence_bytes(tokens, cached)
        kv -= estimator.sequence_bytes(before, cached) if before else 0
        # With spilling, the node of each decoded block is paid from the reservation.
        kv = max(kv, needed - reservation.nbytes)
        scores = estimator.decode_bytes(tokens) + _score_bytes(sequence) - step.nbytes
        reading = max(0, self._chunk_bytes(sequence, tokens) - chunk.nbytes)
        if not self._make_room(kv + scores + reading):
            return False
        reservation.resize(reservation.nbytes + kv)
        step.resize(step.nbytes + scores)
        chunk.resize(chunk.nbytes + reading)
        sequence.reserved_tokens = tokens
        return True

    def _expected_tokens(self, sequence: Admissible) -> int:
        """Return the expected number of a sequence's KV tokens when it ends."""
        rest = self.lengths.rest_tokens(sequence.generated_tokens)
        tokens = min(len(sequence.tokens) - 1 + rest, sequence.max_kv_tokens)
        return max(tokens, sequence.reserved_tokens)

    def _expected_bytes(
        self, sequence: Admissible, num_cached_tokens: int, placed: Iterable[Admissible]
    ) -> int:
        """Return the expected bytes of a new sequence plus the expected growth of placed ones."""
        estimator, tokens = self._estimator, self._expected_tokens(sequence)
        needed = estimator.sequence_bytes(tokens, num_cached_tokens)
        needed += estimator.decode_bytes(tokens) + _score_bytes(sequence)
        chunk = self._chunk_bytes(sequence, tokens)
        for other in placed:
            expected, reserved = self._expected_tokens(other), other.reserved_tokens
            needed += estimator.sequence_bytes(expected) - estimator.sequence_bytes(reserved)
            needed += estimator.decode_bytes(expected) - estimator.decode_bytes(reserved)
            chunk = max(chunk, self._chunk_bytes(other, expected))
        return needed + max(0, chunk - self._aside.chunk.nbytes)

    def _logits_bytes(self, sequence: Admissible) -> int:
        scores = sequence.kv.prompt_logprobs
        return 0 if scores is None else self._estimator.logits_bytes_of(scores)

    def _chunk_bytes(self, sequence: Admissible, tokens: int) -> int:
        """Return the bytes that a sequence of `tokens` tokens adds to a step that prefills it."""
        return self._estimator.prefill_bytes(tokens) + self._logits_bytes(sequence)

    def _needed_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` KV tokens and of its nodes in the tree."""
        blocks = self._estimator.shared_tokens(tokens) // self._prefixes.block_size
        return self._alone_bytes(tokens) + self._prefixes.index_bytes(blocks + 1)

    def _alone_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` KV tokens, excluding its nodes in the tree."""
        estimator = self._estimator
        step = estimator.decode_bytes(tokens) + estimator.prefill_bytes(tokens)
        return estimator.sequence_bytes(tokens) + step

    @property
    def _copies_bytes(self) -> int:
        """Bytes reserved for copies of blocks and windows."""
        return sum(part.nbytes for part in self._copying)


def _score_bytes(sequence: Admissible) -> int:
    scores = sequence.kv.prompt_logprobs
    return 0 if scores is None else scores.nbytes
