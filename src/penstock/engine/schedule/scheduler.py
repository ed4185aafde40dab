"""Scheduling policy: admission order, chunked prefill, preemption; no arrays, threads or clock.

    add ──> WAITING ──admit──> PREFILLING ──prefilled──> RUNNING ──finish──> DONE
                                 │  ^                      │
                             preempt admit              preempt      finish leads to DONE
                                 v  │                      │         from every other state
                              PREEMPTED <──────────────────┘

    PREFILLING ──fetch──> RESTORING ──fetched──> PREFILLING: blocks are read from a tier

A step of the engine is

    while sequence := next_in_line():  admit sequences until one does not fit
        act(sequence, "admit")      then "prefilled" if no tokens are left to prefill
    plan()                          all that run decode one token, some prefill a chunk
    act(sequence, ...)              after the step

The scheduler reads the progress of sequences and writes only their `state`. A request for n answers
is n sequences with the same prompt: one of them is prefilled, and the others share its committed
blocks.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Generic, Literal, Protocol, TypeVar

from penstock.engine.schedule.fair_shares import FairShares, Path, Sharer, shares_of
from penstock.engine.schedule.queue_shares import BEYOND, QueueShares
from penstock.engine.schedule.step_time import StepTime
from penstock.errors import QueueFull, UnknownSequence


class State(Enum):
    WAITING = "waiting"
    """Queued, not admitted yet."""
    PREFILLING = "prefilling"
    """Admitted; its prompt is being prefilled in chunks."""
    RESTORING = "restoring"
    RUNNING = "running"
    """Admitted; decodes one token per step."""
    PREEMPTED = "preempted"
    """Preempted: its place and bytes are released, and it waits to be admitted again."""
    DONE = "done"


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
"""States of sequences with a place in the batch."""


def next_state(state: State, event: Event) -> State:
    """Return the state after `event`; raises ValueError if the event is not allowed in `state`."""
    try:
        return NEXT[state, event]
    except KeyError:
        raise ValueError(f"{event!r} is not allowed in state {state.value!r}") from None


class SchedulerSequence(Sharer, Protocol):
    state: State
    """State, written only by the scheduler; WAITING when the sequence is added."""

    @property
    def priority(self) -> int: ...
    @property
    def deadline_seconds(self) -> float | None:
        """Deadline in seconds on the caller's clock; None for no limit."""

    @property
    def position(self) -> int: ...
    @property
    def next_block_hash(self) -> bytes | None:
        """Hash of the block at which the next chunk starts; None if it cannot be shared."""

    @property
    def ready(self) -> bool:
        """Whether the inputs of the next chunk are available."""


T = TypeVar("T", bound=SchedulerSequence)


@dataclass(frozen=True, slots=True)
class PrefillChunk(Generic[T]):
    """The next `tokens` prompt tokens of a sequence, to prefill in one step."""

    sequence: T
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[T]):
    """Sequences to decode by one token, and chunks to prefill, in one step."""

    decode: tuple[T, ...]
    prefill: tuple[PrefillChunk[T], ...]
    alone: bool = False
    """Whether no admitted prompt and no other model waits for the step."""


@dataclass(eq=False, slots=True)
class _Place(Generic[T]):
    sequence: T
    position: int
    served_tokens: int
    last_progress_step: int
    """Last step in which the sequence was admitted or prefilled, or reused a block."""

    @property
    def progressed(self) -> bool:
        """Whether a prefilling sequence has made progress since that step."""
        sequence = self.sequence
        return sequence.served_tokens != self.served_tokens or sequence.position > self.position


@dataclass(frozen=True, slots=True)
class _Reader(Generic[T]):
    """Sequence that may prefill in this step, on behalf of all with the same next block."""

    sequence: T
    oldest_progress_step: int
    """Earliest `last_progress_step` among the sequences that wait for the same block."""


