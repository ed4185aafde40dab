"""The scheduler: its state table, order, and prefill shares.

The rules of a plan stand once more in `faults`, told from the sequences alone; `Simulation` is an
engine without a model, whose tree is a set of names. A state machine drives it, and schedulers
that break one rule each drive it until it fails.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from chunk_speeds import TokenASecond
from combinations import pairs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.config import EngineSettings
from penstock.engine.schedule import fair_shares, queue_shares, step_time
from penstock.engine.schedule import scheduler as module
from penstock.engine.schedule.scheduler import (
    NEXT,
    Event,
    PrefillChunk,
    Scheduler,
    SchedulerSequence,
    State,
    StepPlan,
    next_state,
)
from penstock.engine.schedule.step_time import SLACK, StepTime
from penstock.errors import PenstockError, QueueFull, UnknownSequence

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
QUICK = settings(
    max_examples=1_000 if SOAK else 80,
    stateful_step_count=80 if SOAK else 40,
    derandomize=not SOAK,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
EVENTS: tuple[Event, ...] = ("admit", "prefilled", "preempt", "finish")


@dataclass(eq=False, slots=True, kw_only=True)
class Item:
    """The fields of a sequence that the scheduler reads."""

    id: int
    priority: int = 0
    deadline_seconds: float | None = None
    remaining_tokens: int = 0
    position: int = 0
    next_block_hash: bytes | None = None
    ready: bool = True
    served_tokens: int = 0
    generated_tokens: int = 0
    state: State = State.WAITING
    client: str = ""
    salt: str = ""
    group: int | None = None
    """Number of the request; None for a request of its own."""

    @property
    def owners(self) -> tuple[str | int, ...]:
        return (self.client, self.salt, self.id if self.group is None else self.group)


Items = Sequence[Item]
IS_ENOUGH: type[SchedulerSequence] = Item


def item(id: int, priority: int = 0, *, left: int = 0, served: int = 0, **more: Any) -> Item:
    return Item(id=id, priority=priority, remaining_tokens=left, served_tokens=served, **more)


def make(
    max_batch_size: int = 4,
    prefill_chunk: int = 512,
    block_size: int = 64,
    max_queue: int = 100,
    cls: type[Scheduler[Item]] = Scheduler,
) -> Scheduler[Item]:
    """Return a scheduler whose steps have the tokens of one chunk, or of one longer block."""
    return cls(max_batch_size, max(prefill_chunk, block_size), block_size, max_queue)


def known(scheduler: Scheduler[Item], item_id: int) -> Item:
    return scheduler._sequences[item_id]


def act(scheduler: Scheduler[Item], item_id: int, event: Event) -> State:
    return scheduler.act(known(scheduler, item_id), event)


def admitted(scheduler: Scheduler[Item], *items: Item) -> None:
    """Add the sequences and give each a slot."""
    for added in items:
        scheduler.add(added)
        scheduler.act(added, "admit")


def get_on(
    scheduler: Scheduler[Item],
    item_id: int,
    *,
    position: int,
    left: int,
    next_block_hash: bytes | None = None,
    served: int = 0,
) -> None:
    """Set the position and the remaining tokens of a sequence."""
    moved = known(scheduler, item_id)
    moved.position, moved.remaining_tokens = position, left
    moved.next_block_hash = next_block_hash
    moved.served_tokens += served


def read(scheduler: Scheduler[Item], plan: StepPlan[Item]) -> None:
    """Apply the prefill part of a plan; nothing is shared."""
    for chunk in plan.prefill:
        moved = chunk.sequence
        moved.position += chunk.tokens
        moved.remaining_tokens -= chunk.tokens
        moved.served_tokens += chunk.tokens
        moved.next_block_hash = None
        if not moved.remaining_tokens:
            scheduler.act(moved, "prefilled")


def shares(plan: StepPlan[Item]) -> dict[int, int]:
    return {chunk.sequence.id: chunk.tokens for chunk in plan.prefill}


def time_for(tokens: int | None, *, whole_blocks: bool = False) -> StepTime | None:
    return None if tokens is None else StepTime(tokens, TokenASecond(), whole_blocks)


def ids(items: Items) -> list[int]:
    return [each.id for each in items]


def told(plan: StepPlan[Item]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the decoding sequences, and the prefill chunks as (sequence, tokens), in order."""
    return ids(plan.decode), [(chunk.sequence.id, chunk.tokens) for chunk in plan.prefill]


# ---- the table of states


def test_every_event_is_in_transition_table_or_refused() -> None:
    for state, event in product(State, EVENTS):
        if (state, event) in NEXT:
            assert next_state(state, event) is NEXT[state, event]
        else:
            with pytest.raises(
                ValueError, match=f"'{event}' is not allowed in state '{state.value}'"
            ):
                next_state(state, event)


def test_transition_table_matches_diagram() -> None:
    recurrent_states = {
        "admit prefilled finish": State.DONE,
        "admit prefilled preempt admit prefilled": State.RUNNING,
        "admit preempt admit": State.PREFILLING,
        "admit preempt finish": State.DONE,
        "admit finish": State.DONE,
        "finish": State.DONE,
    }
    for life, end in recurrent_states.items():
        state = State.WAITING
        for event in life.split():
            state = next_state(state, event)  # type: ignore[arg-type]
        assert state is end
    assert not any(state is State.DONE for state, _ in NEXT)
    assert all((state, "finish") in NEXT for state in State if state is not State.DONE)


def test_sequence_passes_through_states_to_done() -> None:
    scheduler, job = make(), item(7, left=100)
    scheduler.add(job)
    assert scheduler.sequences(State.WAITING) == [job]
    assert act(scheduler, 7, "admit") is State.PREFILLING
    assert (scheduler.sequences(State.WAITING), scheduler.sequences(State.PREFILLING)) == (
        [],
        [job],
    )
    get_on(scheduler, 7, position=100, left=0, served=100)
    assert act(scheduler, 7, "prefilled") is State.RUNNING
    assert act(scheduler, 7, "preempt") is State.PREEMPTED
    assert scheduler.in_line() == [job]
    assert act(scheduler, 7, "admit") is State.PREFILLING
    assert act(scheduler, 7, "finish") is State.DONE
    assert (len(scheduler), job.state, job.served_tokens) == (0, State.DONE, 100)
    with pytest.raises(UnknownSequence, match="sequence 7 is not one of the 0 active"):
        scheduler.act(job, "finish")
    scheduler.check()


