"""Who is let in, who is read, who waits: the decisions of the engine, in plain Python.

    add ──> WAITING ──admit──> PREFILLING ──prefilled──> RUNNING ──finish──> DONE
                                 │  ^                  │
                               preempt admit            preempt        finish leads to DONE
                                 v  │                  │         from every other state
                                PARKED <───────────────┘

    PREFILLING ──fetch──> RESTORING ──fetched──> PREFILLING: blocks come from the disk meanwhile

A step of the engine is

    for job in candidates():        whoever fits in the ledger, in this order, until one does not
        act(job.id, "admit")        and "prefilled" at once where nothing is left to prefill
    plan()                          all that run decode one token, some prefill a chunk
    progress(...), act(...)         what came of it

A job is one sequence: a request for n answers is n jobs, whose prompts are equal, so that one
of them is read and the others share what it has committed. Nothing here knows of arrays, threads
or clocks; time is what the caller says it is, and steps are counted by themselves.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from penstock.errors import QueueFull, UnknownSequence


class State(Enum):
    """Where a job is in its life."""

    WAITING = "waiting"
    """For its first place."""
    PREFILLING = "prefilling"
    """Holds a place; the rest of its prompt is read in chunks."""
    RESTORING = "restoring"
    """Holds a place; blocks of its prompt are on their way from the disk."""
    RUNNING = "running"
    """Holds a place; decodes one token a step."""
    PREEMPTED = "preempted"
    """Gave its place and its own bytes back, and waits for the next one."""
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
"""The states that take a place of the batch."""


def next_state(state: State, event: Event) -> State:
    """Return the state that follows; raise ValueError if `event` cannot happen in `state`."""
    try:
        return NEXT[state, event]
    except KeyError:
        raise ValueError(f"{event!r} cannot happen to a job that is {state.value}") from None


@dataclass(eq=False, slots=True)
class Job:
    """One sequence, as the scheduler sees it. Only the scheduler changes it once it is added."""

    id: int
    priority: int = 0
    """Higher goes first."""
    arrived: int = 0
    """Its number in the order of arrival."""
    deadline_seconds: float | None = None
    """On the caller's clock; None: it has all the time in the world."""
    left: int = 0
    """Tokens still to prefill before it decodes."""
    position: int = 0
    """Tokens readable so far: its next chunk begins here."""
    next_block_hash: bytes | None = None
    """Name of the block that its next chunk begins with; None: it shares with nobody."""
    served: int = 0
    """Tokens that the model has read for it."""
    state: State = State.WAITING
    moved_step: int = 0
    """The step in which it last got on: got its place, or a chunk, be it its own or another's."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `tokens` of a job's prompt, to be read in one step."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step of the model will run: ids to decode a token each, and chunks to prefill."""

    decode: tuple[int, ...]
    prefill: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A job that may be read in this step, for itself and for all whose next block is the same."""

    job: Job
    moved_step: int
    """That of the one among them who has not got on for longest."""


class Scheduler:
    """Jobs and their states. Not thread-safe: one owner, the thread that runs the steps.

    Of the tokens prefilled in a step the oldest job of the highest priority gets half or more,
    so that nobody who came later can hold it up. The rest goes to whoever was served least, so
    that a short prompt does not wait for a long one; a job that has not got on for as many steps
    as there are places goes before those. Where blocks are so long that the rest is of use to
    nobody, the first and the others take turns. A job with a place thus gets on at least once
    in `3 x max_batch_size` steps, whatever else arrives. Admission knows no such mercy: a lower
    priority waits for as long as higher ones come.

    Args:
        max_batch_size: places, that is, jobs that are prefilling or running at the same time.
        budget_tokens: tokens that may be prefilled in a step, all jobs together; a block at least.
        block_size: tokens; a chunk ends at a multiple of it, or with the prompt.
        max_queue: jobs that may wait for their first place. Preempted ones do not count.

    Raises:
        ValueError: one of them is below 1, or a block is longer than `budget_tokens`.
    """

    def __init__(
        self, max_batch_size: int, budget_tokens: int, block_size: int, max_queue: int
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
        self._jobs: dict[int, Job] = {}
        self._line: list[Job] = []  # waiting and preempted, in the order of admission
        self._placed: dict[int, Job] = {}
        self._step = 1
        self._planned = False  # a plan was made in this step
        self._crowded_step = -1  # the last one in which the first reader left nobody else room

    @property
    def free_places(self) -> int:
        """Jobs that could be admitted now, as far as places go."""
        return self.max_batch_size - len(self._placed)

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- questions

    def job(self, job_id: int) -> Job:
        """Return the job of that id.

        Raises:
            UnknownSequence: it was never added, or it is done.
        """
        try:
            return self._jobs[job_id]
        except KeyError:
            raise UnknownSequence(job_id, len(self._jobs)) from None

    def jobs(self, state: State) -> list[Job]:
        """Return the jobs in a state, highest priority first, then by arrival."""
        return sorted((job for job in self._jobs.values() if job.state is state), key=_order)

    def in_line(self) -> list[Job]:
        """Return who is waiting or preempted, in the order of admission, places or not.

        Priority first; of the same priority, who was preempted before who was never in; then by
        arrival. If the first does not fit, let nobody else pass it, or it may wait for ever.
        """
        return list(self._line)

    def candidates(self) -> list[Job]:
        """Return `in_line()` while there is a free place, and nobody when there is none."""
        return self.in_line() if self.free_places else []

    def placed(self) -> list[Job]:
        """Return who holds a place, highest priority first, then by arrival."""
        return sorted(self._placed.values(), key=_order)

    def restoring_hashes(self) -> set[bytes]:
        """Return the names of the blocks that are being restored next."""
        restoring = (job for job in self._placed.values() if job.state is State.RESTORING)
        return {job.next_block_hash for job in restoring if job.next_block_hash is not None}

    def overdue(self, now_seconds: float) -> list[int]:
        """Return the ids of those whose deadline is now or was before."""
        return [
            job.id
            for job in self._jobs.values()
            if job.deadline_seconds is not None and job.deadline_seconds <= now_seconds
        ]

    def to_preempt(self, job: Job) -> list[int]:
        """Return who may be preempted for `job`: all of lower priority that hold a place.

        The cheapest sacrifice first: the lowest priority, and of these the latest arrival.
        """
        lower = [other for other in self._placed.values() if other.priority < job.priority]
        return [other.id for other in sorted(lower, key=_order, reverse=True)]

    # ---- acts

    def add(self, *jobs: Job) -> None:
        """Put new jobs into the queue: all of them or none.

        Raises:
            QueueFull: more would wait for their first place than `max_queue`.
            ValueError: a job is not new, or its numbers are impossible.
        """
        new: set[int] = set()
        for job in jobs:
            if job.id in new or job.id in self._jobs or job.state is not State.WAITING:
                raise ValueError(f"job {job.id} is not new")
            new.add(job.id)
            _check_numbers(job.id, position=job.position, left=job.left, served=job.served)
        self.check_room(len(jobs))
        for job in jobs:
            self._jobs[job.id] = job
            self._enter(job)

    def check_room(self, added: int) -> None:
        """Raise QueueFull if so many new jobs would be more than may wait."""
        waiting = sum(job.state is State.WAITING for job in self._line)
        if waiting + added > self.max_queue:
            raise QueueFull(waiting, added, self.max_queue)

    def act(self, job_id: int, event: Event) -> State:
        """Let `event` happen to a job, and return its new state.

        A job without anything left to prefill is admitted as any other, and "prefilled" follows
        at once. A preempted one has tokens to read again: tell `progress` how many before it is
        admitted. Whoever is finished is forgotten.

        Raises:
            UnknownSequence: no such job.
            ValueError: not in this state; or "admit" while all places are taken; or "prefilled"
                while tokens are left to prefill. Nothing is changed then.
        """
        job = self.job(job_id)
        state = next_state(job.state, event)
        if event == "admit" and self.free_places < 1:
            raise ValueError(
                f"job {job_id} cannot be admitted: all {self.max_batch_size} places are taken"
            )
        if event == "prefilled" and job.left:
            raise ValueError(f"job {job_id} has {job.left} tokens left to prefill")
        self._leave(job)
        job.state = state
        self._enter(job)
        return state

    def progress(
        self,
        job_id: int,
        *,
        position: int,
        left: int,
        next_block_hash: bytes | None = None,
        served_tokens: int = 0,
    ) -> None:
        """Take down where a job stands: after its chunk, after another's that it shares, or
        preempted.

        Args:
            job_id: whose progress.
            position: tokens readable now.
            left: tokens still to prefill; 0 for whoever is running.
            next_block_hash: of the block that the next chunk begins with; None for a last chunk
                that is less than a block, and wherever nothing can be shared.
            served_tokens: tokens that the model has read for it since the last report.

        Raises:
            UnknownSequence: no such job.
            ValueError: a negative number; or tokens left to prefill for whoever is running
                (preempt it first).
        """
        job = self.job(job_id)
        _check_numbers(job_id, position=position, left=left, served_tokens=served_tokens)
        if left and job.state is State.RUNNING:
            raise ValueError(f"job {job_id} is running and cannot have {left} tokens to prefill")
        if self._planned:  # the first report on a plan: a new step has been run
            self._step += 1
            self._planned = False
        if served_tokens or position > job.position:
            job.moved_step = self._step
        job.position, job.left, job.next_block_hash = position, left, next_block_hash
        job.served += served_tokens

    def plan(self) -> StepPlan:
        """Return what the next step runs. Asked again before any report, it says the same.

        Every running job decodes. Of the prefilling jobs whose next block is the same, only
        the first is read; the others find it in the tree afterwards, as do those whose next
        block is being restored. At most `budget_tokens`
        are prefilled in all, and never none while something can be.
        """
        self._planned = True
        placed = self.placed()
        decode = tuple(job.id for job in placed if job.state is State.RUNNING)
        return StepPlan(decode, self._prefill(self._readers(placed)))

    def check(self) -> None:
        """Raise AssertionError if a job is lost or doubled, or if too many have a place."""
        wrong = []
        held = Counter(job.id for job in [*self._line, *self._placed.values()])
        if held != Counter(self._jobs.keys()):
            wrong.append(f"jobs {sorted(self._jobs)}, but in line or placed {sorted(held.items())}")
        if len(self._placed) > self.max_batch_size:
            wrong.append(f"{len(self._placed)} jobs in {self.max_batch_size} places")
        if self._line != sorted(self._line, key=_line_order):
            wrong.append("the line is out of order")
        waiting = sum(job.state is State.WAITING for job in self._line)
        if waiting > self.max_queue:
            wrong.append(f"{waiting} jobs in a queue of {self.max_queue}")
        wrong += [
            f"job {job.id} is {job.state.value}, placed: {job.id in self._placed}, "
            f"left: {job.left}, known as {key}"
            for key, job in self._jobs.items()
            if job.id != key
            or job.state is State.DONE
            or (job.state in PLACED) != (job.id in self._placed)
            or (job.state is State.RUNNING and job.left)
        ]
        if wrong:
            raise AssertionError("; ".join(wrong))

    # ---- how it is done

    def _leave(self, job: Job) -> None:
        if job.state in PLACED:
            del self._placed[job.id]
        else:
            self._line.remove(job)

    def _enter(self, job: Job) -> None:
        if job.state is State.DONE:
            del self._jobs[job.id]
        elif job.state not in PLACED:
            insort(self._line, job, key=_line_order)
        else:
            self._placed[job.id] = job
            if job.state is State.PREFILLING:
                job.moved_step = self._step

    def _readers(self, placed: list[Job]) -> list[_Reader]:
        """Choose whom a step may read: of those with the same next block, the first."""
        leaders: dict[bytes, Job] = {}
        moved: dict[Job, int] = {}
        restored = self.restoring_hashes()
        for job in placed:
            same = job.next_block_hash
            if job.state is State.PREFILLING and job.left and same not in restored:
                leader = job if same is None else leaders.setdefault(same, job)
                moved[leader] = min(job.moved_step, moved.get(leader, job.moved_step))
        return [_Reader(job, step) for job, step in moved.items()]

    def _prefill(self, readers: list[_Reader]) -> tuple[PrefillChunk, ...]:
        """Deal the budget out; each offer is a job and the tokens that it may have so far."""
        tokens = dict.fromkeys((reader.job.id for reader in readers), 0)
        unspent = self.budget_tokens
        for job, most in self._offers(readers):
            given = tokens[job.id]
            tokens[job.id] = max(given, self._whole(job, min(most, given + unspent)))
            unspent -= tokens[job.id] - given
        return tuple(PrefillChunk(job_id, count) for job_id, count in tokens.items() if count)

    def _offers(self, readers: list[_Reader]) -> list[tuple[Job, int]]:
        if not readers:
            return []
        budget, first = self.budget_tokens, readers[0].job
        half = self._whole(first, min(budget, self._rounded_up(first, (budget + 1) // 2)))
        others = [reader.job for reader in sorted(readers[1:], key=self._turn)]
        offers = [(first, half), *((job, budget) for job in others), (first, budget)]
        if not others or self._whole(others[0], budget - half):
            return offers
        if self._crowded_step == self._step - 1:  # now it is the others' turn
            return [(others[0], self._rounded_up(others[0], 1)), (first, budget), *offers]
        self._crowded_step = self._step
        return offers

    def _turn(self, reader: _Reader) -> tuple[bool, int]:
        """The key that orders the others: who has not got on for too long, then least served."""
        overlooked = self._step - reader.moved_step >= self.max_batch_size
        return (not overlooked, reader.moved_step if overlooked else reader.job.served)

    def _whole(self, job: Job, tokens: int) -> int:
        """Return how long a chunk of at most `tokens` can be: it ends at a block, or the prompt."""
        if tokens >= job.left:
            return job.left
        return max(0, tokens - (job.position + tokens) % self.block_size)

    def _rounded_up(self, job: Job, tokens: int) -> int:
        """Return how long a chunk of at least `tokens` must be, if the prompt is that long."""
        return min(job.left, tokens + -(job.position + tokens) % self.block_size)


def _order(job: Job) -> tuple[int, int, int]:
    return (-job.priority, job.arrived, job.id)


def _line_order(job: Job) -> tuple[int, bool, int, int]:
    return (-job.priority, job.state is State.WAITING, job.arrived, job.id)


def _check_numbers(job_id: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"{name} of job {job_id} must not be negative: {value}")


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value
