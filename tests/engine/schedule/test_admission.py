"""`Admission` with a real scheduler, budget, tree and pool, without a model."""

from __future__ import annotations

import mlx.core as mx
import pytest
from admission_places import CHUNK, PLACES, SEQUENCE, Places

from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import NeverFits, StepFailed
from penstock.kv.segment import Segment


def reason(sequence: Sequence) -> str:
    """Return the finish reason of an answer."""
    finish = sequence.handle.result(0)[0].finish
    assert finish is not None
    return finish.reason


def test_slots_are_assigned_in_arrival_order() -> None:
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


def test_higher_priority_is_admitted_first() -> None:
    places = Places(10_000_000)
    low, middle, high = (places.add(number, priority=number) for number in range(3))
    places.admission.admit()
    assert low.state is State.WAITING
    assert middle.state is high.state is State.PREFILLING


def test_sequence_without_memory_waits_and_reserves_nothing() -> None:
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


def test_bytes_are_released_before_finish_callback() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    free: list[int] = []
    places.admission.finish(sequence, lambda s: free.append(places.ledger.free_bytes))
    assert free == [10_000_000 - places.budget.fixed_bytes]
    assert not places.admission.sequences and places.tails.free_slots == PLACES


def test_preempted_sequence_resumes_from_cache() -> None:
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


def test_preemption_merges_nodes_of_path() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    for tokens in (16, 32):  # a node of one block, and one of two below it
        keys = mx.ones((1, 2, tokens, 64))
        sequence.kv.append_chunk(Segment(((keys, keys),), length=tokens))
    assert [len(node.tokens) for node in places.prefixes.tree] == [16, 32]
    places.admission.preempt(sequence)
    assert [len(node.tokens) for node in places.prefixes.tree] == [48]
    places.admission.check()


def test_only_token_right_after_prefill_follows_prompt() -> None:
    """The first token of an answer, and the first after the recomputation of a preempted one."""
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    places.read(sequence)
    assert sequence.follows_prompt
    sequence.kv.tokens.append(7)
    assert not sequence.follows_prompt
    sequence.read_again = True
    assert sequence.follows_prompt


def test_prompt_progress_is_position_until_prompt_is_read() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    keys = mx.ones((1, 2, 32, 64))
    sequence.kv.append_chunk(Segment(((keys, keys),), length=32))
    sequence.note_prompt()
    progress = sequence.handle.progress
    assert progress is not None and (progress.done_tokens, progress.prompt_tokens) == (32, 100)
    places.read(sequence)
    sequence.note_prompt()
    progress = sequence.handle.progress
    assert progress is not None and progress.done_tokens == 100


def test_repeated_prompt_hits_cache() -> None:
    places = Places(10_000_000)
    first = places.add(0)
    places.admission.admit()
    places.read(first)
    places.admission.finish(first, lambda s: s.end("stop"))
    again = places.add(1, prompt=first.request.prompt)
    places.admission.admit()
    assert again.cached_tokens == again.kv.position == 99
    assert again.state is State.RUNNING, "nothing is left to prefill"


def test_lowest_priority_is_preempted_when_memory_is_full() -> None:
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


def test_only_answer_in_full_memory_ends_with_length() -> None:
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


def test_zero_max_tokens_ends_after_prefill() -> None:
    places = Places(10_000_000)
    sequence = places.add(0, max_tokens=0)
    places.admission.admit()
    places.read(sequence)
    assert sequence.state is State.DONE and reason(sequence) == "length"


def test_error_ends_answer_and_clears_slot() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    places.admission.fail(sequence, StepFailed("made up"))
    with pytest.raises(StepFailed, match="made up"):
        sequence.handle.result(0)
    assert places.stores.counters.failed == 1 and places.tails.free_slots == PLACES


def test_end_of_failed_answer_is_not_cached() -> None:
    """Its KV may be NaN."""
    places = Places(10_000_000)
    for number, partial in ((0, 0), (1, 1)):
        sequence = places.add(number)
        places.admission.admit()
        places.read(sequence)
        if partial:
            places.admission.finish(sequence, lambda s: s.end("stop"))
        else:
            places.admission.fail(sequence, StepFailed("made up"))
        assert sum(node.partial for node in places.prefixes.tree) == partial


def test_expired_answer_ends() -> None:
    places = Places(10_000_000)
    sequence, patient = places.add(0, timeout_seconds=5.0), places.add(1)
    places.admission.admit()
    places.admission.drop_overdue(4.9)
    assert sequence.state is State.PREFILLING
    places.admission.drop_overdue(5.1)
    assert sequence.state is State.DONE and reason(sequence) == "timeout"
    assert patient.state is State.PREFILLING


def test_lowered_limit_preempts_and_fails_oversized_requests() -> None:
    places = Places(10_000_000)
    first, second = places.add(0), places.add(1)
    waiting = places.add(2, prompt=tuple(range(1_000)))
    places.admission.admit()
    places.admission.fit(places.budget.fixed_bytes + SEQUENCE + CHUNK)
    assert (first.state, second.state) == (State.PREFILLING, State.PREEMPTED)
    assert waiting.state is State.DONE, "its 1,000 tokens would not fit alone"
    places.admission.check()


def test_preempted_sequences_respect_lowered_limit() -> None:
    places = Places(10_000_000)
    first, second = places.add(0), places.add(1)
    places.admission.admit()
    for sequence in (first, second):
        places.read(sequence)
    limit = places.budget.fixed_bytes + SEQUENCE + CHUNK + 10_000
    places.admission.fit(limit)
    assert {first.state, second.state} == {State.RUNNING, State.PREEMPTED}
    assert places.ledger.used_bytes <= limit
    places.admission.check()


def test_started_answer_exceeding_lowered_limit_ends_with_length() -> None:
    places = Places(10_000_000)
    begun, new = places.add(0), places.add(1)
    places.admission.admit()
    places.read(begun)
    begun.kv.tokens.append(7)
    places.admission.fit(places.budget.fixed_bytes + 10_000)
    assert begun.state is new.state is State.DONE
    assert reason(begun) == "length"
    with pytest.raises(NeverFits):
        new.handle.result(0)
    places.admission.check()


@pytest.mark.parametrize("lost", ["slot", "pin", "reservation"])
def test_check_detects_missing_kv_state(lost: str) -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    places.admission.admit()
    places.admission.check()
    setattr(sequence.kv, lost, None)
    with pytest.raises(AssertionError):
        places.admission.check()


def test_readers_lists_sequences_with_pinned_path() -> None:
    places = Places(10_000_000)
    sequence = places.add(0)
    assert list(places.admission.readers()) == []
    places.admission.admit()
    assert sequence.kv.pin is not None
    assert list(places.admission.readers()) == [(sequence.kv.pin.path, 0)]
