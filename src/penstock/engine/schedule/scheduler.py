"""Scheduling policy: admission order, chunked prefill, preemption; no arrays, threads or clock.

    add ──> WAITING ──admit──> PREFILLING ──prefilled──> RUNNING ──finish──> DONE
                                 │  ^                      │
                             preempt admit              preempt      finish leads to DONE
                                 v  │                      │         from every other state
                              PREEMPTED <──────────────────┘

    PREFILLING ──fetch──> RESTORING ──fetched──> PREFILLING: blocks come from a tier meanwhile

A step of the engine is

    while sequence := next_in_line():  admit those that fit in the ledger, until one does not
        act(sequence, "admit")      and "prefilled" at once where nothing is left to prefill
    plan()                          all that run decode one token, some prefill a chunk
    act(sequence, ...)              after the step

The scheduler holds the sequences themselves and reads how far each has come; `state` is all that it
writes to them. A request for n answers is n sequences with one prompt: one of them is prefilled,
and the others share the blocks that it has committed. Steps are counted by themselves.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Generic, Literal, Protocol, TypeVar

from penstock.engine.schedule.fair_shares import FairShares, Path, Sharer, shares_of
from penstock.engine.schedule.queue_shares import BEYOND, QueueShares
from penstock.engine.schedule.step_time import StepTime
from penstock.errors import QueueFull, UnknownSequence


class State(Enum):
    """State of a sequence in its life."""

    WAITING = "waiting"
    """Queued for the first place."""
    PREFILLING = "prefilling"
    """Placed; the rest of its prompt is prefilled in chunks."""
    RESTORING = "restoring"
    """Placed; blocks of its prompt are on their way from a tier."""
    RUNNING = "running"
    """Placed; decodes one token a step."""
    PREEMPTED = "preempted"
    """Preempted: has neither a place nor bytes of its own; waits to be admitted again."""
    DONE = "done"
    """Forgotten by the scheduler."""


Event = Literal["admit", "fetch", "fetched", "prefilled", "preempt", "finish"]

NEXT: dict[tuple[State, Event], State] = {
    (State.WAITING, "admit"): State.PREFILLING,
    (State.PREEMPTED, "admit"): State.PREFILLING,
    (State.PREFILLING, "fetch"): State.RESTORING,
    (State.RESTORING, "fetched"): State.PREFILLING,
    (State.PREFILLING, "prefilled"): State.RUNNING,
    (State.PREFILLING, "preempt"): State.PREEMPTED,
    (State.RESTORING, "preempt"): State.PREEMPTED,
    (State.RUNNING, "preempt"): State.PREEMPTED,
    (State.WAITING, "finish"): State.DONE,
    (State.PREFILLING, "finish"): State.DONE,
    (State.RESTORING, "finish"): State.DONE,
    (State.RUNNING, "finish"): State.DONE,
    (State.PREEMPTED, "finish"): State.DONE,
}

PLACED = (State.PREFILLING, State.RESTORING, State.RUNNING)
"""States of sequences that take a place of the batch."""


def next_state(state: State, event: Event) -> State:
    """Return the state that follows; raise ValueError if `event` cannot happen in `state`."""
    try:
        return NEXT[state, event]
    except KeyError:
        raise ValueError(f"{event!r} cannot happen to a sequence that is {state.value}") from None


class SchedulerSequence(Sharer, Protocol):
    """One sequence, as the scheduler sees it."""

    state: State
    """State in the scheduler, its only writer; WAITING when the sequence is added."""

    @property
    def priority(self) -> int:
        """Priority; higher goes first."""

    @property
    def deadline_seconds(self) -> float | None:
        """End of its time on the caller's clock; None if it has no end."""

    @property
    def position(self) -> int:
        """Number of tokens with computed KV: its next chunk begins here."""

    @property
    def next_block_hash(self) -> bytes | None:
        """Hash of the block that its next chunk begins with; None where nothing can be shared."""


T = TypeVar("T", bound=SchedulerSequence)


