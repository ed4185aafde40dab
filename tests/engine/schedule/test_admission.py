"""`Admission` with a real scheduler, budget, tree and pool: without a model or an engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import pytest

from penstock.attention.attention_backend import PlainOperations
from penstock.attention.attention_memory import AttentionMemory
from penstock.config import EngineSettings
from penstock.engine.counters import Counters
from penstock.engine.handle import Handle
from penstock.engine.model.figures import ModelFigures
from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.model.sampling import TokenSampler
from penstock.engine.model.step_peaks import StepPeaks
from penstock.engine.model.text import NoText, TextStream
from penstock.engine.request import Request, Sampling
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import FixedReservations, MemoryBudget
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler, State
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.errors import StepFailed
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.ledger import Kind, Ledger
from penstock.prefix.prefixes import Prefixes

BLOCK, PLACES, TOKEN = 16, 2, 1_024
"""Tokens of a block, places of the batch, and bytes of a token."""
SHAPES = (LayerShape(2, 64, 64, mx.float32),)
FIXED = 50_000
SEQUENCE = 131 * (TOKEN + 2 * 32)
"""Bytes of a sequence of 100 tokens and the next 32: keys, values and scores."""
CHUNK = 2 * 131 * TOKEN
"""Bytes of a layer that its chunk joins."""


class NoTiers:
    """Cold tiers that are not there."""

    def note(self, *given: Any, seen: bool = False) -> None:
        pass

    def note_end(self, *given: Any) -> None:
        pass

    def note_checkpoint(self, *given: Any, answered: bool = False) -> None:
        pass

    def leave(self, restores: Items[Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Places:
    """An admission, and what it stands on."""

    def __init__(self, limit_bytes: int) -> None:
        limits = EngineSettings(
            memory_limit=limit_bytes, block_size=BLOCK, prefill_chunk=32, max_kv_size=4_096
        )
        figures = ModelFigures(shapes=SHAPES, heads=2, vocabulary_size=100)
        peaks = StepPeaks(0, 0, 0, far=0, far_tokens=1, token_seconds=0.0, measured_tokens=8)
        memory = AttentionMemory(scores_at_once=2**20)
        estimator = MemoryEstimator(figures, limits, memory, peaks, PlainOperations())
        self.ledger = Ledger(limit_bytes)
        aside = FixedReservations(
            weights=self.ledger.reserve(Kind.WEIGHTS, FIXED),
            pool=self.ledger.reserve(Kind.TAILS, 0),
            step=self.ledger.reserve(Kind.BUFFERS, 0),
            chunk=self.ledger.reserve(Kind.BUFFERS, 0),
        )
        self.prefixes: Prefixes[Segment] = Prefixes(self.ledger, block_size=BLOCK, remembered=0)
        self.tails = Tails(PLACES, 8, SHAPES)
        self.stores = KVStores(
            prefixes=self.prefixes,
            retentions=(),
            tiers=NoTiers(),
            scored=ScoredBlocks(self.prefixes, limit_bytes),
            tails=self.tails,
            figures=figures,
            counters=Counters(),
            shared_tokens=4_096,
        )
        self.scheduler: Scheduler[Sequence] = Scheduler(PLACES, 32, BLOCK, 8)
        self.budget = MemoryBudget(aside, estimator, self.prefixes, copying=(), token_bytes=TOKEN)
        self.admission = Admission(
            self.scheduler, budget=self.budget, stores=self.stores, tiers=NoTiers()
        )

    def add(self, number: int, **request: Any) -> Sequence:
        """Put a sequence of 100 tokens into the queue, which shares nothing with others."""
        prompt = tuple(range(1_000 * number, 1_000 * number + 100))
        made = Request(**{"prompt": prompt, "max_tokens": 200, **request})
        sequence = Sequence(
            id=number,
            request=made,
            choice=0,
            handle=Handle(made, lambda handle: None),
            sampler=TokenSampler(Sampling(), made.prompt, 0),
            text=TextStream(NoText()),
            kv=SequenceKV(self.stores, list(made.prompt), []),
            owners=("client", number),
            priority=made.priority,
            deadline_seconds=made.timeout_seconds,
        )
        self.admission.add([sequence])
        return sequence

    def read(self, sequence: Sequence) -> None:
        """Let the rest of a prompt be computed."""
        keys = mx.ones((1, 2, sequence.remaining_tokens, 64))
        sequence.kv.append_chunk(Segment(((keys, keys),), length=keys.shape[2]))
        self.admission.advance(sequence)
        self.admission.check()

    def fill(self, free_bytes: int) -> None:
        """Leave so many bytes free."""
        self.ledger.reserve(Kind.BUFFERS, self.ledger.free_bytes - free_bytes)


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
