"""The state machine on correct and broken engines."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
from engine_machine import DrawnMachine, EngineMachine
from engine_reference import KINDS, Kind
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from test_machines import causes

from penstock.config import EngineSettings
from penstock.engine import fixed_memory
from penstock.engine.core import Core
from penstock.engine.intake import Intake
from penstock.engine.model.runner import Runner
from penstock.engine.postprocess import Postprocessor
from penstock.engine.retention.retention import Retention
from penstock.engine.run import measured_steps
from penstock.engine.run.executor import DecodePass, ModelExecutor
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.errors import StepFailed

LONG = KINDS[0]
"""The one that gets all examples; the others get a third."""
MOST_EXAMPLES = {"default": 15}
"""Of a profile whose own number takes too long with an engine."""


def examples(part: int = 1) -> settings:
    """Return the Hypothesis profile with a fraction of the examples."""
    name = os.environ.get("HYPOTHESIS_PROFILE", "default")
    given = settings.get_profile(name)
    return settings(given, max_examples=MOST_EXAMPLES.get(name, given.max_examples) // part)


def run(kind: Kind, core: type[Core] = Core, how: settings | None = None) -> None:
    machine = type("Machine", (EngineMachine,), {"make": core, "kind": kind})
    run_state_machine_as_test(seed(SEED)(machine) if how is HUNT else machine, settings=how)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_engine_matches_model(kind: Kind) -> None:
    run(kind, how=examples(1 if kind is LONG else 3))


def test_engine_matches_model_with_random_settings() -> None:
    run_state_machine_as_test(DrawnMachine, settings=examples())


# ---- negative controls: each class below is wrong in one way


class ForgetsAPin(Admission):
    """Never releases a path's pin."""

    def _release(self, sequence: Sequence) -> None:
        sequence.kv.pin = None
        super()._release(sequence)


class CountsNoRuns(MemoryEstimator):
    """Reserves no bytes for the tokens that a sequence computes."""

    def sequence_bytes(self, tokens: int, num_cached_tokens: int = 0) -> int:
        return 0


class NeverGrows(MemoryBudget):
    """Lets a sequence decode beyond its reservation."""

    def grow(self, sequence: Sequence) -> bool:
        return super().grow(sequence) if sequence.reserved_tokens == 0 else True


class EndsInsteadOfPreempting(Admission):
    """Ends an answer for lack of memory instead of preempting another."""

    def grow(self) -> None:
        for sequence in self._scheduler.sequences(State.RUNNING):
            if sequence.needs_growth and not self._budget.grow(sequence):
                self.finish(sequence, lambda s: s.end("length"))


class LeaksSlot(Admission):
    """Never releases a slot."""

    def _release(self, sequence: Sequence) -> None:
        sequence.kv.slot = None
        super()._release(sequence)


class LeaksSpans(Admission):
    """Retains the spans of finished sequences."""

    def _release(self, sequence: Sequence) -> None:
        self.__dict__.setdefault("kept", []).append(list(sequence.kv.own_spans))
        super()._release(sequence)


class SharesBetweenSalts(Intake):
    """Ignores salts in block hashes."""

    def _sequence(self, handle: Any, *rest: Any) -> Sequence:
        given = handle.request
        handle.request = given.model_copy(update={"salt": ""})
        sequence = super()._sequence(handle, *rest)
        handle.request = given
        return sequence


class DrawsTheSameForAll(Intake):
    """Gives every choice of a request the random draws of the first."""

    def _sequence(self, handle: Any, choice: int, sampler: Any, *rest: Any) -> Sequence:
        sampler.choice = 0
        return super()._sequence(handle, choice, sampler, *rest)


class CutsOneTooMany(Admission):
    """Reads one token more of the path than the prompt shares."""

    def _take(self, sequence: Sequence, block_hashes: list[bytes] | None = None) -> bool:
        taken = super()._take(sequence, block_hashes)
        if (
            taken
            and sequence.kv.pin is not None
            and 0 < sequence.kv.num_cached_tokens < len(sequence.tokens) - 1
        ):
            sequence.kv.num_cached_tokens += (
                sequence.kv.pin.node is not None
                and sequence.kv.pin.node.end > sequence.kv.num_cached_tokens
            )
        return taken


class CountsFalseHits(Admission):
    """Counts computed tokens as cached."""

    def count_hit(self, sequence: Sequence, tokens: int) -> None:
        super().count_hit(sequence, tokens + self._scheduler.block_size)