@dataclass(frozen=True, slots=True)
class PrefillChunk(Generic[T]):
    """The next `tokens` of a sequence's prompt, to be prefilled in one step."""

    sequence: T
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[T]):
    """One step of the model: sequences that decode a token each, and chunks to prefill."""

    decode: tuple[T, ...]
    prefill: tuple[PrefillChunk[T], ...]


@dataclass(eq=False, slots=True)
class _Place(Generic[T]):
    """A place of the batch: its sequence, and how far that had come in an earlier step."""

    sequence: T
    position: int
    served_tokens: int
    last_progress_step: int
    """Step in which the sequence last got on: by a place, its own chunk, or a shared one."""

    @property
    def progressed(self) -> bool:
        """Whether the sequence has advanced since that step, if it is prefilling."""
        sequence = self.sequence
        return sequence.served_tokens != self.served_tokens or sequence.position > self.position


@dataclass(frozen=True, slots=True)
class _Reader(Generic[T]):
    """A sequence that may be prefilled in this step, for all with the same next block."""

    sequence: T
    oldest_progress_step: int
    """Earliest `last_progress_step` among the sequences that wait for the same block."""


class Scheduler(Generic[T]):
    """Sequences and their states. Not thread-safe: one owner, the thread that runs the steps.

    The oldest sequence of the highest priority gets half or more of a step's prefill tokens, so
    that no later one can hold it up. The rest goes to the client, of that to the request, of that
    to the sequence that was served least, so that a short prompt does not wait for long ones. One
    that has made no progress for as many steps as there are places goes before these. Where blocks
    are so long that the rest is of no use, the first sequence and the others take turns. Where a
    step's time is too short for a block, one sequence reads a part of it. So a request with places
    makes progress at least once in `3 x max_batch_size` steps, however many others arrive.

    Places are shared out fairly (`fair_shares`), priorities first: a lower priority waits for as
    long as higher ones come.

    Args:
        max_batch_size: places: sequences that are prefilling or running at the same time.
        budget_tokens: tokens that may be prefilled in a step, all sequences together; at least a
            block.
        block_size: tokens; a chunk ends at a multiple of it, or with the prompt.
        max_queue: sequences that may wait for their first place, see `QueueShares`. Preempted ones
            do not count.
        preempts_for_shares: whether larger shares give places back. Not where tokens that are
            computed again differ: a step with a choice has not read what a prefill reads.

    Raises:
        ValueError: one of them is below 1, or a block is longer than `budget_tokens`.
    """

    def __init__(
        self,
        max_batch_size: int,
        budget_tokens: int,
        block_size: int,
        max_queue: int,
        *,
        preempts_for_shares: bool = True,
    ) -> None:
        self.max_batch_size = _positive("max_batch_size", max_batch_size)
        self.budget_tokens = _positive("budget_tokens", budget_tokens)
        self.block_size = _positive("block_size", block_size)
        if budget_tokens < block_size:
            raise ValueError(
                f"budget_tokens {budget_tokens} is less than a block of {block_size} tokens, which "
                f"could never be read"
            )
        self.max_queue = _positive("max_queue", max_queue)
        self._sequences: dict[int, T] = {}
        self._line: list[T] = []  # waiting and preempted, in the order of admission
        self._waiting: Counter[str | int] = Counter()  # those that never had a place, by client
        self._placed: dict[int, _Place[T]] = {}
        self._shares: FairShares[T] = FairShares()
        self._preempts_for_shares = preempts_for_shares
        self._step = 1
        self._progressed = (
            False  # a sequence that is no longer prefilling got on since the last plan
        )
        self._crowded_step = -1  # the last one in which the first reader left no room for others

    @property
    def free_places(self) -> int:
        """Number of sequences that could be admitted now, as far as places go."""
        return self.max_batch_size - len(self._placed)

    def __len__(self) -> int:
        return len(self._sequences)

    # ---- questions

    def sequences(self, state: State) -> list[T]:
        """Return the sequences in a state, highest priority first, then by arrival."""
        return sorted((s for s in self._sequences.values() if s.state is state), key=_order)

    def in_line(self) -> list[T]:
        """Return the waiting and preempted sequences: the highest priority first.

        Of the same priority, preempted ones before those that never had a place; then by arrival.
        """
        return list(self._line)

    def next_in_line(self) -> T | None:
        """Return the sequence to admit next, places or not; None if none waits.

        Of the highest priority, the share with the fewest places and the least work is next, and
        its first sequence in line. If it does not fit, let no other pass it.
        While no place is free, a share that cannot get another's lets others divide their own.
        """
        if not self._line:
            return None
        highest = self._line[0].priority
        order = self._shares.in_order(takewhile(lambda s: s.priority == highest, self._line))
        if self.free_places:
            return order[0]
        return next((sequence for sequence in order if self.to_preempt(sequence)), order[0])

    def placed(self) -> list[T]:
        """Return the sequences in a place, highest priority first, then by arrival."""
        return sorted([place.sequence for place in self._placed.values()], key=_order)

    def restoring_hashes(self) -> set[bytes]:
        """Return the hash of the next block of each sequence that is being restored."""
        hashes = (
            place.sequence.next_block_hash
            for place in self._placed.values()
            if place.sequence.state is State.RESTORING
        )
        return {block_hash for block_hash in hashes if block_hash is not None}

    def overdue(self, now_seconds: float) -> list[T]:
        """Return the sequences with a deadline that is now or was before."""
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.deadline_seconds is not None and sequence.deadline_seconds <= now_seconds
        ]

    def to_preempt(self, sequence: T) -> list[T]:
        """Return the placed sequences that may be preempted for another, in this order.

        First the lower priorities, of these the lowest, of these the latest arrival. Then those of
        its own priority that have more than their fair share of the places.
        """
        placed = self.placed()
        lower = [other for other in placed if other.priority < sequence.priority]
        if not self._preempts_for_shares:
            return lower[::-1]
        equal = (other for other in placed if other.priority == sequence.priority)
        return [*lower[::-1], *self._shares.to_preempt(sequence, equal)]

    def to_preempt_early(self, sequence: T) -> list[T]:
        """Return the placed sequences that make way for a short new one before their turn ends.

        Only where memory is short and places are not, and where it takes nothing of what they have
        computed; in this order.
        """
        is_new = sequence.state is State.WAITING
        if not (self._preempts_for_shares and is_new and self.free_places):
            return []
        equal = (other for other in self.placed() if other.priority == sequence.priority)
        return self._shares.to_preempt_early(sequence, equal)

    def to_displace(self, owners: Path, added: int) -> list[T]:
        """Return the waiting sequences to end so that a request may wait: whole other requests.

        They are of clients with more in the queue, and none of them has begun.

        Args:
            owners: of the new request.
            added: its sequences.

        Raises:
            QueueFull: there is no room, and none is to be made.
        """
        if self._waiting.total() + added <= self.max_queue:
            return []
        requests: dict[Path, list[T]] = {}
        for sequence in self._line:
            if not self._shares.has_begun(sequence.owners):
                requests.setdefault(sequence.owners, []).append(sequence)
        sizes = {request: len(sequences) for request, sequences in requests.items()}
        queue = QueueShares(self.max_queue, self._waiting)
        displaced = queue.to_displace(owners[0], added, sizes)
        return [sequence for request in displaced for sequence in requests[request]]

    @property
    def waiting_by_client(self) -> dict[str | int, int]:
        """Sequences that wait for their first place, by their client."""
        return dict(self._waiting)

    def lowest(self) -> T:
        """Return the placed sequence to preempt when memory runs out.

        It is of the lowest priority, then of the largest share, then the latest arrival.
        """
        return min(
            self.placed(),
            key=lambda s: (s.priority, *(-places for places in self._shares.places(s)), -s.id),
        )

    # ---- acts

    def add(self, *sequences: T) -> None:
        """Put new sequences into the queue: all of them or none.

        Raises:
            QueueFull: more would wait for their first place than `max_queue`.
            ValueError: a sequence is not new, or its numbers are impossible.
        """
        new: set[int] = set()
        for sequence in sequences:
            known = sequence.id in new or sequence.id in self._sequences
            if known or sequence.state is not State.WAITING:
                raise ValueError(f"sequence {sequence.id} is not new")
            new.add(sequence.id)
            if wrong := _impossible(sequence):
                raise ValueError(wrong)
        if sequences and self.to_displace(sequences[0].owners, len(sequences)):
            raise QueueFull(self._waiting.total(), len(sequences), self.max_queue)
        for sequence in sequences:
            self._sequences[sequence.id] = sequence
            self._shares.open(sequence)
            self._enter(sequence)

    def act(self, sequence: T, event: Event) -> State:
        """Let `event` happen to a sequence, and return its new state.

        A sequence without tokens left to prefill is admitted as any other, and "prefilled" follows
        at once. A finished one is forgotten.

        Raises:
            UnknownSequence: it was never added, or it is done.
            ValueError: not in this state; or "admit" while all places are taken; or "prefilled"
                while tokens are left to prefill. Nothing is changed then.
        """
        if self._sequences.get(sequence.id) is not sequence:
            raise UnknownSequence(sequence.id, len(self._sequences))
        state = next_state(sequence.state, event)
        if event == "admit" and self.free_places < 1:
            raise ValueError(
                f"sequence {sequence.id} cannot be admitted: all {self.max_batch_size} places are "
                f"taken"
            )
        if event == "prefilled" and sequence.remaining_tokens:
            raise ValueError(
                f"sequence {sequence.id} has {sequence.remaining_tokens} tokens left to prefill"
            )
        self._leave(sequence)
        before, sequence.state = sequence.state, state
        self._enter(sequence)
        if event == "admit":
            self._shares.begin_turn(sequence, again=before is State.PREEMPTED)
        elif before in PLACED and state not in PLACED:
            self._shares.end_turn(sequence, prefilled=before is State.RUNNING)
        if state is State.DONE:
            self._shares.close(sequence)
        return state

    def plan(self, time: StepTime | None = None) -> StepPlan[T]:
        """Return the plan of the next step. It stays the same until a prompt gets on.

        Every running sequence decodes. Of the prefilling sequences with the same next block, only
        the first is prefilled. The others find the block in the tree afterwards, as do sequences
        whose next block is being restored. At most `budget_tokens` are prefilled in all, and at
        least one while any can be.

        Args:
            time: for prompts; None is no bound beyond `budget_tokens`. A block for which no token's
                time would do is read all the same.
        """
        self._note_progress()
        placed = self.placed()
        decode = tuple(sequence for sequence in placed if sequence.state is State.RUNNING)
        if len(decode) == len(placed):  # the most frequent step by far
            return StepPlan(decode, ())
        readers = self._readers(placed)
        if time is not None and not decode and not self._short_one_waits(readers, time):
            time = time.alone
        return StepPlan(decode, self._prefill(readers, time))

    def check(self) -> None:
        """Raise AssertionError if a sequence is lost or doubled, or if too many have a place."""
        wrong = []
        placed = [place.sequence.id for place in self._placed.values()]
        entries = Counter([*(sequence.id for sequence in self._line), *placed])
        if entries != Counter(self._sequences.keys()):
            wrong.append(
                f"sequences {sorted(self._sequences)}, but in line or placed "
                f"{sorted(entries.items())}"
            )
        if len(self._placed) > self.max_batch_size:
            wrong.append(f"{len(self._placed)} sequences in {self.max_batch_size} places")
        if self._line != sorted(self._line, key=_line_order):
            wrong.append("the line is out of order")
        waiting = Counter(s.owners[0] for s in self._line if s.state is State.WAITING)
        if waiting != self._waiting:
            wrong.append(f"{waiting} sequences wait, {self._waiting} counted")
        if waiting.total() > BEYOND * self.max_queue:
            wrong.append(f"{waiting.total()} sequences in a queue of {self.max_queue}")
        wrong += [self._fault(key, sequence) for key, sequence in self._sequences.items()]
        if any(wrong):
            raise AssertionError("; ".join(filter(None, wrong)))

    # ---- parts

    def _fault(self, key: int, sequence: T) -> str:
        """Return the fault of a sequence that is known by a number; empty without one."""
        is_placed, remaining = sequence.id in self._placed, sequence.remaining_tokens
        if (
            sequence.id != key
            or sequence.state is State.DONE
            or (sequence.state in PLACED) != is_placed
            or (sequence.state is State.RUNNING and remaining)
        ):
            return (
                f"sequence {sequence.id} is {sequence.state.value}, placed: {is_placed}, "
                f"remaining: {remaining}, known as {key}"
            )
        return _impossible(sequence)

    def _leave(self, sequence: T) -> None:
        if sequence.state in PLACED:
            place = self._placed.pop(sequence.id)
            self._progressed |= sequence.state is State.PREFILLING and place.progressed
        else:
            self._line.remove(sequence)
            if sequence.state is State.WAITING:
                self._waiting[client := sequence.owners[0]] -= 1
                if not self._waiting[client]:
                    del self._waiting[client]

    def _enter(self, sequence: T) -> None:
        if sequence.state is State.DONE:
            del self._sequences[sequence.id]
        elif sequence.state not in PLACED:
            insort(self._line, sequence, key=_line_order)
            self._waiting[sequence.owners[0]] += sequence.state is State.WAITING
        else:
            self._placed[sequence.id] = _Place(
                sequence, sequence.position, sequence.served_tokens, self._step
            )

    def _note_progress(self) -> None:
        """Begin a new step if prompts got on since the last plan, and note which."""
        progressed = [
            place
            for place in self._placed.values()
            if place.sequence.state is State.PREFILLING and place.progressed
        ]
        self._step += self._progressed or bool(progressed)
        self._progressed = False
        for place in progressed:
            sequence = place.sequence
            place.position, place.served_tokens = sequence.position, sequence.served_tokens
            place.last_progress_step = self._step

    def _readers(self, placed: list[T]) -> list[_Reader[T]]:
        """Choose the sequences to prefill: the first of those with the same next block."""
        leaders: dict[bytes, int] = {}
        oldest: dict[int, int] = {}
        restored = self.restoring_hashes()
        for sequence in placed:
            if sequence.state is not State.PREFILLING or not sequence.remaining_tokens:
                continue
            block_hash = sequence.next_block_hash
            if block_hash in restored:
                continue
            leader = sequence.id
            if block_hash is not None:
                leader = leaders.setdefault(block_hash, sequence.id)
            step = self._placed[sequence.id].last_progress_step
            oldest[leader] = min(step, oldest.get(leader, step))
        return [_Reader(self._sequences[leader], step) for leader, step in oldest.items()]

    def _short_one_waits(self, readers: list[_Reader[T]], time: StepTime) -> bool:
        """Tell whether a nearly finished prompt is read beside one of another request."""
        if len({reader.sequence.owners for reader in readers}) < 2:
            return False
        sequences = (reader.sequence for reader in readers)
        return any(time.is_short(s.position, s.remaining_tokens) for s in sequences)

    def _prefill(
        self, readers: list[_Reader[T]], time: StepTime | None
    ) -> tuple[PrefillChunk[T], ...]:
        """Deal a step out; an offer is a sequence and the tokens that it may have so far."""
        if not readers:
            return ()
        given = {reader.sequence: 0 for reader in readers}
        for sequence, most in self._offers(readers, time):
            room = self._whole(sequence, min(most, self._room(sequence, given, time)))
            if not any(given.values()):  # the first that is offered any gets some
                room = max(room, self._least(sequence, time)) or self._part(sequence, time)
            given[sequence] = max(given[sequence], room)
        return tuple(PrefillChunk(sequence, count) for sequence, count in given.items() if count)

    def _least(self, sequence: T, time: StepTime | None) -> int:
        """Return how many tokens a sequence gets even if they take too long."""
        least = 0 if time is None else time.least(sequence.position)
        return self._whole(sequence, min(least, self.budget_tokens))

    def _part(self, sequence: T, time: StepTime | None) -> int:
        """Return how many tokens of a block a sequence gets if there is no time for all of it."""
        block = self._rounded_up(sequence, 1)
        return block if time is None else time.part(sequence.position, block)

    def _room(self, sequence: T, given: dict[T, int], time: StepTime | None) -> int:
        """Return the most tokens that a sequence may have beside the tokens of the others."""
        others = [(s.position, count) for s, count in given.items() if s is not sequence and count]
        most = self.budget_tokens - sum(count for _, count in others)
        return most if time is None else time.tokens(sequence.position, most, others)

    def _offers(self, readers: list[_Reader[T]], time: StepTime | None) -> list[tuple[T, int]]:
        first, budget = readers[0].sequence, self.budget_tokens
        most = self._room(first, {}, time)
        half = self._whole(first, min(most, self._rounded_up(first, (most + 1) // 2)))
        others = self._in_turn(readers[1:])
        offers = [(first, half), *((sequence, budget) for sequence in others), (first, budget)]
        taken = {first: max(half, self._least(first, time)) or self._part(first, time)}
        if not others or self._whole(others[0], self._room(others[0], taken, time)):
            return offers
        if self._crowded_step == self._step - 1:  # now it is the others' turn
            return [(others[0], self._rounded_up(others[0], 1)), (first, budget), *offers]
        self._crowded_step = self._step
        return offers

    def _in_turn(self, readers: list[_Reader[T]]) -> list[T]:
        """Order shares, and sequences of one: long overlooked first, then least served."""
        served: Counter[Path] = Counter()
        for place in self._placed.values():
            for share in shares_of(place.sequence):
                served[share] += place.sequence.served_tokens
        latest: dict[Path, int] = {}
        for reader in readers:
            for share in shares_of(reader.sequence):
                latest[share] = max(reader.oldest_progress_step, latest.get(share, 0))

        def turn(reader: _Reader[T]) -> list[tuple[bool, int]]:
            sequence = reader.sequence
            ranks = [self._rank(latest[share], served[share]) for share in shares_of(sequence)]
            return [*ranks, self._rank(reader.oldest_progress_step, sequence.served_tokens)]

        return [reader.sequence for reader in sorted(readers, key=turn)]

    def _rank(self, step: int, served_tokens: int) -> tuple[bool, int]:
        overlooked = self._step - step >= self.max_batch_size
        return (not overlooked, step if overlooked else served_tokens)

    def _whole(self, sequence: T, tokens: int) -> int:
        """Return the largest length, up to `tokens`, of a chunk that ends a block or the prompt."""
        if tokens >= sequence.remaining_tokens:
            return sequence.remaining_tokens
        return max(0, tokens - (sequence.position + tokens) % self.block_size)

    def _rounded_up(self, sequence: T, tokens: int) -> int:
        """Return the least length, from `tokens` on, of a chunk that ends a block or the prompt."""
        return min(
            sequence.remaining_tokens, tokens + -(sequence.position + tokens) % self.block_size
        )


def _order(sequence: SchedulerSequence) -> tuple[int, int]:
    return (-sequence.priority, sequence.id)


def _line_order(sequence: SchedulerSequence) -> tuple[int, bool, int]:
    return (-sequence.priority, sequence.state is State.WAITING, sequence.id)


def _impossible(sequence: SchedulerSequence) -> str:
    """Return which number of a sequence is negative; empty if none is."""
    for name in ("position", "remaining_tokens", "served_tokens"):
        if (value := getattr(sequence, name)) < 0:
            return f"{name} of sequence {sequence.id} must not be negative: {value}"
    return ""


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value