def test_fully_cached_prompt_runs_without_prefill() -> None:
    scheduler = make()
    admitted(scheduler, item(1, position=64))
    assert scheduler.plan() == StepPlan((), ())
    act(scheduler, 1, "prefilled")
    assert told(scheduler.plan()) == ([1], [])


@pytest.mark.parametrize("event", ["prefilled", "preempt"])
def test_illegal_event_changes_nothing(event: Event) -> None:
    scheduler, job = make(), item(1)
    scheduler.add(job)
    with pytest.raises(ValueError, match=f"'{event}' is not allowed in state 'waiting'"):
        act(scheduler, 1, event)
    assert scheduler.in_line() == [job]
    scheduler.check()


def test_prefill_ends_when_no_tokens_remain() -> None:
    scheduler = make()
    admitted(scheduler, item(1, left=1))
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens left"):
        act(scheduler, 1, "prefilled")
    get_on(scheduler, 1, position=1, left=0)
    act(scheduler, 1, "prefilled")
    get_on(scheduler, 1, position=0, left=5)
    with pytest.raises(AssertionError, match="1 is running, placed: True, remaining: 5"):
        scheduler.check()
    act(scheduler, 1, "preempt")
    scheduler.check()


def test_slots_are_never_exceeded() -> None:
    scheduler = make(max_batch_size=2)
    admitted(scheduler, item(1), item(2))
    act(scheduler, 2, "prefilled")
    late = item(3, priority=9)
    scheduler.add(late)
    assert (scheduler.free_places, scheduler.in_line()) == (0, [late])
    with pytest.raises(ValueError, match="sequence 3 cannot be admitted: all 2 places"):
        act(scheduler, 3, "admit")
    assert late.state is State.WAITING
    scheduler.check()
    act(scheduler, 1, "preempt")
    act(scheduler, 3, "admit")
    scheduler.check()


# ---- the queue


def test_queue_may_be_filled_but_not_exceeded() -> None:
    scheduler = make(max_batch_size=1, max_queue=2)
    admitted(scheduler, item(0))
    scheduler.add(item(1))
    scheduler.add(item(2))
    with pytest.raises(QueueFull, match="2 waiting, 1 more requested, max_queue 2") as e:
        scheduler.add(item(3))
    assert (e.value.waiting, e.value.added, e.value.max_queue) == (2, 1, 2)
    assert e.value.status == 429
    assert isinstance(e.value, PenstockError)
    assert len(scheduler) == 3
    act(scheduler, 0, "preempt")
    act(scheduler, 1, "admit")
    scheduler.add(item(3))  # the preempted one is in line, and not in the queue
    scheduler.check()


def test_refused_add_queues_no_sequence() -> None:
    scheduler = make(max_queue=3)
    scheduler.add(item(1))
    with pytest.raises(QueueFull, match="1 waiting, 3 more requested"):
        scheduler.add(item(2), item(3), item(4))
    with pytest.raises(ValueError, match="sequence 2 is not new"):
        scheduler.add(item(2), item(2))
    with pytest.raises(ValueError, match="sequence 1 is not new"):
        scheduler.add(item(2), item(1))
    assert ids(scheduler.in_line()) == [1]
    scheduler.add(item(2), item(3))
    assert ids(scheduler.in_line()) == [1, 2, 3]


def test_invalid_numbers_are_refused() -> None:
    scheduler = make()
    with pytest.raises(ValueError, match="remaining_tokens of sequence 1 must not be negative: -1"):
        scheduler.add(item(1, left=-1))
    with pytest.raises(ValueError, match="not new"):
        scheduler.add(item(1, state=State.RUNNING))
    waiting = item(1, left=3)
    scheduler.add(waiting)
    for name in ("position", "remaining_tokens", "served_tokens"):
        before = getattr(waiting, name)
        setattr(waiting, name, -1)
        with pytest.raises(AssertionError, match=f"{name} of sequence 1 must not be negative: -1"):
            scheduler.check()
        setattr(waiting, name, before)
    with pytest.raises(UnknownSequence, match="sequence 2 is not one of the 1 active"):
        scheduler.act(item(2), "admit")
    with pytest.raises(UnknownSequence, match="sequence 1 is not one of the 1 active"):
        scheduler.act(item(1), "admit")  # another one of that number
    numbers = {"max_batch_size": 1, "budget_tokens": 1, "block_size": 1, "max_queue": 1}
    Scheduler(**numbers)
    for name in numbers:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            Scheduler(**{**numbers, name: 0})
    with pytest.raises(ValueError, match="budget_tokens 63 is less than a block of 64 tokens"):
        Scheduler(4, 63, 64, 1)


def test_order_is_priority_then_preempted_then_arrival() -> None:
    scheduler = make(max_batch_size=3)
    scheduler.add(item(1), item(2), item(3, priority=-1))
    for job_id in (2, 3):
        act(scheduler, job_id, "admit")
        act(scheduler, job_id, "preempt")
    scheduler.add(item(4, priority=5), item(6), item(5))
    assert ids(scheduler.in_line()) == [4, 2, 1, 5, 6, 3]
    assert ids(scheduler.sequences(State.WAITING)) == [4, 1, 5, 6]
    assert ids(scheduler.sequences(State.PREEMPTED)) == [2, 3]
    scheduler.in_line().clear()
    assert len(scheduler.in_line()) == 6


def test_overdue_sequences_are_reported_in_every_state() -> None:
    scheduler = make(max_batch_size=4)
    states: list[list[Event]] = [
        [],
        ["admit"],
        ["admit", "prefilled"],
        ["admit", "preempt"],
        ["finish"],
    ]
    for job_id, events in enumerate(states):
        scheduler.add(item(job_id, deadline_seconds=10.0 + job_id))
        for event in events:
            act(scheduler, job_id, event)
    scheduler.add(item(9))
    assert scheduler.overdue(9.9) == []
    assert ids(scheduler.overdue(10.0)) == [0]
    assert ids(scheduler.overdue(12.5)) == [0, 1, 2]
    assert ids(scheduler.overdue(1e9)) == [0, 1, 2, 3]


def test_preemption_victims_are_ordered_by_priority_and_arrival() -> None:
    scheduler = make(max_batch_size=6)
    low = [item(1), item(2, -1), item(3), item(0, -1)]
    admitted(scheduler, *low, item(5, 1))
    act(scheduler, 3, "prefilled")
    scheduler.add(item(6, -5))
    assert ids(scheduler.to_preempt(item(7, priority=1))) == [2, 0, 3, 1]
    assert ids(scheduler.to_preempt(item(7, priority=0))) == [2, 0]
    assert scheduler.to_preempt(item(7, priority=-1)) == []
    assert ids(scheduler.to_preempt(item(7, priority=2))) == [2, 0, 3, 1, 5]