class SharesNothing(Admission):
    """Never looks up cached prefixes."""

    def _take(self, sequence: Sequence, block_hashes: list[bytes] | None = None) -> bool:
        return super()._take(sequence, [])

    def catch_up(self) -> None:
        pass


class KeepsTheRoom(Core):
    """Ignores a lowered limit."""

    def set_limit(self, limit_bytes: int) -> None:
        if limit_bytes < self.budget.fixed_bytes:
            super().set_limit(limit_bytes)
        self.ledger.set_limit(limit_bytes)


class ForgetsTheTime(Admission):
    """Ignores timeouts."""

    def drop_overdue(self, now_seconds: float) -> None:
        pass


class FailsAllSequences(Admission):
    """Fails all sequences for an error of one."""

    def fail(self, sequence: Sequence, error: Any) -> None:
        bug = isinstance(error, StepFailed)  # and no lower limit, under which one fits no more
        for each in list(self.sequences.values()) if bug else [sequence]:
            super().fail(each, error)


class TriesOnce(ModelExecutor):
    """Fails a prompt when MLX first runs out of memory."""

    def _shrink_after(self, error: Exception) -> bool:
        super()._shrink_after(error)
        return False


class RetriesAfterBug(Postprocessor):
    """Retries the step's sequences after an error as if it was out of memory."""

    def _decode_failed(self, computed: DecodePass, error: Exception) -> None:
        super()._decode_failed(computed, MemoryError(str(error)))


class BlamesAnswers(Postprocessor):
    """Fails the answers of a mixed pass whose chunk may be at fault."""

    def _decode_failed(self, computed: DecodePass, error: Exception) -> None:
        super()._decode_failed(replace(computed, mixed=False), error)


class PreemptsWithTail(Admission):
    """Assumes that a preempted sequence still has its tail."""

    def preempt(self, sequence: Sequence) -> None:
        tail = sequence.kv.tail
        super().preempt(sequence)
        sequence.kv.tail = tail


class LosesPartialBlock(SequenceKV):
    """Drops the growing span when the tail is full."""

    def _fold(self) -> None:
        super()._fold()
        if len(self.own_spans) == 1 and self.own_spans[0].end % self._size:
            self.num_cached_tokens, self.own_spans = self.own_spans[0].end, []


class CommitsWithoutASegment(SequenceKV):
    """Reports blocks as committed that are not."""

    def splice(self, segment: Any) -> bool:
        self.num_cached_tokens += segment.tokens
        return True


class KeepsTheOriginals(Postprocessor):
    """Retains segments that were quantized."""

    def _exchange(self, part: Retention) -> bool:
        before = [node.segment for node in self._stores.prefixes.tree]
        found = super()._exchange(part)
        if found:
            self.__dict__.setdefault("kept", []).append(before)
        return found


class CapturesAnOldState(SequenceKV):
    """Captures the states of an earlier boundary."""

    def capture(self, *, turn_end: bool = False) -> None:
        now, earlier = self.recurrent_state, self.__dict__.get("earlier", self.recurrent_state)
        self.recurrent_state = earlier
        super().capture(turn_end=turn_end)
        self.recurrent_state = self.__dict__["earlier"] = now


class KeepsStates(Admission):
    """Retains the states of finished sequences."""

    def _release(self, sequence: Sequence) -> None:
        self.__dict__.setdefault("kept", []).append(sequence.kv.recurrent_state)
        super()._release(sequence)


HUNT = settings(
    settings.get_profile("default"),
    max_examples=150,  # stops at the first that is noticed
    stateful_step_count=30,
    phases=[Phase.generate],
    print_blob=False,
)
SEED = 2
"""Of the hunt: with others some defects take ten times as long to find, and one is not found."""
PARTS: Items[type] = (
    Core,
    Intake,
    MemoryBudget,
    MemoryEstimator,
    ModelExecutor,
    Postprocessor,
    Admission,
    SequenceKV,
)
BROKEN: Items[type] = [
    c for part in PARTS for c in part.__subclasses__() if c.__module__ == __name__
]
NAMED = {kind.name: kind for kind in KINDS}
OF_A_KIND = {
    KeepsTheOriginals: NAMED["coded"],
    CapturesAnOldState: NAMED["recurrent"],
    KeepsStates: NAMED["recurrent"],
}
"""What only one kind of engine can do wrong."""


