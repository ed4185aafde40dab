"""Last phase of a step: commits and emits the results of its passes.

decoded   ──> column visible, full blocks committed ──> token out, or the end of the answer
prefilled ──> whole blocks committed, states captured
failed    ──> the answer ends; if out of memory, all are preempted and retried
then      ──> one node requantized, one record offered to each tier
"""

from __future__ import annotations

import time
from collections.abc import Container

from penstock.engine.handle import notify
from penstock.engine.model.prompt_logprobs import Scores
from penstock.engine.model.sampling import SampledToken
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.prefill_rate import PrefillRate
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.retention.retention import Retention
from penstock.engine.run.executor import DecodePass, PrefillPass, StepOutput, step_error
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.kv_stores import KVStores, out_of_memory
from penstock.engine.schedule.scheduler import Scheduler, State, StepPlan
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import SpilledLost, StepFailed
from penstock.kv.states import RecurrentState

MICROSECONDS = 1_000_000
"""Microseconds per second: ranks exchange times in whole microseconds."""


class Postprocessor:
    """Commits, emits, requantizes and offloads. Engine thread only.

    Args:
        group: process group of the ranks.
        prefill_rate: measured prefill speed, updated after each chunk.
        ends: tokens that end an answer.
    """

    def __init__(
        self,
        stores: KVStores,
        tiers: TierGroup,
        scheduler: Scheduler[Sequence],
        *,
        admission: Admission,
        group: ProcessGroup,
        prefill_rate: PrefillRate,
        ends: Container[int],
    ) -> None:
        self.failed_in_a_row = 0
        self._stores = stores
        self._tiers = tiers
        self._scheduler = scheduler
        self._admission = admission
        self._group = group
        self._prefill_rate = prefill_rate
        self._ends = ends
        self._unsent: list[Sequence] = []
        """Sequences of the last decode pass whose tokens have not been delivered yet."""

    def send(self) -> None:
        """Deliver the tokens of the last decode pass and notify their readers.

        Called while the next pass is computed, it does not prolong a step.
        """
        sequences, self._unsent = self._unsent, []
        for sequence in sequences:
            sequence.send()
        notify(sequence.handle for sequence in sequences)

    def postprocess(
        self, plan: StepPlan[Sequence], output: StepOutput, *, send_later: bool = False
    ) -> bool:
        """Commit, emit, requantize and offload; return False if there was nothing to do."""
        if not plan.decode:
            self.send()
        for computed in output:
            if isinstance(computed, DecodePass):
                self._decoded(computed)
                begins = any(sequence.begins for sequence in computed.sequences)
                if begins or plan.prefill or not send_later:
                    self.send()
            else:
                self._prefilled(computed)
            del computed  # free its arrays before the next pass is computed
        busy = bool(plan.decode or plan.prefill)
        if plan.decode and self._stores.spills:
            self._stores.spill(s.kv for s in self._admission.sequences.values())
        for part in self._stores.retentions:
            busy = self._exchange(part) or busy
        # A sequence whose restore just ended continues in the next step.
        restoring = bool(self._scheduler.sequences(State.RESTORING))
        waiting = not all(s.ready for s in self._scheduler.sequences(State.PREFILLING))
        return self._tiers.work(busy=busy) or busy or restoring or waiting

    # ---- decoded

    def _decoded(self, computed: DecodePass) -> None:
        if computed.error is not None:
            self._decode_failed(computed, computed.error)
            return
        self.failed_in_a_row = 0
        rows = zip(computed.sequences, computed.choices, computed.states, strict=True)
        for sequence, choice, state in rows:
            try:
                self._append(sequence, choice, state, computed.further)
            # Only this answer fails: see `_failed`.
            except Exception as error:  # noqa: BLE001
                self._failed(sequence, error)
        self._unsent += computed.sequences

    def _append(
        self,
        sequence: Sequence,
        choice: list[SampledToken] | Exception,
        state: RecurrentState | None,
        further: int,
    ) -> None:
        if isinstance(choice, Exception):
            raise choice
        for number, token in enumerate(choice):
            written, sequence.read_again = len(choice) - number, False
            sequence.speculation.accepted_tokens += written > 1 + further
            behind = state if written == 1 else None  # it includes all of the step's tokens
            sequence.kv.append_tokens(written, accepted=1, recurrent_state=behind)
            self._emit(sequence, token)
            if sequence.state is not State.RUNNING:  # the answer ended with this token
                break

    def _emit(self, sequence: Sequence, chosen: SampledToken) -> None:
        request = sequence.request
        self._stores.counters.generated_tokens += 1
        if sequence.ends_with(chosen.token, self._ends):
            sequence.tokens.append(chosen.token)
            self._admission.finish(sequence, lambda s: s.end("stop", stop=chosen))
            return
        complete = sequence.sampler.accept(chosen.token)
        sequence.emit(chosen)
        stopped = sequence.text.stopped
        if stopped is not None:
            self._admission.finish(sequence, lambda s: s.end("stop", stop=stopped))
        elif complete:
            self._admission.finish(sequence, lambda s: s.end("stop"))
        elif sequence.generated_tokens >= request.max_tokens:
            self._admission.finish(sequence, lambda s: s.end("length"))

    def _decode_failed(self, computed: DecodePass, error: Exception) -> None:
        """Fail the answers of a pass; if out of memory, preempt them, and fail one if it recurs.

        If the pass included a prefill chunk, which may be at fault, all are preempted and none
        fail.
        """
        sequences = computed.sequences
        self._stores.tails.drop()  # the pass may have written NaN
        if isinstance(error, SpilledLost):
            for sequence in sequences:
                self._admission.preempt(sequence)
            self._admission.compute_again(error)
            return
        if computed.mixed:
            self._stores.shrink_after(error)
            for sequence in sequences:
                self._admission.preempt(sequence)
            return
        if not out_of_memory(error):
            for sequence in sequences:
                self._admission.fail(sequence, step_error("decoding", error))
            return
        self.failed_in_a_row += 1
        if self.failed_in_a_row > 1:
            largest = max(sequences, key=lambda s: (s.position, s.id))
            self._admission.fail(largest, step_error("decoding", error))
            sequences = [s for s in sequences if s is not largest]
        self._stores.shrink_after(error)
        for sequence in sequences:
            self._admission.preempt(sequence)

    # ---- prefilled

    def _prefilled(self, computed: PrefillPass) -> None:
        sequence = computed.sequence
        if isinstance(computed.error, SpilledLost):
            self._admission.compute_again(computed.error)
            return
        if computed.error is not None:
            self._admission.fail(sequence, step_error("reading its prompt", computed.error))
            return
        try:
            self._commit(computed)
        # Only this answer fails: see `_failed`.
        except Exception as error:  # noqa: BLE001
            self._failed(sequence, error)

    def _commit(self, computed: PrefillPass) -> None:
        sequence = computed.sequence
        chunk, start = computed.take(), sequence.position
        if not self._group.least(chunk.segment.is_finite()):
            raise StepFailed(
                f"the model computed NaN or infinity at tokens {start} to "
                f"{start + computed.tokens} of the prompt, as weights that overflow in "
                f"float16 do"
            )
        if computed.scores is not None:
            self._keep_scores(sequence, start + computed.tokens, computed.scores)
        states = chunk.states if self._stores.figures.is_recurrent else None
        sequence.kv.append_chunk(chunk.segment, states)
        del chunk, states
        if computed.captures:
            sequence.kv.capture(turn_end=sequence.position == sequence.kv.last_boundary)
        sequence.kv.end_prompt()
        self._count(computed, start)
        sequence.served_tokens += computed.tokens
        sequence.read_again = sequence.position >= sequence.prompt_tokens
        sequence.note_prompt()
        self._admission.advance(sequence)
        self._admission.spill(sequence)

    def _keep_scores(self, sequence: Sequence, end: int, scores: Scores) -> None:
        logprobs = sequence.kv.prompt_logprobs
        assert logprobs is not None
        start = end - len(scores.values)
        logprobs.add(start, scores)
        self._stores.scored.remember(logprobs, start, scores, sequence.block_hashes)

    def _count(self, computed: PrefillPass, start: int) -> None:
        counters, seconds = self._stores.counters, computed.seconds
        counters.prefilled_tokens += computed.tokens
        tokens = computed.tokens if computed.pass_tokens is None else computed.pass_tokens
        if not tokens:  # counted with the first chunk of its pass
            return
        if seconds is None:
            seconds = time.perf_counter() - computed.started_seconds
        counters.prefill_steps += 1
        counters.prefill_seconds.append(seconds)
        slowest = self._group.maximum(round(seconds * MICROSECONDS)) / MICROSECONDS
        self._prefill_rate.prefilled(tokens, slowest, start)

    # ---- between two steps

    def _exchange(self, part: Retention) -> bool:
        """Convert at most one node to its final format, so that answers are not delayed."""
        stores = self._stores
        preempted = (
            s for s in self._admission.sequences.values() if s.was_preempted and s.kv.pin is None
        )
        try:
            node = part.exchange_one(stores.prefixes.match(s.block_hashes).path for s in preempted)
        except (MemoryError, RuntimeError):  # MLX is out of memory
            stores.counters.out_of_memory += 1
            return True
        stores.tidy(node)
        return node is not None

    def _failed(self, sequence: Sequence, error: Exception) -> None:
        """Fail one answer; raises `error` if the sequence has already ended."""
        if sequence.id not in self._admission.sequences:
            raise error
        self._admission.fail(sequence, step_error("choosing its next token", error))