class Scheduler(Generic[T]):
    """Sequences and their states. Not thread-safe: owned by the thread that runs the steps.

    The oldest sequence of the highest priority gets at least half of a step's prefill tokens, so
    later arrivals cannot delay it. The rest goes to the least-served client, and its least-served
    request and sequence, so that short prompts do not wait for long ones. Sequences without
    progress for `max_batch_size` steps come first. If the rest is smaller than a block, the oldest
    sequence and the others take turns. If a step has too little time for a block, one sequence
    prefills a part of it. So an admitted request makes progress at least once in
    `3 x max_batch_size` steps, however many others arrive.

    Places are shared fairly (`fair_shares`) within a priority: lower priorities wait while higher
    ones are queued.

    Args:
        max_batch_size: number of places: sequences that prefill or decode at the same time.
        budget_tokens: maximum prefill tokens per step over all sequences; at least one block.
        block_size: block size in tokens; chunks end at its multiples, or with the prompt.
        max_queue: maximum number of waiting sequences, excluding preempted ones; see `QueueShares`.
        preempts_for_shares: whether shares with more places are preempted for others. False if
            recomputed KV would differ, as with selective attention during decode.
        moved: called with a sequence after its state has changed.

    Raises:
        ValueError: an argument is below 1, or a block is longer than `budget_tokens`.
    """

    def __init__(
        self,
        max_batch_size: int,
        budget_tokens: int,
        block_size: int,
        max_queue: int,
        *,
        preempts_for_shares: bool = True,
        moved: Callable[[T], None] | None = None,
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
        self._waiting: Counter[str | int] = Counter()  # sequences not admitted yet, by client
        self._placed: dict[int, _Place[T]] = {}
        self._shares: FairShares[T] = FairShares()
        self._preempts_for_shares = preempts_for_shares
        self._moved = moved
        self._step = 1
        self._progressed = (
            False  # whether a sequence that has left PREFILLING progressed since the last plan
        )
        self._crowded_step = -1  # last step in which the oldest sequence left no room for others

    @property
    def free_places(self) -> int:
        return self.max_batch_size - len(self._placed)

    def __len__(self) -> int:
        return len(self._sequences)

    def sequences(self, state: State) -> list[T]:
        return sorted((s for s in self._sequences.values() if s.state is state), key=_order)

    def in_line(self) -> list[T]:
        """Return the waiting and preempted sequences, highest priority first."""
        return list(self._line)

    def next_in_line(self) -> T | None:
        """Return the sequence to admit next, even if no place is free; None if none is waiting.

        It is the first in line of the share with the fewest places and the least work, within the
        highest priority. If it does not fit, admit no other. While no place is free, a share that
        cannot take one from another share may redistribute its own.
        """
        if not self._line:
            return None
        highest = self._line[0].priority
        order = self._shares.in_order(takewhile(lambda s: s.priority == highest, self._line))
        if self.free_places:
            return order[0]
        return next((sequence for sequence in order if self.to_preempt(sequence)), order[0])

    def placed(self) -> list[T]:
        return sorted([place.sequence for place in self._placed.values()], key=_order)

    def restoring_hashes(self) -> set[bytes]:
        """Return the hash of the next block of each restoring sequence."""
        hashes = (
            place.sequence.next_block_hash
            for place in self._placed.values()
            if place.sequence.state is State.RESTORING
        )
        return {block_hash for block_hash in hashes if block_hash is not None}

    def overdue(self, now_seconds: float) -> list[T]:
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.deadline_seconds is not None and sequence.deadline_seconds <= now_seconds
        ]

    def to_preempt(self, sequence: T) -> list[T]:
        """Return the admitted sequences that may be preempted for another, in order."""
        placed = self.placed()
        lower = [other for other in placed if other.priority < sequence.priority]
        if not self._preempts_for_shares:
            return lower[::-1]
        equal = (other for other in placed if other.priority == sequence.priority)
        return [*lower[::-1], *self._shares.to_preempt(sequence, equal)]

    def to_preempt_early(self, sequence: T) -> list[T]:
        """Return admitted sequences to preempt before their turn ends if only memory is short."""
        is_new = sequence.state is State.WAITING
        if not (self._preempts_for_shares and is_new and self.free_places):
            return []
        equal = (other for other in self.placed() if other.priority == sequence.priority)
        return self._shares.to_preempt_early(sequence, equal)

    def to_displace(self, owners: Path, added: int) -> list[T]:
        """Return the waiting sequences to remove so that a new request can be queued.

        These are all sequences of requests that have not started, of clients with more waiting
        sequences.

        Args:
            owners: client, salt and id of the new request.
            added: number of its sequences.

        Raises:
            QueueFull: removing them would not make enough room.
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
        """Number of sequences not admitted yet, by client."""
        return dict(self._waiting)

    def lowest(self) -> T:
        """Return the admitted sequence to preempt first when memory runs out."""
        return min(
            self.placed(),
            key=lambda s: (s.priority, *(-places for places in self._shares.places(s)), -s.id),
        )

    def add(self, *sequences: T) -> None:
        """Queue new sequences, all or none.

        Raises:
            QueueFull: more than `max_queue` sequences would wait.
            ValueError: a sequence was added before, or one of its counts is negative.
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
        """Apply `event` to a sequence, and return its new state.

        A sequence without tokens to prefill is admitted like any other; then apply "prefilled". A
        finished sequence is removed.

        Raises:
            UnknownSequence: the sequence was never added, or is finished.
            ValueError: the event is not allowed in this state, or "admit" without a free place, or
                "prefilled" with tokens left to prefill. Nothing is changed.
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
        if self._moved is not None:
            self._moved(sequence)
        return state

    def plan(self, time: StepTime | None = None, *, shared: bool = False) -> StepPlan[T]:
        """Return the plan of the next step. Repeated calls agree until a prompt makes progress.

        Every running sequence decodes. Of the prefilling sequences with the same next block, only
        the first is prefilled; the others find the block in the tree afterwards, as do sequences
        whose next block is being restored. At most `budget_tokens` are prefilled in total, and at
        least one if any can be.

        Args:
            time: time limit for prefill; None means no limit besides `budget_tokens`. If no block
                fits into the time, the rest of one is prefilled anyway, or a part of it if that
                would take much longer (`StepTime.part`).
            shared: whether other models wait for the device, so that no step counts as alone.
        """
        self._note_progress()
        placed = self.placed()
        decode = tuple(sequence for sequence in placed if sequence.state is State.RUNNING)
        if len(decode) == len(placed):  # the most frequent step by far
            return StepPlan(decode, (), alone=not shared)
        readers = self._readers(placed)
        if time is not None and not (decode or shared or self._short_one_waits(readers, time)):
            time = time.alone
        return StepPlan(decode, self._prefill(readers, time))

    def check(self) -> None:
        """Raise AssertionError if a sequence is lost or duplicated, or too many are admitted."""
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

    def _fault(self, key: int, sequence: T) -> str:
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
        """Count a new step if prompts progressed since the last plan, and record which did."""
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
        """Return the candidates for prefill: the first sequence for each next block."""
        leaders: dict[bytes, int] = {}
        oldest: dict[int, int] = {}
        restored = self.restoring_hashes()
        for sequence in placed:
            if sequence.state is not State.PREFILLING or not sequence.remaining_tokens:
                continue
            if not sequence.ready:
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
        """Return whether a short remainder of a prompt competes with other requests' prompts.

        Short remainders of all prompts that end in one pass do not compete.
        """
        if len({reader.sequence.owners for reader in readers}) < 2:
            return False
        sequences = (reader.sequence for reader in readers)
        short = [time.is_short(s.position, s.remaining_tokens) for s in sequences]
        return any(short) and not (time.one_pass and all(short))

    def _prefill(
        self, readers: list[_Reader[T]], time: StepTime | None
    ) -> tuple[PrefillChunk[T], ...]:
        if not readers:
            return ()
        chunk_tokens = {reader.sequence: 0 for reader in readers}
        for sequence, offered in self._offers(readers, time):
            room = self._whole(sequence, min(offered, self._room(sequence, chunk_tokens, time)))
            if not any(chunk_tokens.values()):  # at least one sequence gets tokens
                room = max(room, self._least(sequence, time)) or self._part(sequence, time)
            chunk_tokens[sequence] = max(chunk_tokens[sequence], room)
        return tuple(
            PrefillChunk(sequence, count) for sequence, count in chunk_tokens.items() if count
        )

    def _least(self, sequence: T, time: StepTime | None) -> int:
        """Return the minimum tokens that a sequence gets even if they exceed the time limit."""
        least = 0 if time is None else time.least(sequence.position)
        return self._whole(sequence, min(least, self.budget_tokens))

    def _part(self, sequence: T, time: StepTime | None) -> int:
        """Return the number of tokens to prefill of a block that exceeds the time limit."""
        block = self._rounded_up(sequence, 1)
        return block if time is None else time.part(sequence.position, block)

    def _room(self, sequence: T, chunks: dict[T, int], time: StepTime | None) -> int:
        """Return the maximum tokens that a sequence may prefill in addition to the others."""
        others = [(s.position, count) for s, count in chunks.items() if s is not sequence and count]
        limit = self.budget_tokens - sum(count for _, count in others)
        return limit if time is None else time.tokens(sequence.position, limit, others)

    def _offers(self, readers: list[_Reader[T]], time: StepTime | None) -> list[tuple[T, int]]:
        first, budget = readers[0].sequence, self.budget_tokens
        limit = self._room(first, {}, time)
        half = self._whole(first, min(limit, self._rounded_up(first, (limit + 1) // 2)))
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
        """Order shares and their sequences: those without progress first, then the least served."""
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
        """Return the largest chunk size up to `tokens` that ends at a block boundary or the end."""
        if tokens >= sequence.remaining_tokens:
            return sequence.remaining_tokens
        return max(0, tokens - (sequence.position + tokens) % self.block_size)

    def _rounded_up(self, sequence: T, tokens: int) -> int:
        """Return the least chunk size from `tokens` up that ends at a block boundary or the end."""
        return min(
            sequence.remaining_tokens, tokens + -(sequence.position + tokens) % self.block_size
        )


def _order(sequence: SchedulerSequence) -> tuple[int, int]:
    return (-sequence.priority, sequence.id)


def _line_order(sequence: SchedulerSequence) -> tuple[int, bool, int]:
    return (-sequence.priority, sequence.state is State.WAITING, sequence.id)


def _impossible(sequence: SchedulerSequence) -> str:
    """Return an error message if a count of a sequence is negative; else an empty string."""
    for name in ("position", "remaining_tokens", "served_tokens"):
        if (value := getattr(sequence, name)) < 0:
            return f"{name} of sequence {sequence.id} must not be negative: {value}"
    return ""


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value