# ---- what a step reads


def test_running_sequences_decode_and_only_prompt_gets_whole_budget() -> None:
    scheduler = make()
    admitted(scheduler, item(1), item(2), item(3, left=1_000))
    act(scheduler, 2, "prefilled")
    assert told(scheduler.plan()) == ([2], [(3, 512)])
    act(scheduler, 1, "prefilled")
    assert told(scheduler.plan()) == ([1, 2], [(3, 512)])
    read(scheduler, scheduler.plan())
    assert told(scheduler.plan()) == ([1, 2], [(3, 488)])  # its last: it may end anywhere
    read(scheduler, scheduler.plan())
    assert told(scheduler.plan()) == ([1, 2, 3], [])


def test_prefill_chunk_is_limited_while_others_decode() -> None:
    scheduler = make()
    admitted(scheduler, item(1, left=1_000), item(2))
    assert shares(scheduler.plan(time_for(200))) == {1: 512}, "nobody waits"
    assert shares(scheduler.plan(time_for(200), shared=True)) == {1: 192}
    act(scheduler, 2, "prefilled")
    assert shares(scheduler.plan(time_for(200))) == {1: 192}
    assert shares(scheduler.plan(time_for(9_999))) == shares(scheduler.plan()) == {1: 512}


def test_prefill_step_time_is_bounded_without_decodes() -> None:
    scheduler = make()
    admitted(scheduler, item(1, left=1_000), item(2, left=1_000))
    time = StepTime(100, TokenASecond(), alone_seconds=300)
    assert shares(scheduler.plan(time)) == {1: 192, 2: 64}
    read(scheduler, scheduler.plan(time))
    admitted(scheduler, item(3, left=40))
    assert shares(scheduler.plan(time)) == {1: 64}, "3 is soon at its end: the next step is short"
    read(scheduler, scheduler.plan(time))
    assert shares(scheduler.plan(time)) == {3: 40}
    read(scheduler, scheduler.plan(time))
    assert shares(scheduler.plan(time)) == {1: 64}, "it decodes"
    act(scheduler, 3, "finish")
    assert shares(scheduler.plan(time)) == {1: 192, 2: 64}


def test_prompts_of_one_request_share_chunk() -> None:
    scheduler = make()
    admitted(scheduler, item(1, left=1_000, group=1), item(2, left=40, group=1))
    time = StepTime(100, TokenASecond(), alone_seconds=300)
    assert shares(scheduler.plan(time)) == {1: 256, 2: 40}


def test_mixed_pass_prefills_all_short_prompts_together() -> None:
    for one_pass, expected in ((True, {1: 40, 2: 40, 3: 40}), (False, {1: 40, 2: 40})):
        scheduler = make()
        admitted(scheduler, *(item(number, left=40) for number in (1, 2, 3)))
        time = StepTime(100, TokenASecond(), alone_seconds=300, one_pass=one_pass)
        assert shares(scheduler.plan(time)) == expected
        admitted(scheduler, item(4, left=1_000))
        assert shares(scheduler.plan(time)) == {1: 40, 2: 40}, "the short ones end first"


def test_fixed_cost_of_mixed_pass_is_counted_once() -> None:
    class Overhead(TokenASecond):
        def chunk_seconds(self, tokens: int, start: int) -> float:
            return 50 + tokens

        def tokens_within(self, seconds: float, start: int, most: int) -> int:
            return max(0, min(most, int(seconds) - 50))

    for one_pass, expected in ((True, {1: 30, 2: 30, 3: 30}), (False, {1: 30})):
        scheduler = make()
        admitted(scheduler, item(0), *(item(number, left=30) for number in (1, 2, 3)))
        act(scheduler, 0, "prefilled")
        time = StepTime(150, Overhead(), one_pass=one_pass)
        assert shares(scheduler.plan(time)) == expected


def test_chunk_of_only_prompt_follows_measured_prefill_rate() -> None:
    class Worth(TokenASecond):
        def tokens_worth(self, start: int) -> int:
            return 300

    scheduler = make()
    admitted(scheduler, item(1, left=1_000))
    time = StepTime(100, Worth(), alone_seconds=100)
    assert shares(scheduler.plan(time)) == {1: 256}
    admitted(scheduler, item(2))
    act(scheduler, 2, "prefilled")
    assert shares(scheduler.plan(time)) == {1: 64}, "another waits"


def test_partial_block_is_prefilled_when_whole_takes_too_long() -> None:
    scheduler = make()
    admitted(scheduler, item(1, left=1_000), item(2))
    act(scheduler, 2, "prefilled")
    assert shares(scheduler.plan(time_for(63, whole_blocks=True))) == {1: 64}
    assert shares(scheduler.plan(time_for(0))) == {1: 64}, "no token would do"
    assert shares(scheduler.plan(time_for(32))) == {1: 64}, "parts would take longer together"
    assert shares(scheduler.plan(time_for(30))) == {1: 30}
    read(scheduler, scheduler.plan(time_for(30)))
    assert shares(scheduler.plan(time_for(30))) == {1: 34}, "the rest of the block"
    assert shares(scheduler.plan()) == {1: 482}, "to the end of a block"


def test_partial_blocks_take_turns() -> None:
    scheduler, time = make(), time_for(30)
    admitted(scheduler, *(item(i, left=5_000) for i in range(3)), item(3))
    act(scheduler, 3, "prefilled")
    steps = []
    for _ in range(6):
        steps.append(shares(scheduler.plan(time)))
        read(scheduler, scheduler.plan(time))
    assert steps == [{0: 30}, {1: 30}, {0: 34}, {2: 30}, {0: 30}, {1: 34}]


def test_chunks_end_on_block_boundaries() -> None:
    scheduler = make(prefill_chunk=200)
    admitted(scheduler, item(1, position=10, left=500))
    ends = []
    while known(scheduler, 1).remaining_tokens:
        read(scheduler, scheduler.plan())
        ends.append(known(scheduler, 1).position)
    assert ends == [192, 384, 510]


def test_one_block_is_prefilled_even_if_chunk_is_shorter() -> None:
    limits = EngineSettings(memory_limit=1, prefill_chunk=10, block_size=64)
    assert limits.step_tokens == 64
    scheduler: Scheduler[Item] = Scheduler(4, limits.step_tokens, limits.block_size, 100)
    admitted(scheduler, item(1, left=65))
    assert shares(scheduler.plan()) == {1: 64}


