"""Fair shares of the batch slots, by client and then by request.

`unfair_shares` states the rules again, from the sequences alone. Schedulers that break one rule
each are run until it fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_scheduler import (
    QUICK,
    SOAK,
    Item,
    Simulation,
    admitted,
    item,
    known,
    make,
    read,
    shares,
)

from penstock.engine.schedule import fair_shares
from penstock.engine.schedule.fair_shares import (
    EARLY_WORK,
    GENERATED_WORK,
    TURN_WORK,
    FairShares,
)
from penstock.engine.schedule.scheduler import PLACED, Scheduler, State

TURN_STEPS = TURN_WORK // GENERATED_WORK
SHORT_STEPS = 5


def of(simulation: Simulation, *states: State) -> list[Item]:
    return [simulation.jobs[job_id] for job_id in simulation.of(*states)]


def places(simulation: Simulation, level: int) -> Counter[object]:
    """Count the slots per client (1) or per request (3)."""
    return Counter(job.owners[:level] for job in of(simulation, *PLACED))


def unfair_shares(simulation: Simulation) -> list[str]:
    """List sequences that wait beside a lower priority, or a share with two more slots."""
    found = []
    placed = of(simulation, *PLACED)
    for job in of(simulation, State.WAITING, State.PREEMPTED):
        for other in placed:
            if other.priority > job.priority:
                continue
            if other.priority < job.priority:
                found.append(f"{job.owners} waits beside a lower priority")
                continue
            level = next((n for n in (1, 3) if other.owners[:n] != job.owners[:n]), None)
            if level is None:
                continue
            held = places(simulation, level)
            if held[other.owners[:level]] >= held[job.owners[:level]] + 2:
                found.append(f"{job.owners} waits with {held}")
    return found


def steps_until_placed(simulation: Simulation, job_id: int, most: int = 10_000) -> int:
    """Return the number of steps before a sequence gets its first slot."""
    for step in range(most):
        simulation.step()
        if job_id not in simulation.states or simulation.states[job_id] in PLACED:
            return step
    raise AssertionError(f"job {job_id} starves")


def serving(count: int, *, n: int, cls: type[Scheduler[Item]] = Scheduler) -> Simulation:
    """Return an engine with eight slots and running requests of `n` long answers."""
    simulation = Simulation(make(8, 512, 32, 1_000, cls=cls))
    for number in range(count):
        simulation.submit(range(number * 100, number * 100 + 40), n=n, outputs=400, client="a")
    for _ in range(20):
        simulation.step()
    return simulation


@pytest.mark.parametrize("client", ["a", "b"])
@pytest.mark.parametrize(("count", "n"), [(1, 128), (2, 128), (4, 2)])
def test_new_request_preempts_client_with_many_answers(count: int, n: int, client: str) -> None:
    simulation = serving(count, n=n)
    assert len(of(simulation, State.RUNNING)) == 8
    (short,) = simulation.submit(range(900, 910), outputs=2, client=client)
    assert steps_until_placed(simulation, short) == 0
    assert simulation.preemptions == 1


def test_new_request_overtakes_waiting_answers_of_same_client() -> None:
    simulation = Simulation(make(8, 512, 32, 1_000))
    for number, client in enumerate("ab"):
        simulation.submit(range(100 * number, 100 * number + 40), n=128, outputs=400, client=client)
    for _ in range(20):
        simulation.step()
    for number, client in enumerate("ab"):
        (short,) = simulation.submit([-number - 1] * 10, outputs=2, client=client)
        assert steps_until_placed(simulation, short) == 0
        assert places(simulation, 1) == {("a",): 4, ("b",): 4}


def test_client_with_many_requests_gets_half_of_slots() -> None:
    simulation = serving(20, n=1)
    for number in range(9):
        simulation.submit(range(5_000 + 50 * number, 5_030 + 50 * number), client="b")
    simulation.step()
    assert places(simulation, 1) == {("a",): 4, ("b",): 4}


def test_cache_salts_of_one_client_share_equally() -> None:
    scheduler = make(4)
    line = [item(number) for number in range(6)]
    for job, salt in zip(line, "xxxxxy", strict=True):
        job.salt = salt
    scheduler.add(*line)
    admitted_ids = []
    while scheduler.free_places and (following := scheduler.next_in_line()) is not None:
        admitted_ids.append(following.id)
        scheduler.act(following, "admit")
    assert admitted_ids == [0, 5, 1, 2]


def test_long_answer_in_single_slot_is_preempted_by_short_ones() -> None:
    simulation = Simulation(make(1, 512, 32))
    (long,) = simulation.submit(range(40), outputs=4_000)
    simulation.step()
    for number in range(20):
        (short,) = simulation.submit([-number - 1] * 10, outputs=2)
        assert steps_until_placed(simulation, short) <= TURN_STEPS
        assert steps_until_placed(simulation, long) <= 3
    assert simulation.preemptions == 20


def test_turn_of_long_prompt_begins_after_one_turn_of_work() -> None:
    simulation = Simulation(make(1, 512, 32))
    simulation.submit(range(40), outputs=4_000)
    simulation.step()
    (long,) = simulation.submit(range(1_000, 5_000), outputs=2)
    steps = steps_until_placed(simulation, long)
    assert 4_000 // GENERATED_WORK - 10 <= steps <= 4_000 // GENERATED_WORK


def test_recomputation_is_at_most_half_of_work() -> None:
    simulation = Simulation(make(1, 32, 32))
    for number in range(2):
        simulation.submit(range(1_000 * number, 1_000 * number + 640), outputs=200)
    preemptions, answers = 0, 2 * 200 * GENERATED_WORK
    while simulation.states:
        simulation.step()
        if simulation.preemptions > preemptions:
            preemptions = simulation.preemptions
            simulation.tree.clear()  # memory has no room for both
        first_time, last_turns = 2 * 640, 2 * 640
        assert simulation.read_tokens <= first_time + answers + last_turns
    assert preemptions > 1


def test_short_new_request_may_end_turn_early() -> None:
    scheduler = make()
    long, short = item(1, left=9_000), item(2, left=100)
    admitted(scheduler, long)
    scheduler.add(short, item(3, left=TURN_WORK + 1), item(4, priority=-1))
    assert scheduler.to_preempt_early(short) == [], "it has just begun"
    read(scheduler, scheduler.plan())
    assert scheduler.to_preempt_early(short) == [long]
    assert scheduler.to_preempt(short) == [long], "512 tokens are a turn"
    for other in (3, 4):
        waiting = known(scheduler, other)
        assert scheduler.to_preempt_early(waiting) == [], "too long, or of a lower priority"
    scheduler.act(short, "admit")
    scheduler.act(short, "preempt")
    assert scheduler.to_preempt_early(short) == [], "once"
    admitted(scheduler, *(item(number, left=9_000) for number in (5, 6, 7)))
    scheduler.add(another := item(8, left=100))
    assert scheduler.to_preempt_early(another) == [], "places are short, not memory"


def test_interrupted_turn_is_continued() -> None:
    """Recomputed work is offset by as much new work, up to one turn."""
    scheduler = make(prefill_chunk=64)
    long, short = item(1, left=800), item(2, left=100)
    admitted(scheduler, long)
    scheduler.act(long, "preempt")
    scheduler.act(long, "admit")
    for _ in range(3):
        for _ in range(2):
            read(scheduler, scheduler.plan())
        scheduler.act(long, "preempt")
        scheduler.act(long, "admit")
    scheduler.add(short)
    while long.state is State.PREFILLING:
        assert bool(scheduler.to_preempt_early(short)) is (
            long.remaining_tokens > TURN_WORK and long.served_tokens >= 384 + EARLY_WORK
        )
        read(scheduler, scheduler.plan())
    while not scheduler.to_preempt_early(short):
        long.generated_tokens += 1
    assert long.generated_tokens == TURN_STEPS, "800 tokens were read before, and 256 are new"
    assert scheduler.to_preempt(short) == []
    long.generated_tokens = 800 // GENERATED_WORK
    assert scheduler.to_preempt(short) == [long]


def test_many_waiting_requests_cause_no_preemption() -> None:
    """Their KV would evict each other."""
    simulation = serving(8 + 9, n=1)
    for _ in range(200):
        simulation.step()
    assert simulation.preemptions == 0


def test_equal_shares_are_ordered_by_least_work() -> None:
    scheduler = make(1)
    mine = [item(number, client="a", group=number) for number in range(3)]
    theirs = [item(10 + number, client="b", group=10 + number) for number in range(3)]
    scheduler.add(*mine, *theirs)
    order = []
    while (job := scheduler.next_in_line()) is not None:
        order.append(job.id)
        scheduler.act(job, "admit")
        job.generated_tokens += 30 if job.client == "a" else 10
        scheduler.act(job, "finish")
    assert order == [0, 10, 11, 12, 1, 2]


def test_idle_time_earns_no_credit() -> None:
    scheduler = make(1)
    first, second = item(1, client="a"), item(2, client="a")
    admitted(scheduler, first)
    first.generated_tokens = 1_000
    scheduler.add(second, late := item(3, client="b"), item(4, client="b"))
    scheduler.act(first, "finish")
    assert scheduler.next_in_line() is second, "both have as much work: the first to arrive"
    scheduler.act(second, "admit")
    second.generated_tokens = 1
    scheduler.act(second, "finish")
    assert scheduler.next_in_line() is late


@pytest.mark.parametrize(
    ("work", "prefilled", "continues"),
    [(TURN_WORK - 1, False, True), (TURN_WORK - 1, True, False), (TURN_WORK, False, False)],
)
def test_turn_continues_only_if_preempted_during_prefill(
    work: int, *, prefilled: bool, continues: bool
) -> None:
    """A preempted sequence that had read its prompt, or done a turn, has a whole turn again."""
    turns: FairShares[Item] = FairShares()
    served, waiting = item(1, client="a"), item(2, client="b")
    for job in (served, waiting):
        turns.open(job)
    turns.begin_turn(served, again=False)
    served.served_tokens = work
    turns.end_turn(served, prefilled=prefilled)
    turns.begin_turn(served, again=True)
    served.served_tokens += 1
    assert turns.to_preempt(waiting, [served]) == ([served] if continues else [])
    served.served_tokens += TURN_WORK - 1
    assert turns.to_preempt(waiting, [served]) == [served]


def test_share_is_dropped_with_its_last_sequence() -> None:
    simulation = Simulation(make(2, 512, 32))
    for client in "aab":
        simulation.submit(range(40), n=2, outputs=3, client=client)
    simulation.finish()
    shares = simulation.scheduler._shares
    assert list(shares._shares) == [()]
    assert (shares._turns, shares._shares[()].children) == ({}, set())


def test_largest_share_is_preempted_when_memory_is_full() -> None:
    scheduler = make()
    jobs = [item(1, group=1), item(2, group=2), item(3, group=2), item(4)]
    admitted(scheduler, *jobs)
    assert scheduler.lowest() is jobs[2]
    scheduler.act(jobs[2], "preempt")
    assert scheduler.lowest() is jobs[3]
    admitted(scheduler, low := item(0, -1))
    assert scheduler.lowest() is low


@pytest.mark.parametrize("client", ["a", "b"])
def test_short_prompt_is_prefilled_beside_many_long_prompts(client: str) -> None:
    """It is prefilled in the step that admits it."""
    scheduler = make(8)
    long = [item(number, left=9_000, client="a", group=0) for number in range(7)]
    admitted(scheduler, *long)
    long[0].position, long[0].served_tokens, long[0].remaining_tokens = 512, 512, 8_488
    admitted(scheduler, item(9, left=100, client=client))
    assert shares(scheduler.plan())[9] == 100


def test_prompt_of_skipped_request_is_prefilled_next() -> None:
    scheduler = make(3)
    admitted(scheduler, *(item(number, left=9_000, client="a", group=0) for number in range(2)))
    for number in range(2, 12):
        short = item(number, left=300, client="b")
        admitted(scheduler, short)
        plan = scheduler.plan()
        if 1 in shares(plan):
            return
        read(scheduler, plan)
        scheduler.act(short, "finish")
    raise AssertionError("the second prompt is never read")


# ---- any requests


@dataclass(frozen=True)
class Ask:
    """A request, and the number of steps until the next one arrives."""

    client: str
    prompt_tokens: int
    n: int
    outputs: int
    priority: int
    steps: int


@contextmanager
def short_turns() -> Iterator[None]:
    """Shorten turns to the length of the answers here."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(fair_shares, "TURN_WORK", SHORT_STEPS * GENERATED_WORK)
        yield