def engine_with(broken: type, base: type[Core] = Core) -> type[Core]:
    """Return a class of engines that use a broken class in place of its base."""
    if issubclass(broken, Core):
        return broken
    if issubclass(broken, SequenceKV):

        class Making(base):  # type: ignore[valid-type, misc]
            def enqueue(self, handle: Any) -> None:
                super().enqueue(handle)
                for sequence in self.admission.sequences.values():
                    sequence.kv.__class__ = broken

        return Making

    class Broken(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            found = [each for each in vars(self).values() if type(each) is broken.__base__]
            if len(found) != 1:  # no error that a machine would be right to raise
                raise TypeError(f"an engine has {len(found)} parts for {broken.__name__}")
            found[0].__class__ = broken

    return Broken


@pytest.mark.parametrize("broken", BROKEN)
def test_state_machine_detects_broken_engines(broken: type) -> None:
    with pytest.raises((AssertionError, ValueError, BaseExceptionGroup)) as caught:
        run(OF_A_KIND.get(broken, LONG), engine_with(broken), HUNT)
    # A tree that is told nonsense says so by a ValueError.
    assert {type(cause) for cause in causes(caught.value)} <= {AssertionError, ValueError}


# ---- settings that cross each other: each class below was a defect


class OtherSteps:
    """An engine's settings, with another number of tokens per step."""

    def __init__(self, limits: EngineSettings, step_tokens: int) -> None:
        self._limits = limits
        self.step_tokens = step_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._limits, name)


def of_a_window_at_most(limits: EngineSettings) -> Any:
    """Limit the tokens of a step to a window."""
    return OtherSteps(limits, min(limits.step_tokens, limits.max_kv_size))


def of_a_chunk(limits: EngineSettings) -> Any:
    """Limit the tokens of a step to a chunk, though a block may be longer."""
    return OtherSteps(limits, limits.prefill_chunk)


class KeepsWholeSpans(SequenceKV):
    """Keeps all of a span that begins inside `keep`."""

    def _forget_unseen(self) -> None:
        whole = {span.start: span for span in self.own_spans}
        super()._forget_unseen()
        self.own_spans = [whole[span.start] for span in self.own_spans]


class ReservesOnlyWindow(MemoryEstimator):
    """Reserves a window, a chunk and a block, although spans are released whole."""

    def sequence_bytes(self, tokens: int, num_cached_tokens: int = 0) -> int:
        limits, figures = self._limits, self._figures
        window = limits.max_kv_size
        if not figures.drops or tokens <= window:
            return super().sequence_bytes(tokens, num_cached_tokens)
        spans = window - limits.keep_tokens + limits.prefill_chunk + limits.block_size
        own = max(0, window - num_cached_tokens) + min(tokens - window, spans)
        return own * figures.held_token_bytes + figures.state_bytes


class KeepsZeroStates(Runner):
    """Retains the initial states of a sequence without counting them."""

    def fresh_state(self) -> Any:
        return self.__dict__.setdefault("fresh", super().fresh_state())


def engine_measured_with(limits_of: Callable[[EngineSettings], Any]) -> type[Core]:
    """Return a class of engines that measure and estimate steps with other settings."""
    measured = fixed_memory.measured_estimator

    def estimator_of(runner: Runner, limits: EngineSettings, *given: Any) -> MemoryEstimator:
        return measured(runner, limits_of(limits), *given)

    class Opening(Core):
        def __init__(self, *args: Any, **settings: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fixed_memory, "measured_estimator", estimator_of)
                # What it measures is no other engine's on the same model.
                patch.setattr(
                    measured_steps, "measured_once", lambda model, run_as, measure, files: measure()
                )
                super().__init__(*args, **settings)

    return Opening


MANY = settings(HUNT, max_examples=1_000, stateful_step_count=6)
"""Many engines for a short while each: it is their settings that cross."""
CROSSED: dict[str, type[Core]] = {
    "a window below a chunk": engine_measured_with(of_a_window_at_most),
    "a block above a chunk": engine_measured_with(of_a_chunk),
    "a block above a window": engine_with(KeepsWholeSpans, engine_with(ReservesOnlyWindow)),
    "zero states": engine_with(KeepsZeroStates),
}


SEEDS = {"a window below a chunk": 9, "a block above a window": 2}
"""Seeds with which the defects that take long are found sooner."""


@pytest.mark.parametrize("name", CROSSED)
def test_state_machine_detects_setting_interaction_defects(name: str) -> None:
    machine = type("Machine", (DrawnMachine,), {"make": CROSSED[name]})
    with pytest.raises((AssertionError, BaseExceptionGroup)) as caught:
        how = seed(SEEDS[name])(machine) if name in SEEDS else machine
        run_state_machine_as_test(how, settings=MANY)
    assert {type(cause) for cause in causes(caught.value)} == {AssertionError}
