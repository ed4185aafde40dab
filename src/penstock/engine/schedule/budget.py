"""Reservations of an engine's bytes, and the room that they leave for sequences.

    open     ──> set_aside: weights, pool of tails, buffers of a step
    submit   ──> check_fits: could its prompt and one token of an answer run if it were alone?
    admit    ──> has_room: for as many tokens as are expected of it and of the running ones
                 reserve: the KV of its prompt and of the next tokens, and the bytes of a step
    decode   ──> grow: the next tokens, when those are used up
    end      ──> release

The module `costs` estimates the bytes; this one reserves them in the ledger.
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
"""Tokens of an answer whose bytes are reserved together, before they are decoded."""


class Copying(Protocol):
    """A part of an engine that sets bytes aside for its copies."""

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""


class KVTree(BlockTree, Protocol):
    """The part of `Prefixes` that the budget uses: bytes that the tree takes and can free."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are held with an empty tree, too."""

    @property
    def evictable_bytes(self) -> int:
        """Bytes that evicting all unpinned nodes would free."""

    @property
    def pinned_relief_bytes(self) -> int:
        """Bytes that can be freed of pinned nodes."""

    def index_bytes(self, blocks: int) -> int:
        """Return the index bytes of a node of `blocks` blocks."""

    def recount(self) -> dict[Kind, int]:
        """Return the bytes in use, counted again."""


class ReservedKV(Protocol):
    """The part of `SequenceKV` that the budget uses."""

    reservation: Reservation | None
    """Bytes of its own tokens, computed or not; None without a place."""

    @property
    def pin(self) -> Pin[Segment] | None:
        """The pinned path; None without one."""

    @property
    def num_cached_tokens(self) -> int:
        """First tokens of the path that the sequence reads."""

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Scores of the prompt's tokens; None if they are not asked for."""