asks = st.builds(
    Ask,
    client=st.sampled_from("abc"),
    prompt_tokens=st.integers(1, 30),
    n=st.sampled_from([1, 1, 2, 5]),
    outputs=st.integers(1, 16),
    priority=st.sampled_from([0, 0, 0, 1]),
    steps=st.integers(0, 8),
)


def run(requests: list[Ask], batch: int, cls: type[Scheduler[Item]] = Scheduler) -> list[list[int]]:
    """Run all requests to their end; return the sequences in slots at each step."""
    simulation = Simulation(make(batch, 64, 4, 1_000, cls=cls))
    log: list[list[int]] = []
    bound = sum(ask.n + ask.n * ask.outputs // SHORT_STEPS for ask in requests)

    def step() -> None:
        simulation.admit()
        assert not (simulation.scheduler.free_places and simulation.scheduler.in_line())
        assert unfair_shares(simulation) == []
        log.append([job.id for job in of(simulation, *PLACED)])
        simulation.step()
        simulation.check()
        assert simulation.preemptions <= bound, "sequences are preempted for nothing"

    for ask in requests:
        tokens = [-next(simulation.numbers)] * ask.prompt_tokens
        simulation.submit(tokens, ask.priority, ask.n, ask.outputs, client=ask.client)
        for _ in range(ask.steps):
            step()
    while simulation.states:
        step()
    return log


CROWD = [Ask("a", 30, 9, 20, 0, 8), Ask("b", 10, 1, 2, 0, 1), Ask("a", 10, 1, 2, 0, 1)]
URGENT = [Ask("a", 1, 1, 1, 0, 0), Ask("a", 1, 2, 1, 0, 1), Ask("a", 1, 1, 1, 1, 0)]
"""The last one has a higher priority than those that fill three places."""


FEW = settings(QUICK, max_examples=1_000 if SOAK else 20)


@FEW
@given(requests=st.lists(asks, max_size=5), batch=st.integers(1, 4))
@example(requests=CROWD, batch=4)
@example(requests=URGENT, batch=3)
def test_scheduler_shares_slots_fairly_with_few_preemptions(
    requests: list[Ask], batch: int
) -> None:
    with short_turns():
        assert run(requests, batch) == run(requests, batch)


LATE = [Ask("a", 16, 1, 1, 0, 0), Ask("a", 7, 5, 1, 0, 0), Ask("b", 21, 2, 1, 0, 0)]
LATE += [Ask("b", 10, 1, 1, 0, 0), Ask("b", 3, 1, 1, 0, 0), Ask("c", 30, 1, 1, 0, 0)]


def admit_in_time(requests: list[Ask], batch: int, cls: type[Scheduler[Item]] = Scheduler) -> None:
    """Run endless answers until each request has had its first slot.

    Clients take turns, and the requests of a client take its turns: a request waits at most as many
    turns as its client has requests, and as long for each other client.
    """
    simulation = Simulation(make(batch, 64, 4, 1_000, cls=cls))
    firsts = []
    for ask in requests:
        tokens = [-next(simulation.numbers)] * ask.prompt_tokens
        firsts.append(simulation.submit(tokens, 0, ask.n, 100_000, client=ask.client)[0])
    asked = Counter(ask.client for ask in requests)
    turn = SHORT_STEPS + 3  # and the steps in which prompts are read, again after a preemption
    late = {
        first: len(asked) * asked[ask.client] * turn
        for first, ask in zip(firsts, requests, strict=True)
    }
    for step in range(max(late.values()) + 1):
        simulation.step()
        for first, most in late.items():
            waits = simulation.states[first] is State.WAITING
            assert not (waits and step >= most), f"job {first} starves"


@FEW
@given(requests=st.lists(asks, min_size=1, max_size=8), batch=st.integers(1, 4))
@example(requests=LATE, batch=1)
def test_every_request_is_admitted_in_bounded_time(requests: list[Ask], batch: int) -> None:
    with short_turns():
        admit_in_time(requests, batch)


# ---- negative controls


class FirstComeFirstServed(Scheduler[Item]):
    def next_in_line(self) -> Item | None:
        return self._line[0] if self._line else None

    def to_preempt(self, sequence: Item) -> list[Item]:
        return []


class PreemptsForNothing(Scheduler[Item]):
    def to_preempt(self, sequence: Item) -> list[Item]:
        others = [job for job in self.placed() if job.owners != sequence.owners]
        return [job for job in others if self._shares._turns[job.id].work][:1]


class TakesTurnsByRequest(Scheduler[Item]):
    def next_in_line(self) -> Item | None:
        return min(self._line, key=lambda job: (job.generated_tokens, job.id), default=None)


class KeepsLowerPriorities(Scheduler[Item]):
    def to_preempt(self, sequence: Item) -> list[Item]:
        victims = super().to_preempt(sequence)
        return [other for other in victims if other.priority == sequence.priority]


@pytest.mark.parametrize(
    ("broken", "requests", "batch", "fault"),
    [
        (FirstComeFirstServed, CROWD, 4, "waits with"),
        (PreemptsForNothing, CROWD, 4, "waits with|for nothing"),
        (KeepsLowerPriorities, URGENT, 3, "waits beside a lower priority"),
    ],
)
def test_check_detects_unfair_shares(
    broken: type[Scheduler[Item]], requests: list[Ask], batch: int, fault: str
) -> None:
    with short_turns(), pytest.raises(AssertionError, match=fault):
        run(requests, batch, broken)


def test_check_detects_starvation_by_many_answers() -> None:
    simulation = serving(1, n=128, cls=FirstComeFirstServed)
    (short,) = simulation.submit(range(900, 910), outputs=2, client="b")
    with pytest.raises(AssertionError, match="starves"):
        steps_until_placed(simulation, short, 100)


@pytest.mark.parametrize("broken", [FirstComeFirstServed, TakesTurnsByRequest])
def test_check_detects_late_requests(broken: type[Scheduler[Item]]) -> None:
    with short_turns(), pytest.raises(AssertionError, match="starves"):
        admit_in_time(LATE, 1, broken)