def test_first_prompt_gets_half_and_least_served_gets_rest() -> None:
    scheduler = make()
    admitted(
        scheduler,
        item(1, left=9_000, served=50_000),
        item(2, left=9_000, served=500),
        item(3, left=9_000, served=100),
    )
    assert shares(scheduler.plan()) == {1: 256, 3: 256}
    scheduler.add(item(4, priority=1, left=9_000))
    act(scheduler, 4, "admit")
    assert shares(scheduler.plan()) == {4: 256, 3: 256}


def test_first_prompt_gets_larger_half() -> None:
    scheduler = make(prefill_chunk=5, block_size=1)
    admitted(scheduler, item(1, left=100), item(2, left=100))
    assert shares(scheduler.plan()) == {1: 3, 2: 2}


def test_fully_prefilled_prompt_is_no_longer_first() -> None:
    scheduler = make()
    admitted(scheduler, *(item(i, left=9_000) for i in range(3)))
    get_on(scheduler, 0, position=9_000, left=0)
    get_on(scheduler, 1, position=0, left=9_000, served=1)
    assert shares(scheduler.plan()) == {1: 256, 2: 256}


def test_tokens_unused_by_others_go_to_first_prompt() -> None:
    scheduler = make()
    admitted(scheduler, item(1, left=9_000), item(2, left=20))
    assert shares(scheduler.plan()) == {1: 448, 2: 20}
    admitted(scheduler, item(3, left=30), item(4, left=200))
    assert shares(scheduler.plan()) == {1: 256, 2: 20, 3: 30, 4: 200}


def test_short_prompt_does_not_wait_for_long_ones() -> None:
    scheduler = make()
    admitted(scheduler, *(item(i, left=30_000) for i in range(3)))
    for _ in range(5):
        read(scheduler, scheduler.plan())
    admitted(scheduler, item(9, left=100))
    assert shares(scheduler.plan())[9] == 100


def test_only_one_of_equal_prompts_is_prefilled() -> None:
    scheduler = make()
    equal = [item(i, left=640, next_block_hash=b"a") for i in range(3)]
    admitted(scheduler, *equal, item(7, left=64, next_block_hash=b"b"))
    assert shares(scheduler.plan()) == {0: 448, 7: 64}
    act(scheduler, 0, "preempt")
    assert shares(scheduler.plan()) == {1: 448, 7: 64}
    get_on(scheduler, 2, position=64, left=576, next_block_hash=b"c")
    assert shares(scheduler.plan()) == {1: 256, 2: 256}
    for job in (1, 2):
        get_on(scheduler, job, position=576, left=64, next_block_hash=None)
    assert shares(scheduler.plan()) == {1: 64, 2: 64, 7: 64}


def test_sequence_that_is_not_ready_is_skipped() -> None:
    """Also as the first of equal prompts: another one is prefilled for all."""
    scheduler = make()
    equal = [item(i, left=640, next_block_hash=b"a", ready=i > 0) for i in range(2)]
    admitted(scheduler, *equal)
    assert shares(scheduler.plan()) == {1: 512}
    equal[1].ready = False
    assert shares(scheduler.plan()) == {}
    equal[0].ready = True
    assert shares(scheduler.plan()) == {0: 512}


def test_plan_does_not_change_scheduler() -> None:
    for chunk in (64, 512):
        scheduler = make(prefill_chunk=chunk)
        admitted(scheduler, *(item(i, left=5_000) for i in range(4)))
        for _ in range(12):
            plan = scheduler.plan()
            assert [scheduler.plan() for _ in range(3)] == [plan] * 3
            read(scheduler, plan)


def test_prompts_alternate_when_chunk_has_one_block() -> None:
    scheduler = make(prefill_chunk=64)
    admitted(scheduler, *(item(i, left=5_000) for i in range(3)))
    order = []
    for _ in range(8):
        order += list(shares(scheduler.plan()))
        read(scheduler, scheduler.plan())
    assert order == [0, 1, 0, 2, 0, 1, 0, 2]


def test_skipped_prompt_precedes_least_served() -> None:
    scheduler = make(max_batch_size=3)
    long = item(1, left=9_000, served=70_000)
    admitted(scheduler, item(0, left=9_000), long)
    for step in range(2, 5):
        admitted(scheduler, item(step, left=256))
        assert set(shares(scheduler.plan())) == {0, step}
        read(scheduler, scheduler.plan())
        act(scheduler, step, "finish")
    admitted(scheduler, item(5, left=256))
    assert set(shares(scheduler.plan())) == {0, 1}


def test_prompt_sharing_blocks_of_skipped_prompt_goes_first() -> None:
    scheduler = make(max_batch_size=4)
    admitted(scheduler, item(0, left=9_000), item(20, left=9_000, served=70_000))
    for step in range(22, 26):
        admitted(scheduler, item(step, left=256))
        read(scheduler, scheduler.plan())
        act(scheduler, step, "finish")
    get_on(scheduler, 20, position=0, left=9_000, next_block_hash=b"a")
    admitted(scheduler, item(26, left=256))
    assert set(shares(scheduler.plan())) == {0, 20}
    earlier = item(7, left=9_000, served=90_000, next_block_hash=b"a")
    admitted(scheduler, earlier)
    assert set(shares(scheduler.plan())) == {0, 7}


def test_prefilling_with_others_counts_as_progress() -> None:
    scheduler = make(max_batch_size=3)
    admitted(scheduler, item(0, left=9_000), item(1, left=9_000, served=70_000))
    for step in range(1, 4):
        admitted(scheduler, item(9 + step, left=256))
        read(scheduler, scheduler.plan())
        get_on(scheduler, 1, position=64 * step, left=9_000 - 64 * step)
        act(scheduler, 9 + step, "finish")
    admitted(scheduler, item(20, left=256))
    assert set(shares(scheduler.plan())) == {0, 20}


def test_scheduler_imports_no_arrays_clock_or_threads() -> None:
    imported = set()
    for source in (module, fair_shares, queue_shares, step_time):
        for node in ast.walk(ast.parse(Path(str(source.__file__)).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
    plain = {"__future__", "bisect", "collections", "collections.abc", "dataclasses", "enum"}
    parts = {part.__name__ for part in (fair_shares, queue_shares, step_time)}
    parts.add("penstock.errors")
    assert imported - plain - {"itertools", "typing"} == parts


# ---- the rules, told once more


def reading(jobs: Items) -> tuple[list[Item], list[Item]]:
    """Return the sequences to prefill, and those that come first for their next block."""
    readers = sorted(
        (job for job in jobs if job.state is State.PREFILLING and job.remaining_tokens),
        key=lambda job: (-job.priority, job.id),
    )
    block_hashes = [job.next_block_hash for job in readers]
    first = [
        job
        for index, job in enumerate(readers)
        if job.next_block_hash is None or job.next_block_hash not in block_hashes[:index]
    ]
    return readers, first


def faults(plan: StepPlan[Item], jobs: Items, budget_tokens: int, block_size: int) -> list[str]:
    """List the rules that a plan for these sequences violates.

    A budget of less than a block is for a part of one, or for one that takes little more.
    """
    by_id = {job.id: job for job in jobs}
    readers, first = reading(jobs)
    tokens = shares(plan)
    unspent = budget_tokens - sum(tokens.values())

    found = []
    if sorted(ids(plan.decode)) != sorted(job.id for job in jobs if job.state is State.RUNNING):
        found.append("not all that run decode, or others do, or twice")
    if len(tokens) != len(plan.prefill):
        found.append("two chunks for one job")
    most = min(block_size, SLACK * budget_tokens) if len(tokens) == 1 else 0
    if sum(tokens.values()) > max(budget_tokens, most):
        found.append("more than the budget")
    if not set(tokens) <= {job.id for job in readers}:
        found.append("a chunk for a job that has nothing to read")
        return found
    if not set(tokens) <= {job.id for job in first}:
        found.append("a block is read twice in one step")
    for job_id, count_tokens in tokens.items():
        job = by_id[job_id]
        if not 0 < count_tokens <= job.remaining_tokens:
            found.append("a chunk that is empty, or longer than the prompt")
        inside = (job.position + count_tokens) % block_size
        if count_tokens < job.remaining_tokens and inside and budget_tokens >= block_size:
            found.append("a chunk ends inside a block")
    for job in first:
        read_to = job.position + tokens.get(job.id, 0)
        end = job.position + job.remaining_tokens
        next_end = min(end, (read_to // block_size + 1) * block_size)
        if read_to < next_end <= read_to + unspent:
            found.append("budget is left that somebody could use")
    return found


def first_gets_less_than_half(plan: StepPlan[Item], first: Item, budget_tokens: int) -> bool:
    """Return whether the first prompt gets less than half, and is not at its end."""
    own = shares(plan).get(first.id, 0)
    return own < min(first.remaining_tokens, (budget_tokens + 1) // 2)


class Simulation:
    """An engine without a model: prompts are numbers, the tree is a set of block hashes.

    It looks at every plan, and at who gets on how often.
    """

    def __init__(self, scheduler: Scheduler[Item], memory_tokens: int = 10**9) -> None:
        self.scheduler = scheduler
        self.memory_tokens = memory_tokens  # of all that hold a place
        self.stall_tokens: int | None = None
        self.tree: set[tuple[int, ...]] = set()
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.to_decode: dict[int, int] = {}
        self.states: dict[int, State] = {}
        self.jobs: dict[int, Item] = {}
        self.numbers = count()
        self.unread_steps: dict[int, int] = {}
        self.short_steps = 0
        self.first: Item | None = None
        self.read_tokens = 0
        self.preemptions = 0

    def submit(
        self,
        prompt: Sequence[int],
        priority: int = 0,
        n: int = 1,
        outputs: int = 3,
        deadline_seconds: float | None = None,
        client: str = "",
    ) -> list[int]:
        new = [
            item(next(self.numbers), priority, deadline_seconds=deadline_seconds, left=len(prompt))
            for _ in range(n)
        ]
        for job in new:
            job.client, job.group = client, new[0].id
        self.scheduler.add(*new)
        for job in new:
            self.jobs[job.id] = job
            self.prompts[job.id] = tuple(prompt)
            self.to_decode[job.id] = outputs
            self.states[job.id] = State.WAITING
        return [job.id for job in new]

    def act(self, job_id: int, event: Event) -> None:
        act(self.scheduler, job_id, event)
        self.states[job_id] = NEXT[self.states[job_id], event]
        self.unread_steps.pop(job_id, None)
        if self.states[job_id] is State.DONE:
            for table in (self.prompts, self.to_decode, self.states, self.jobs):
                del table[job_id]

    def of(self, *states: State) -> list[int]:
        return [job_id for job_id, state in self.states.items() if state in states]

    def preempt(self, job_id: int) -> None:
        """Take everything from a sequence except what it has committed."""
        self.preemptions += 1
        self.act(job_id, "preempt")
        self.look_up(job_id, 0, 0)

    def look_up(self, job_id: int, position: int, served_tokens: int) -> None:
        """Extend a sequence along the cached part of its prompt."""
        prompt, size = self.prompts[job_id], self.scheduler.block_size
        while (end := (position // size + 1) * size) <= len(prompt) and prompt[:end] in self.tree:
            position = end
        whole = end <= len(prompt)
        before = known(self.scheduler, job_id).position
        get_on(
            self.scheduler,
            job_id,
            position=position,
            left=len(prompt) - position,
            next_block_hash=repr(prompt[:end]).encode() if whole else None,
            served=served_tokens,
        )
        if position > before:
            self.unread_steps.pop(job_id, None)

    def admit(self) -> None:
        expected = sorted(
            (self.jobs[job_id] for job_id in self.of(State.WAITING, State.PREEMPTED)),
            key=lambda job: (
                -job.priority,
                self.states[job.id] is not State.PREEMPTED,
                job.id,
            ),
        )
        assert self.scheduler.in_line() == expected
        while (job := self.scheduler.next_in_line()) is not None:
            waiting = [self.jobs[job_id] for job_id in self.of(State.WAITING, State.PREEMPTED)]
            assert job.priority == max(other.priority for other in waiting)
            assert job is min(
                (other for other in waiting if other.owners == job.owners),
                key=lambda other: (other.state is not State.PREEMPTED, other.id),
            )
            while not self.has_room(job, self.of(State.PREFILLING, State.RUNNING)):
                victims = ids(self.scheduler.to_preempt(job))
                placed = self.of(State.PREFILLING, State.RUNNING)
                if not victims or not self.has_room(job, [i for i in placed if i not in victims]):
                    return
                self.preempt(victims[0])
            self.act(job.id, "admit")
            self.look_up(job.id, 0, 0)
            self.go_on(job.id)

    def has_room(self, job: Item, placed: Sequence[int]) -> bool:
        """Return whether slots and memory suffice for another sequence."""
        tokens = sum(len(self.prompts[i]) for i in [*placed, job.id])
        return not placed or (
            len(placed) < self.scheduler.max_batch_size and tokens <= self.memory_tokens
        )

    def go_on(self, job_id: int) -> None:
        if not known(self.scheduler, job_id).remaining_tokens:
            self.act(job_id, "prefilled")

    def step(self) -> StepPlan[Item]:
        """Admit, plan, check the plan, and run it."""
        self.admit()
        plan = self.scheduler.plan(time_for(self.stall_tokens))
        jobs = [self.jobs[job_id] for job_id in self.of(State.PREFILLING, State.RUNNING)]
        budget = self.budget_tokens(plan, jobs)
        wrong = faults(plan, jobs, budget, self.scheduler.block_size)
        assert wrong == []
        self.look_at_half(plan, budget)
        for chunk in plan.prefill:
            self.commit(chunk)
        for job_id in self.of(State.PREFILLING):
            if job_id not in shares(plan):
                self.look_up(job_id, known(self.scheduler, job_id).position, 0)
                self.go_on(job_id)
        for job_id in ids(plan.decode):
            self.jobs[job_id].generated_tokens += 1
            self.to_decode[job_id] -= 1
            if not self.to_decode[job_id]:
                self.act(job_id, "finish")
        self.look_at_waits()
        return plan

    def budget_tokens(self, plan: StepPlan[Item], jobs: Items) -> int:
        """Return the maximum number of tokens of a step."""
        budget = self.scheduler.budget_tokens
        if self.stall_tokens is None:
            return budget
        _, first = reading(jobs)
        several = len({job.owners for job in first}) > 1
        short = several and any(job.remaining_tokens <= self.stall_tokens for job in first)
        if not plan.decode and not short:
            return budget
        return min(budget, self.stall_tokens or self.scheduler.block_size)

    def commit(self, chunk: PrefillChunk[Item]) -> None:
        job, prompt = chunk.sequence, self.prompts[chunk.sequence.id]
        end, size = job.position + chunk.tokens, self.scheduler.block_size
        new = {prompt[:at] for at in range(size, end + 1, size) if at > job.position}
        assert not new & self.tree, "a block is read that was there"
        self.tree |= new
        self.read_tokens += chunk.tokens
        self.look_up(job.id, end, chunk.tokens)
        self.go_on(job.id)

    def look_at_half(self, plan: StepPlan[Item], budget: int) -> None:
        """Check that the first prompt gets half of the budget at least every second step."""
        readers = [self.jobs[job_id] for job_id in self.of(State.PREFILLING)]
        if not readers:
            return
        first = min(readers, key=lambda job: (-job.priority, job.id))
        short = first_gets_less_than_half(plan, first, budget)
        self.short_steps = self.short_steps + 1 if short else 0
        assert self.short_steps < 2, "the first reader is held up"
        fine = budget >= 4 * self.scheduler.block_size
        assert not (short and fine), "less than half for the first reader"

    def look_at_waits(self) -> None:
        """Check that each sequence progresses once in three steps per slot."""
        for job_id in self.of(State.PREFILLING):
            self.unread_steps[job_id] = self.unread_steps.get(job_id, 0) + 1
            most = 3 * self.scheduler.max_batch_size
            assert self.unread_steps[job_id] <= most, f"job {job_id} starves"

    def check(self) -> None:
        self.scheduler.check()
        assert len(self.scheduler) == len(self.states)
        for state in State:
            assert set(ids(self.scheduler.sequences(state))) == set(self.of(state))
        assert len(self.of(State.PREFILLING, State.RUNNING)) <= self.scheduler.max_batch_size
        for job_id, prompt in self.prompts.items():
            job = known(self.scheduler, job_id)
            if self.states[job_id] is not State.WAITING:
                assert job.position + job.remaining_tokens == len(prompt)

    def finish(self) -> None:
        """Run until no sequence is left; each step must make progress."""
        while self.states:
            plan = self.step()
            assert plan.decode or plan.prefill, "a step does nothing while somebody waits"
            self.check()


# ---- any order of events

CHUNKS = ((4, 4), (16, 4), (10, 4), (5, 4), (3, 8), (17, 8), (64, 8))
"""Pairs of prefill_chunk and block_size: fine, coarse, and not multiples."""


class Machine(RuleBasedStateMachine):
    def __init__(self, cls: type[Scheduler[Item]] = Scheduler) -> None:
        super().__init__()
        self.cls = cls
        self.simulation = Simulation(make(cls=cls))
        self.now_seconds = 0.0
        self.started = False

    @precondition(lambda self: not self.started)
    @rule(
        places=st.integers(1, 4),
        sizes=st.sampled_from(CHUNKS),
        queue=st.integers(1, 6),
        stall_tokens=st.none() | st.integers(0, 40),
    )
    def start(
        self, places: int, sizes: tuple[int, int], queue: int, stall_tokens: int | None
    ) -> None:
        self.simulation = Simulation(make(places, *sizes, queue, cls=self.cls), 400)
        self.simulation.stall_tokens = stall_tokens
        self.started = True

    @precondition(lambda self: self.started)
    @rule(
        common=st.integers(0, 2),
        common_tokens=st.integers(0, 40),
        own_tokens=st.integers(0, 40),
        priority=st.integers(-1, 1),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        seconds=st.none() | st.integers(1, 20),
    )
    def submit(
        self,
        common: int,
        common_tokens: int,
        own_tokens: int,
        priority: int,
        n: int,
        seconds: int | None,
    ) -> None:
        simulation = self.simulation
        own = [100 + next(simulation.numbers)] * own_tokens
        deadline = None if seconds is None else self.now_seconds + seconds
        waiting = len(simulation.of(State.WAITING))
        fits = waiting + n <= simulation.scheduler.max_queue
        try:
            simulation.submit([common] * common_tokens + own, priority, n, 3, deadline)
            assert fits
        except QueueFull:
            assert not fits

    @precondition(lambda self: self.started)
    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @precondition(lambda self: self.simulation.states)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.simulation.act(data.draw(st.sampled_from(self.simulation.of(*State))), "finish")

    @precondition(lambda self: self.simulation.of(State.PREFILLING, State.RUNNING))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        placed = self.simulation.of(State.PREFILLING, State.RUNNING)
        self.simulation.preempt(data.draw(st.sampled_from(placed)))

    @precondition(lambda self: self.simulation.scheduler.in_line())
    @rule()
    def make_way(self) -> None:
        """Preempt the sequences that the first waiting one may displace."""
        simulation = self.simulation
        job = simulation.scheduler.in_line()[0]
        placed = [simulation.jobs[i] for i in simulation.of(State.PREFILLING, State.RUNNING)]
        lower = [other for other in placed if other.priority < job.priority]
        found = simulation.scheduler.to_preempt(job)
        cheapest = sorted(lower, key=lambda other: (other.priority, -other.id))
        assert found[: len(lower)] == cheapest
        for other in found[len(lower) :]:
            assert other.priority == job.priority
            assert other.owners != job.owners, "preempted for an answer of its own request"
        for victim in found[:1]:
            simulation.preempt(victim.id)

    @precondition(lambda self: self.started)
    @rule(data=st.data(), event=st.sampled_from(EVENTS))
    def anything(self, data: st.DataObject, event: Event) -> None:
        """Check that illegal events raise and change nothing."""
        simulation = self.simulation
        job_id = data.draw(st.sampled_from([-1, *simulation.of(*State)]))
        if job_id < 0:
            with pytest.raises(UnknownSequence):
                simulation.scheduler.act(item(job_id), event)
            return
        state = simulation.states[job_id]
        placed = simulation.of(State.PREFILLING, State.RUNNING)
        full = event == "admit" and len(placed) >= simulation.scheduler.max_batch_size
        unread = event == "prefilled" and simulation.jobs[job_id].remaining_tokens
        if (state, event) not in NEXT or full or unread:
            with pytest.raises(ValueError):
                act(simulation.scheduler, job_id, event)

    @precondition(lambda self: self.started)
    @rule(seconds=st.integers(0, 10))
    def time_passes(self, seconds: int) -> None:
        self.now_seconds += seconds
        jobs = self.simulation.jobs.values()
        late = {job.id for job in jobs if (job.deadline_seconds or 1e9) <= self.now_seconds}
        found = self.simulation.scheduler.overdue(self.now_seconds)
        assert len(found) == len(late)
        assert set(ids(found)) == late
        for overdue in found:
            self.simulation.act(overdue.id, "finish")

    @invariant()
    def nothing_is_lost(self) -> None:
        self.simulation.check()

    def teardown(self) -> None:
        self.simulation.finish()
        assert len(self.simulation.scheduler) == 0


def test_state_machine_holds_for_random_event_order() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


# ---- nobody starves, whoever arrives


def run_beside_short_requests(
    cls: type[Scheduler[Item]],
    places: int,
    chunk: int,
    block: int,
    priority: int,
    tokens: int,
    stall_tokens: int | None = None,
) -> None:
    """Prefill a long prompt while short ones take all free slots.

    None of a higher priority waits, for which the long one would be preempted.
    """
    simulation = Simulation(make(places, chunk, block, 1_000, cls=cls))
    sequences = places if priority else places + 2
    simulation.stall_tokens = stall_tokens
    (long,) = simulation.submit(range(20 * block))
    simulation.step()
    for _ in range(500 * places):
        while len(simulation.states) < sequences:
            mark = next(simulation.numbers)
            simulation.submit([-mark] * tokens, priority, outputs=1)
        simulation.step()
        simulation.check()
        if long not in simulation.states:
            return
    raise AssertionError("the long prompt was never read")


@pytest.mark.parametrize(
    ("places", "chunk", "priority", "blocks", "stall_tokens"),
    pairs((2, 3, 4, 6), (4, 8, 16, 7), (0, 1), (1, 2, 4), (None, 0, 8)),
)
def test_random_load_starves_no_sequence(
    places: int, chunk: int, priority: int, blocks: int, stall_tokens: int | None
) -> None:
    run_beside_short_requests(Scheduler, places, chunk, 4, priority, blocks * 4, stall_tokens)


@QUICK
@given(
    places=st.integers(1, 5),
    sizes=st.sampled_from(CHUNKS),
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 30), st.integers(0, 1)),
        max_size=12,
    ),
)
def test_shared_blocks_are_prefilled_once(
    places: int, sizes: tuple[int, int], prompts: list[tuple[int, int, int, int]]
) -> None:
    simulation = Simulation(make(places, *sizes))
    block, texts = sizes[1], []
    for common, common_tokens, own_tokens, priority in prompts:
        own = [100 + next(simulation.numbers)] * own_tokens
        texts.append((common,) * common_tokens + tuple(own))
        simulation.submit(texts[-1], priority)
    simulation.finish()
    blocks = {text[:end] for text in texts for end in range(block, len(text) + 1, block)}
    ends = sum(len(text) % block for text in texts)
    assert simulation.tree == blocks
    assert simulation.read_tokens == len(blocks) * block + ends


def test_choices_share_prompt_prefill() -> None:
    simulation = Simulation(make(max_batch_size=8, prefill_chunk=64, block_size=16))
    simulation.submit([1] * 1_600, n=8)
    simulation.finish()
    assert simulation.read_tokens == 1_600


# ---- negative controls: each scheduler below breaks one rule


class PassesTheBudget(Scheduler[Item]):
    def _prefill(
        self, readers: list[module._Reader[Item]], time: StepTime | None
    ) -> tuple[PrefillChunk[Item], ...]:
        return tuple(
            PrefillChunk(r.sequence, self._whole(r.sequence, self.budget_tokens)) for r in readers
        )


class CutsBlocks(Scheduler[Item]):
    def _whole(self, job: Item, tokens: int) -> int:
        return min(job.remaining_tokens, tokens)


class ReadsEqualBlocksTwice(Scheduler[Item]):
    def _readers(self, placed: list[Item]) -> list[module._Reader[Item]]:
        return [r for job in placed for r in super(ReadsEqualBlocksTwice, self)._readers([job])]


class KeepsTheRest(Scheduler[Item]):
    def _offers(
        self, readers: list[module._Reader[Item]], time: StepTime | None
    ) -> list[tuple[Item, int]]:
        return super()._offers(readers, time)[:-1]


class FirstComeOnlyServed(Scheduler[Item]):
    def _offers(
        self, readers: list[module._Reader[Item]], time: StepTime | None
    ) -> list[tuple[Item, int]]:
        return [(reader.sequence, self.budget_tokens) for reader in readers]


class LastComeFirstServed(Scheduler[Item]):
    def _offers(
        self, readers: list[module._Reader[Item]], time: StepTime | None
    ) -> list[tuple[Item, int]]:
        return [(reader.sequence, self.budget_tokens) for reader in readers[::-1]]


class IgnoresServedTokens(Scheduler[Item]):
    def _rank(self, step: int, served_tokens: int) -> tuple[bool, int]:
        return (False, served_tokens)


class TakesNoTurns(Scheduler[Item]):
    def _offers(
        self, readers: list[module._Reader[Item]], time: StepTime | None
    ) -> list[tuple[Item, int]]:
        self._crowded_step = -1
        return super()._offers(readers, time)


class ForgetsOneThatRuns(Scheduler[Item]):
    def plan(self, time: StepTime | None = None, *, shared: bool = False) -> StepPlan[Item]:
        plan = super().plan(time, shared=shared)
        return StepPlan(plan.decode[:3], plan.prefill)


class LosesPreempted(Scheduler[Item]):
    def _enter(self, job: Item) -> None:
        if job.state is not State.PREEMPTED:
            super()._enter(job)


class KeepsFinished(Scheduler[Item]):
    def _enter(self, job: Item) -> None:
        if job.state is not State.DONE:
            super()._enter(job)


class AddsAtTheEnd(Scheduler[Item]):
    def _enter(self, job: Item) -> None:
        super()._enter(job)
        if job in self._line:
            self._line.remove(job)
            self._line.append(job)


class AdmitsOneTooMany(Scheduler[Item]):
    @property
    def free_places(self) -> int:
        return super().free_places + 1


class UnboundedQueue(Scheduler[Item]):
    def add(self, *jobs: Item) -> None:
        limit, self.max_queue = self.max_queue, 10**9
        super().add(*jobs)
        self.max_queue = limit


class TakesAnyEvent(Scheduler[Item]):
    def act(self, job: Item, event: Event) -> State:
        if (job.state, event) not in NEXT:
            return job.state
        return super().act(job, event)


BROKEN = [
    PassesTheBudget,
    CutsBlocks,
    ReadsEqualBlocksTwice,
    KeepsTheRest,
    FirstComeOnlyServed,
    LastComeFirstServed,
    ForgetsOneThatRuns,
    LosesPreempted,
    KeepsFinished,
    AddsAtTheEnd,
    AdmitsOneTooMany,
    UnboundedQueue,
    TakesAnyEvent,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_state_machine_detects_broken_schedulers(broken: type[Scheduler[Item]]) -> None:
    many = settings(QUICK, max_examples=3_000, phases=[Phase.generate], print_blob=False)
    with pytest.raises(BaseException) as caught:
        run_state_machine_as_test(partial(Machine, broken), settings=many)
    assert only_failures(caught.value), caught.value


def only_failures(error: BaseException) -> bool:
    """Return whether a test failed by an assertion, not by an error of its own."""
    if isinstance(error, BaseExceptionGroup):
        return all(only_failures(inner) for inner in error.exceptions)
    return isinstance(error, AssertionError | pytest.fail.Exception)


@pytest.mark.parametrize(
    ("broken", "chunk", "priority"),
    [(FirstComeOnlyServed, 8, 1), (IgnoresServedTokens, 8, 1), (TakesNoTurns, 4, 1)],
)
def test_check_detects_starvation(broken: type[Scheduler[Item]], chunk: int, priority: int) -> None:
    with pytest.raises(AssertionError, match=r"starves|never read"):
        run_beside_short_requests(broken, 4, chunk, 4, priority, 16)


def test_check_detects_duplicate_prefill() -> None:
    simulation = Simulation(make(prefill_chunk=64, block_size=16, cls=ReadsEqualBlocksTwice))
    simulation.submit([1] * 160, n=2)
    with pytest.raises(AssertionError, match="a block is read twice"):
        simulation.finish()


def test_check_detects_lost_or_duplicate_sequences() -> None:
    def broken(how: int) -> None:
        scheduler = make(max_batch_size=2, max_queue=2)
        admitted(scheduler, item(1), item(2))
        scheduler.add(item(3), item(4))
        scheduler.check()
        [
            lambda: scheduler._placed.pop(1),
            lambda: scheduler._line.pop(),
            lambda: scheduler._line.append(scheduler._line[-1]),
            lambda: scheduler._line.reverse(),
            lambda: scheduler._sequences.pop(3),
            lambda: scheduler._line.append(scheduler._placed.pop(1).sequence),
            lambda: setattr(scheduler, "max_batch_size", 1),
            lambda: setattr(scheduler, "max_queue", 0),
            lambda: setattr(known(scheduler, 1), "state", State.DONE),
            lambda: setattr(known(scheduler, 3), "state", State.RUNNING),
            lambda: scheduler._sequences.update({3: item(3, state=State.DONE)}),
            lambda: setattr(known(scheduler, 1), "id", 9),
        ][how]()
        scheduler.check()

    for how in range(12):
        with pytest.raises(AssertionError):
            broken(how)
    scheduler = make()
    admitted(scheduler, item(1, left=0))
    act(scheduler, 1, "prefilled")
    known(scheduler, 1).remaining_tokens = 3
    with pytest.raises(AssertionError, match="remaining: 3"):
        scheduler.check()


@pytest.mark.parametrize(
    ("decode", "prefill", "fault"),
    [
        ((), ((2, 8), (3, 8)), "not all that run"),
        ((1, 1), ((2, 8), (3, 8)), "not all that run"),
        ((1,), ((2, 4), (2, 4), (3, 8)), "two chunks"),
        ((1,), ((2, 12), (3, 8)), "more than the budget"),
        ((1,), ((1, 4), (2, 8)), "nothing to read"),
        ((1,), ((2, 8), (4, 8)), "read twice"),
        ((1,), ((2, 8), (3, 0)), "empty"),
        ((1,), ((2, 12), (3, 3)), "inside a block"),
        ((1,), ((2, 8), (3, 4)), "somebody could use"),
    ],
)
def test_plan_rules_detect_broken_plans(
    decode: tuple[int, ...], prefill: tuple[tuple[int, int], ...], fault: str
) -> None:
    items = {
        1: item(1, state=State.RUNNING),
        2: item(2, left=40, next_block_hash=b"a", state=State.PREFILLING),
        3: item(3, left=10, state=State.PREFILLING),
        4: item(4, left=40, next_block_hash=b"a", state=State.PREFILLING),
    }

    def wrong(decode: tuple[int, ...], prefill: tuple[tuple[int, int], ...]) -> list[str]:
        chunks = tuple(PrefillChunk(items[number], tokens) for number, tokens in prefill)
        plan = StepPlan(tuple(items[number] for number in decode), chunks)
        return faults(plan, list(items.values()), 16, 4)

    assert wrong((1,), ((2, 8), (3, 8))) == []
    assert any(fault in each for each in wrong(decode, prefill))