class Admissible(Protocol):
    """The part of `Sequence` that the budget uses."""

    step_reservation: Reservation | None
    """Bytes that its length adds to a step's buffers; None without a place."""
    reserved_tokens: int
    """Tokens for whose KV, and for whose step, bytes are reserved."""

    @property
    def kv(self) -> ReservedKV:
        """Keys and values of its tokens."""

    @property
    def tokens(self) -> Items[int]:
        """Prompt and answer so far."""

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the answer has so far."""

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens with KV that it can ever read."""

    @property
    def stuck(self) -> bool:
        """Whether all memory it may need is reserved at once."""


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
        token_bytes: bytes of one token's KV in all layers, and of the index of its keys.
        draft_bytes: bytes that a draft model takes before it reads anything.
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
        """Lengths of the answers so far, from which those to come are expected."""
        self.evict_grammars: Callable[[], int] = lambda: self._grammars.nbytes
        """Evicts compiled grammars that no answer follows, and returns the bytes of the others."""
        self._aside = aside
        self._estimator = estimator
        self._prefixes = prefixes
        self._ledger = prefixes.ledger
        self._copying = copying
        self._draft_bytes = draft_bytes
        self._prompts = prefixes.ledger.reserve(Kind.PROMPTS, 0)
        self._grammars = prefixes.ledger.reserve(Kind.GRAMMARS, 0)

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
        """Bytes that are set aside for any sequences."""
        aside = self._aside
        kinds = (aside.weights, aside.pool, aside.step, self._prompts, self._grammars)
        fixed = sum(kind.nbytes for kind in kinds) + self._prefixes.fixed_bytes
        return fixed + self._copies_bytes + self._draft_bytes

    @property
    def in_flight_tokens(self) -> int:
        """Tokens of a sequence that can be in memory before others of it leave it."""
        return self._estimator.in_flight_tokens

    def check_fits(self, sequence: Admissible) -> None:
        """Raise NeverFits if a sequence could not get one more token even if it were alone."""
        if self.fits_alone(sequence) or (self._evict_grammars() and self.fits_alone(sequence)):
            return
        fixed, limit, tokens = self.fixed_bytes, self._ledger.limit_bytes, len(sequence.tokens)
        logits = self._logits_bytes(sequence) + _score_bytes(sequence)
        needed = self._needed_bytes(tokens) + logits
        room, most = max(0, limit - fixed), self.most_tokens(logits)
        beside = f" with {format_bytes(logits)} of logits for its tokens" if logits else ""
        # Clients look for these words, and for numbers without commas.
        raise NeverFits(
            f"prompt is too long: {tokens} tokens > {max(0, most - 1)} maximum. "
            f"This model's maximum context length is {most} tokens in this memory; "
            f"{tokens + 1} were asked for ({tokens} in the prompt, 1 in the answer). "
            f"KV for {tokens + 1:,} tokens needs "
            f"{format_bytes(needed)}{beside}; the limit of {format_bytes(limit)} leaves "
            f"{format_bytes(room)} beside weights, tails and buffers of {format_bytes(fixed)}. "
            f"Lower max_kv_size, shorten the prompt, or raise memory_limit",
            needed,
            room,
            limit,
        )

    def fits_alone(self, sequence: Admissible) -> bool:
        """Tell whether a sequence could get one more token if it were alone."""
        room = self._ledger.limit_bytes - self.fixed_bytes
        needed = self._needed_bytes(len(sequence.tokens)) + self._logits_bytes(sequence)
        return needed + _score_bytes(sequence) <= room

    def most_tokens(self, logits_bytes: int = 0) -> int:
        """Return how many tokens a prompt and its answer can have together, alone; up to 2**31.

        Args:
            logits_bytes: bytes that the logits of the prompt's tokens take besides.
        """
        room = self._ledger.limit_bytes - self.fixed_bytes - logits_bytes
        fits, over = 0, 2**31
        while over - fits > 1:
            tokens = (fits + over) // 2
            if self._needed_bytes(tokens - 1) <= room:
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

    def has_room(self, sequence: Admissible, placed: Iterable[Admissible]) -> bool:
        """Tell whether the expected bytes of a sequence fit beside those of the others.

        Nothing is evicted for it yet: evictable bytes count as free. Alone, a sequence may
        grow to the end of the memory, and has room.

        Args:
            sequence: its path is attached, and nothing is reserved.
            placed: the admitted sequences.
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
        """Tell whether a sequence would fit if all of the others were preempted.

        Args:
            sequence: not admitted yet.
            num_cached_tokens: tokens of it that the tree holds.
            others: admitted ones.
            staying: the other admitted ones.
            evict: whether nodes may be evicted for it, those included that only the others read.
        """
        freed = self._ledger.free_bytes + (self._prefixes.evictable_bytes if evict else 0)
        for other in others:
            held = (other.kv.reservation, other.step_reservation)
            freed += sum(reserved.nbytes for reserved in held if reserved is not None)
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
    ) -> None:
        """Raise AssertionError if the bytes in the ledger are not those that are in use.

        Args:
            sequences: all that are open.
            tails: the pool.
            weights: bytes of the model's, counted again.
            draft: bytes of the draft model, counted again.
            reading: bytes of the blocks that are being read from cold tiers.
            scored: bytes of the scores of prompts' tokens, counted again.
        """
        reserved = [(s.kv.reservation, s.step_reservation) for s in sequences]
        promised = sum(own.nbytes for own, _ in reserved if own is not None)
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
            }
        )
        pool = self._aside.pool.nbytes
        if tails.nbytes not in (0, pool):
            raise AssertionError(f"tails of {tails.nbytes} bytes, {pool} counted")

    # ---- acts

    def set_aside_prompts(self, nbytes: int) -> int:
        """Set aside bytes for the texts and tokens of prompts; return how many were set aside.

        At most half of the free bytes are set aside.
        """
        self._prefixes.make_room(max(0, nbytes - self._prompts.nbytes))
        room = self._ledger.free_bytes + self._prompts.nbytes
        self._prompts.resize(min(nbytes, room // 2))
        return self._prompts.nbytes

    def reserve_grammars(self, nbytes: int) -> None:
        """Reserve memory for all compiled grammars.

        Raises:
            LedgerFull, NeverFits: as many bytes do not fit beside running sequences, or the
                weights; nothing is changed.
        """
        self._prefixes.make_room(max(0, nbytes - self._grammars.nbytes))
        self._grammars.resize(nbytes)

    def reserve(self, sequence: Admissible) -> bool:
        """Reserve the KV behind a sequence's cached tokens, and the bytes that it adds to a step.

        The tokens are those that it has, and the next few of its answer.

        Returns:
            False, with nothing reserved, if there is no room.
        """
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
        """Reserve the next few tokens of an answer; just one if there is no room for more.

        One that was stuck gets all that can be its own: the index of its nodes takes none of it.

        Returns:
            False, with nothing changed, if there is no room for that one.
        """
        tokens, most = len(sequence.tokens), sequence.max_kv_tokens
        ahead = [min(tokens - 1 + more, most) for more in (GROWTH_TOKENS, 1)]
        if sequence.stuck:
            alone = self.most_tokens(self._logits_bytes(sequence) + _score_bytes(sequence))
            ahead = [max(tokens, min(most, alone - 1))]
        return any(self._reserve_up_to(sequence, end) for end in ahead)

    def reserve_anew(self, sequence: Admissible) -> bool:
        """Reserve a sequence's KV anew, after its cached tokens have changed.

        Returns:
            False, with nothing changed, if there is no room.
        """
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
        """Reserve the next tokens' bytes again, as others leave memory; False without room."""
        own = sequence.kv.reservation
        assert own is not None
        tokens = max(0, sequence.reserved_tokens - sequence.kv.num_cached_tokens)
        more = max(0, self._estimator.next_bytes(tokens) - own.nbytes)
        if not self._make_room(more):
            return False
        own.resize(own.nbytes + more)
        return True

    def release(self, sequence: Admissible, sequences: Iterable[Admissible]) -> None:
        """Release a sequence's reservations.

        The chunk's reservation shrinks to the need of the longest sequence that remains.
        """
        for reservation in (sequence.kv.reservation, sequence.step_reservation):
            if reservation is not None:
                reservation.release()
        sequence.kv.reservation = sequence.step_reservation = None
        sequence.reserved_tokens = 0
        admitted = [other for other in sequences if other.kv.reservation is not None]
        chunks = (self._chunk_bytes(other, other.reserved_tokens) for other in admitted)
        self._aside.chunk.resize(max(chunks, default=0))

    def close(self) -> None:
        """Give back the pool and the buffers of a step; the weights stay counted."""
        self._aside.pool.resize(0)
        self._aside.step.resize(0)
        self._prompts.resize(0)
        self._grammars.resize(0)

    # ---- parts

    def _make_room(self, nbytes: int) -> bool:
        """Evict cold nodes, then grammars that no answer follows; False if that is not enough."""
        if self._prefixes.make_room(nbytes):
            return True
        return self._evict_grammars() and self._prefixes.make_room(nbytes)

    def _evict_grammars(self) -> bool:
        """Evict compiled grammars that no answer follows; False if there are none."""
        before = self._grammars.nbytes
        if before:
            self._grammars.resize(min(before, self.evict_grammars()))
        return self._grammars.nbytes < before

    def _reserve_up_to(self, sequence: Admissible, tokens: int) -> bool:
        """Reserve the KV of a sequence's first `tokens`; False, with nothing changed, if full."""
        own, step, chunk = sequence.kv.reservation, sequence.step_reservation, self._aside.chunk
        assert own is not None and step is not None
        estimator, before = self._estimator, sequence.reserved_tokens
        cached = sequence.kv.num_cached_tokens
        kv = estimator.sequence_bytes(tokens, cached)
        kv -= estimator.sequence_bytes(before, cached) if before else 0
        scores = estimator.decode_bytes(tokens) + _score_bytes(sequence) - step.nbytes
        reading = max(0, self._chunk_bytes(sequence, tokens) - chunk.nbytes)
        if not self._make_room(kv + scores + reading):
            return False
        own.resize(own.nbytes + kv)
        step.resize(step.nbytes + scores)
        chunk.resize(chunk.nbytes + reading)
        sequence.reserved_tokens = tokens
        return True

    def _expected_tokens(self, sequence: Admissible) -> int:
        """Return the KV tokens that are expected of a sequence at its end."""
        rest = self.lengths.rest_tokens(sequence.generated_tokens)
        tokens = min(len(sequence.tokens) - 1 + rest, sequence.max_kv_tokens)
        return max(tokens, sequence.reserved_tokens)

    def _expected_bytes(
        self, sequence: Admissible, num_cached_tokens: int, placed: Iterable[Admissible]
    ) -> int:
        """Return the bytes expected of a new sequence, and of placed ones beyond their own."""
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
        """Return the bytes of a chunk's logits and their scores, where a prompt's are read."""
        scores = sequence.kv.prompt_logprobs
        return 0 if scores is None else self._estimator.logits_bytes_of(scores)

    def _chunk_bytes(self, sequence: Admissible, tokens: int) -> int:
        """Return the bytes that a sequence of `tokens` tokens adds to a step that prefills it."""
        return self._estimator.prefill_bytes(tokens) + self._logits_bytes(sequence)

    def _needed_bytes(self, tokens: int) -> int:
        """Return the bytes, index included, that a sequence of `tokens` KV tokens takes alone."""
        blocks = self._estimator.shared_tokens(tokens) // self._prefixes.block_size
        return self._alone_bytes(tokens) + self._prefixes.index_bytes(blocks + 1)

    def _alone_bytes(self, tokens: int) -> int:
        """Return the bytes, index excluded, that a sequence of `tokens` KV tokens takes alone."""
        estimator = self._estimator
        step = estimator.decode_bytes(tokens) + estimator.prefill_bytes(tokens)
        return estimator.sequence_bytes(tokens) + step

    @property
    def _copies_bytes(self) -> int:
        """Bytes set aside for blocks that are written or encoded, and for copies of windows."""
        return sum(part.nbytes for part in self._copying)


def _score_bytes(sequence: Admissible) -> int:
    """Return the bytes of the log-probabilities of a prompt, if they are asked for.

    At the end of the sequence they are left to the holder of its handle, like the text.
    """
    scores = sequence.kv.prompt_logprobs
    return 0 if scores is None else scores.nbytes
