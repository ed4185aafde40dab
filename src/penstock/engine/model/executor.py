"""Passes of the model over sequences: what each gains by one, and what becomes of them if it fails.

    decode   ──> a token of each that runs is computed, chosen, said; its column becomes visible
    prefill  ──> a chunk of a prompt is read, and committed

A pass that fails changes nothing that counts: what it wrote lies behind the visible ends. Out of
memory, cold nodes give way and it is tried again; what fails for one answer alone ends that one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext

import mlx.core as mx

from penstock.blas import one_thread
from penstock.engine.handle import notify
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import (
    SampledToken,
    greedy_only,
    likeliest,
    sample_all,
    without_frames,
)
from penstock.engine.offload.prefill_rate import PrefillRate
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.stats import Counters
from penstock.errors import PenstockError, StepFailed
from penstock.kv.reads import in_order
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.kv.tails import Tails
from penstock.prefix.prefixes import Prefixes


class ModelExecutor:
    """Runs the model over an engine's sequences. Not thread-safe: the engine's thread.

    Args:
        runner: the model.
        tails: where a decoded token's columns are written.
        admission: of the sequences.
        prefixes: give way when MLX is out of memory.
        group: who runs the same passes over the other parts of the model.
        prefill_rate: is told how long a prompt takes.
        counters: of the engine.
        ends: tokens that end an answer.
        by_block: whether a prompt is read block by block, see `Paths.by_block`.
    """

    def __init__(
        self,
        runner: Runner,
        tails: Tails,
        *,
        admission: Admission,
        prefixes: Prefixes[Segment],
        group: ProcessGroup,
        prefill_rate: PrefillRate,
        counters: Counters,
        ends: Collection[int],
        by_block: bool = False,
    ) -> None:
        self.runner = runner
        self.failed_in_a_row = 0
        """Decode steps that ran out of memory, since one did not."""
        self._tails = tails
        self._admission = admission
        self._prefixes = prefixes
        self._group = group
        self._prefill_rate = prefill_rate
        self._counters = counters
        self._ends = ends
        self._by_block = by_block

    # ---- decoding

    def decode(self, sequences: list[Sequence]) -> None:
        """Compute and commit one token of each."""
        rows = [sequence.row() for sequence in sequences]
        order = in_order(rows)
        sequences, rows = [sequences[i] for i in order], [rows[i] for i in order]
        started = time.perf_counter()
        try:
            decoded = self.runner.decode(
                [s.tokens[-1] for s in sequences],
                rows,
                self._tails,
                self._recurrent_states(sequences),
            )
            logits, writes = decoded.logits, [*self._tails.buffers(), *decoded.arrays()]
            samplers = [s.sampler for s in sequences]
            # Rows are computed on two streams; one multiplies better with all threads of BLAS.
            with one_thread() if len(rows) > 1 else nullcontext():
                if greedy_only(samplers):
                    best = likeliest(logits)
                    mx.eval(best.tokens, best.values, writes)
                    chosen = best.read()
                else:
                    mx.eval(logits, writes)
                    chosen = sample_all(logits, samplers, [s.generated for s in sequences])
            del logits, writes
        # A boundary: a model's code may raise anything, and none of it may end the engine.
        except Exception as error:  # noqa: BLE001
            self._group.fault("decoding", error)
            self._decode_failed(sequences, error)
            return
        chosen = self._group.chosen(chosen)
        self.failed_in_a_row = 0
        self._counters.decode_steps += 1
        seconds = time.perf_counter() - started
        self._counters.decode_seconds.append(seconds)
        self._counters.model_seconds += seconds
        del rows
        states = decoded.recurrent_states if self.runner.is_recurrent else [None] * len(sequences)
        del decoded
        for sequence, choice, state in zip(sequences, chosen, states, strict=True):
            with self._isolated(sequence):
                if isinstance(choice, Exception):
                    raise choice
                sequence.kv.append_tokens(written=1, accepted=1, recurrent_state=state)
                self._commit(sequence, choice)
        notify(sequence.handle for sequence in sequences)

    def _recurrent_states(self, sequences: Items[Sequence]) -> list[RecurrentState | None]:
        """Return what the recurrent layers keep of each; nothing if there are none."""
        return [s.kv.recurrent_state for s in sequences] if self.runner.is_recurrent else []

    def _commit(self, sequence: Sequence, chosen: SampledToken) -> None:
        """Say a token, or end the answer with it."""
        request = sequence.request
        self._counters.generated_tokens += 1
        goes_on = request.ignore_eos and request.grammar is None
        ends = chosen.token in self._ends and not goes_on
        if ends or chosen.token in request.stop_tokens:
            sequence.tokens.append(chosen.token)
            self._admission.finish(sequence, lambda s: s.end("stop", stop=chosen.token))
            return
        complete = sequence.sampler.accept(chosen.token)
        sequence.emit(chosen)
        stopped = sequence.text.stopped if sequence.text is not None else None
        if stopped is not None:
            self._admission.finish(sequence, lambda s: s.end("stop", stop=stopped))
        elif complete:
            self._admission.finish(sequence, lambda s: s.end("stop"))
        elif sequence.generated_tokens >= request.max_tokens:
            self._admission.finish(sequence, lambda s: s.end("length"))

    # ---- prefilling

    def prefill(self, sequence: Sequence, count: int) -> None:
        """Read the next `count` tokens of a prompt and commit what blocks they fill; of a model
        that takes a prompt as mlx-lm cuts it, up to the next cut."""
        start = sequence.position
        stops = [start + count]
        if self.runner.fitness.whole:
            stops = [sequence.whole_stop]
        elif self.runner.is_recurrent:
            # Where its last whole block ends, and where the tree ended that it was let in with.
            wanted = {sequence.kv.last_boundary, sequence.kv.matched_tokens}
            stops = [*sorted(stop for stop in wanted if start < stop < start + count), *stops]
        size = self._prefixes.block_size
        for stop in stops:
            while sequence.id in self._admission.sequences and sequence.position < stop:
                start = sequence.position
                end = min(stop, start // size * size + size) if self._by_block else stop
                self._read(sequence, end - start, captures=end == stop)

    def _read(self, sequence: Sequence, count: int, *, captures: bool) -> None:
        """Read the next `count` tokens of a prompt together.

        Args:
            sequence: whose prompt.
            count: tokens.
            captures: whether the states behind them are kept.
        """
        unfinished = (
            sequence.kv.own_spans and sequence.kv.own_spans[-1].end % self._prefixes.block_size
        )
        if unfinished and not self.runner.fitness.whole:
            raise AssertionError(f"sequence {sequence.id} has an unfinished block to prefill")
        start = sequence.position
        tokens = sequence.tokens[start : start + count]
        started = time.perf_counter()
        for attempt in (1, 2):
            try:
                called = time.perf_counter()
                chunk = self.runner.prefill(
                    tokens, sequence.kv.spans(), start, sequence.kv.recurrent_state
                )
                self._counters.model_seconds += time.perf_counter() - called
                break
            # A boundary, as in `decode`.
            except Exception as error:  # noqa: BLE001
                self._group.fault("reading a prompt", error)
                if attempt == 1 and self._shrink_after(error):
                    continue
                self._admission.fail(sequence, _step_error("reading its prompt", error))
                return
        with self._isolated(sequence):
            if not self._group.least(chunk.segment.is_finite()):
                raise StepFailed(
                    f"the model computed something without a number at tokens {start} to "
                    f"{start + count} of the prompt, as weights that overflow in float16 do"
                )
            states = chunk.states if self.runner.is_recurrent else None
            sequence.kv.append_chunk(chunk.segment, states)
            del chunk, states
            if captures:
                sequence.kv.capture(turn_end=sequence.position == sequence.kv.last_boundary)
            sequence.kv.end_prompt()
            self._counters.prefill_steps += 1
            self._counters.prefilled_tokens += count
            seconds = time.perf_counter() - started
            self._counters.prefill_seconds.append(seconds)
            self._prefill_rate.prefilled(count, seconds)
            sequence.served_tokens += count
            self._admission.advance(sequence)

    # ---- bad days

    def _decode_failed(self, sequences: list[Sequence], error: Exception) -> None:
        """End the step's answers; out of memory, only one of them, after a second try."""
        self._tails.drop()  # what it wrote may be no numbers
        if not out_of_memory(error):
            for sequence in sequences:
                self._admission.fail(sequence, _step_error("decoding", error))
            return
        self.failed_in_a_row += 1
        if self.failed_in_a_row > 1:
            largest = max(sequences, key=lambda s: (s.position, s.id))
            self._admission.fail(largest, _step_error("decoding", error))
            sequences = [s for s in sequences if s is not largest]
        self._shrink_after(error)
        for sequence in sequences:
            self._admission.preempt(sequence)

    def _shrink_after(self, error: Exception) -> bool:
        """After MLX ran out of memory evict half of the cold nodes; tell whether it did."""
        if not out_of_memory(error):
            return False
        self._counters.out_of_memory += 1
        self._prefixes.shrink(max(1, self._prefixes.evictable_bytes // 2), "pressure")
        return True

    @contextmanager
    def _isolated(self, sequence: Sequence) -> Iterator[None]:
        """Let an exception end one answer and nobody else's."""
        try:
            yield
        # A boundary: a sampler, a detokenizer, a stop string of one request.
        except Exception as error:
            if sequence.id in self._admission.sequences:
                self._admission.fail(sequence, _step_error("choosing its next token", error))
            else:
                raise


def _step_error(doing: str, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        without_frames(error)  # they would keep the step's arrays
        return error
    if out_of_memory(error):
        failed = StepFailed(f"out of memory while {doing}, also after the cache gave way: {error}")
        failed.status = 503
        return failed
    failed = StepFailed(f"the model failed while {doing}: {type(error).__name__}: {error}")
    failed.__cause__ = without_frames(error)  # its frames would keep the step's arrays
    return failed


def out_of_memory(error: Exception) -> bool:
    """Tell whether MLX could not allocate; each back end says so in its own words."""
    text = str(error).lower()
    words = ("malloc", "unable to allocate", "out of memory", "bad_alloc", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )
