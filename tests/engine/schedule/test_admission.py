"""`Admission` with a real scheduler, budget, tree and pool: without a model or an engine."""

from __future__ import annotations

import pytest
from admission_places import CHUNK, PLACES, SEQUENCE, Places

from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import StepFailed


def reason(sequence: Sequence) -> str:
    """Return why an answer has ended."""
    finish = sequence.handle.result(0)[0].finish
    assert finish is not None
    return finish.reason


def test_places_are_given_in_order_and_no_more_than_there_are() -> None:
    places = Places(10_000_000)
    first, second, third = (places.add(number) for number in range(3))
    places.admission.admit()
    assert [s.state for s in (first, second, third)] == [
        State.PREFILLING,
        State.PREFILLING,
        State.WAITING,
    ]
    assert {first.kv.slot, second.kv.slot} == {0, 1} and third.kv.slot is None
    assert places.stores.counters.prompt_tokens == 200
    fixed = places.budget.fixed_bytes
    assert places.ledger.used_bytes == fixed + 2 * SEQUENCE + CHUNK
    places.admission.check()


def test_a_higher_priority_is_admitted_first() -> None:
    places = Places(10_000_000)
    low, middle, high = (places.add(number, priority=number) for number in range(3))
    places.admission.admit()
    assert low.state is State.WAITING
    assert middle.state is high.state is State.PREFILLING


def test_a_sequence_without_room_waits_and_takes_nothing() -> None:
    places = Places(10_000_000)
    places.fill(SEQUENCE + CHUNK)
    first, second = places.add(0), places.add(1)
    places.admission.admit()
    assert (first.state, second.state) == (State.PREFILLING, State.WAITING)
    assert second.kv.pin is second.kv.reservation is second.step_reservation is None
    places.admission.finish(first, lambda s: s.end("stop"))
    places.admission.admit()
    assert second.state is State.PREFILLING
    assert reason(first) == "stop"
    places.admission.check()


def test_the_bytes_are_free_when_the_end_is_told() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    free: list[int] = []
    places.admission.finish(sequence, lambda s: free.append(places.ledger.free_bytes))
    assert free == [10_000_000 - places.budget.fixed_bytes]
    assert not places.admission.sequences and places.tails.free_slots == PLACES


def test_a_preempted_sequence_keeps_its_tokens_and_finds_its_path_again() -> None:
    places = Places(10_000_000)
    sequence, other = places.add(0), places.add(1)
    places.admission.admit()
    places.read(sequence)
    places.admission.preempt(sequence)
    assert sequence.state is State.PREEMPTED and sequence.kv.slot is None
    assert len(sequence.tokens) == 100 and places.stores.counters.preemptions == 1
    places.admission.admit()
    assert sequence.kv.position == 99, "all that was computed: whole blocks, and the rest as a leaf"
    assert sequence.cached_tokens == 0, "its own work is no hit"
    assert other.state is State.PREFILLING
    places.admission.check()


def test_a_prompt_that_another_has_read_is_a_hit() -> None:
    places = Places(10_000_000)
    first = places.add(0)
    places.admission.admit()
    places.read(first)
    places.admission.finish(first, lambda s: s.end("stop"))
    again = places.add(1, prompt=first.request.prompt)
    places.admission.admit()
    assert again.cached_tokens == again.kv.position == 99
    assert again.state is State.RUNNING, "nothing is left to prefill"


def test_where_room_ends_the_lowest_is_preempted_for_the_others() -> None:
    places = Places(10_000_000)
    first, second = places.add(0), places.add(1)
    places.admission.admit()
    for sequence in (first, second):
        places.read(sequence)
        sequence.kv.tokens += range(32)  # the reserved ones are used up
    places.fill(0)
    places.admission.grow()
    assert (first.state, second.state) == (State.RUNNING, State.PREEMPTED)
    assert first.reserved_tokens > 131
    places.admission.check()


def test_an_answer_alone_in_full_memory_ends_with_length() -> None:
    empty = Places(10_000_000).budget.fixed_bytes
    places = Places(empty + SEQUENCE + CHUNK + 2_000)  # and the tree's index of six blocks
    sequence = places.add(0)
    places.admission.admit()
    places.read(sequence)
    sequence.kv.tokens += range(31)
    places.admission.grow()
    assert sequence.state is State.RUNNING and sequence.reserved_tokens == 131
    sequence.kv.tokens.append(0)
    places.admission.grow()
    assert sequence.state is State.DONE and reason(sequence) == "length"
    in_tree = places.prefixes.nbytes - places.prefixes.fixed_bytes
    assert places.ledger.used_bytes == places.budget.fixed_bytes + in_tree


def test_a_request_for_no_tokens_ends_when_its_prompt_is_read() -> None:
    places = Places(10_000_000)
    sequence = places.add(0, max_tokens=0)
    places.admission.admit()
    places.read(sequence)
    assert sequence.state is State.DONE and reason(sequence) == "length"


def test_an_error_ends_the_answer_and_wipes_the_slot() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    places.admission.fail(sequence, StepFailed("made up"))
    with pytest.raises(StepFailed, match="made up"):
        sequence.handle.result(0)
    assert places.stores.counters.failed == 1 and places.tails.free_slots == PLACES


def test_an_answer_whose_time_is_over_ends() -> None:
    places = Places(10_000_000)
    sequence, patient = places.add(0, timeout_seconds=5.0), places.add(1)
    places.admission.admit()
    places.admission.drop_overdue(4.9)
    assert sequence.state is State.PREFILLING
    places.admission.drop_overdue(5.1)
    assert sequence.state is State.DONE and reason(sequence) == "timeout"
    assert patient.state is State.PREFILLING


def test_a_lower_limit_preempts_and_refuses_what_can_never_fit() -> None:
    places = Places(10_000_000)
    first, second = places.add(0), places.add(1)
    waiting = places.add(2, prompt=tuple(range(1_000)))
    places.admission.admit()
    places.admission.fit(places.budget.fixed_bytes + SEQUENCE + CHUNK)
    assert (first.state, second.state) == (State.PREFILLING, State.PREEMPTED)
    assert waiting.state is State.DONE, "its 1,000 tokens would not fit alone"
    places.admission.check()


@pytest.mark.parametrize("lost", ["slot", "pin"])
def test_the_check_finds_what_was_lost(lost: str) -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    places.admission.check()
    setattr(sequence.kv, lost, None)
    with pytest.raises(AssertionError):
        places.admission.check()
