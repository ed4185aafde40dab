"""First phase of a step: all work before the model runs.

time out ──> evict under pressure ──> grow, preempt ──> finish restores ──> admit, share
──> begin restores ──> the plan: sequences that decode, chunks to prefill
"""

from __future__ import annotations

from penstock.engine.memory_pressure import MemoryPressure
from penstock.engine.model.span_inputs import SpanFeatures
from penstock.engine.prefill_rate import PrefillRate
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.restoring import Restoring
from penstock.engine.schedule.scheduler import Scheduler, State, StepPlan
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.step_time import ALONE_SECONDS, StepTime
from penstock.errors import PenstockError


class StepPlanner:
    """Updates all sequences and asks the scheduler for a plan. Engine thread only.

    Args:
        max_stall_ms: maximum milliseconds of prefill between two decode steps; 0 means no limit,
            even if no sequence decodes.
        whole_blocks: whether each block of a prompt must be computed in a single chunk.
        one_pass: whether chunks of several prompts are computed in one pass.
    """

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        admission: Admission,
        restoring: Restoring,
        pressure: MemoryPressure,
        features: SpanFeatures,
        *,
        prefill_rate: PrefillRate,
        max_stall_ms: int,
        whole_blocks: bool,
        one_pass: bool,
    ) -> None:
        self._scheduler = scheduler
        self._admission = admission
        self._restoring = restoring
        self._pressure = pressure
        self._features = features
        time = StepTime(
            max_stall_ms / 1_000,
            prefill_rate,
            whole_blocks,
            ALONE_SECONDS,
            one_pass=one_pass,
            block_tokens=scheduler.block_size,
        )
        self.time = time if max_stall_ms else None
        """Time limit of prefill in a step; None means no limit."""

    def schedule(self, now_seconds: float, *, shared: bool = False) -> StepPlan[Sequence]:
        """Time out, preempt, restore and admit sequences; return the plan of the next step.

        Args:
            shared: whether other models wait for the device.
        """
        self._admission.drop_overdue(now_seconds)
        self._pressure.relieve(now_seconds)
        self._admission.grow()
        self._restoring.take()  # before `admit`, which readmits those without memory
        self._admission.admit()
        self._admission.catch_up()
        self._restoring.begin()
        self._look_ahead()
        plan = self._scheduler.plan(self.time, shared=shared)
        if not (plan.decode or plan.prefill or self._features.wait()):
            self._part_waiting()
        return plan

    def _part_waiting(self) -> None:
        """If sequences block each other's inputs, free memory for the first one's, or fail it."""
        waiting = [s for s in self._scheduler.sequences(State.PREFILLING) if not s.ready]
        shortage = self._features.shortage
        if not waiting or shortage is None or self._scheduler.sequences(State.RESTORING):
            return
        first, *others = waiting
        for other in others:
            if other.inputs.holds:
                self._admission.preempt(other)
        start = first.position
        first.ready = first.inputs.ready(start, start + self._scheduler.budget_tokens)
        if not (first.ready or self._features.wait()):
            self._admission.fail(first, shortage)

    def _look_ahead(self) -> None:
        """Check which sequences have their next chunk's inputs; start computing the others'."""
        self._features.collect()
        for sequence in self._scheduler.sequences(State.PREFILLING):
            start = sequence.position
            try:
                sequence.ready = sequence.inputs.ready(start, start + self._scheduler.budget_tokens)
            except PenstockError as error:
                self._admission.fail(sequence, error)
            else:
                self._admission.advance(sequence)
