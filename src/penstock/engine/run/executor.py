"""Forward passes of a step, the second of its three calls.

    decode ──> compute and sample a token for each running sequence
        prefill ──> compute a chunk of a prompt

The first chunk goes through the layers together with the decode step where the model allows it: its
weights are read once then. A pass has no visible effect: it writes past each sequence's committed
length, which only postprocessing advances. An error is returned with the pass, not raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TypeAlias

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow, in_order
from penstock.engine.model.prompt_logprobs import Scores, score
from penstock.engine.model.runner import DecodeOutput, PrefillOutput, Runner
from penstock.engine.model.sampling import (
    NO_RULE,
    SampledToken,
    TokenSampler,
    greedy_only,
    likeliest,
    without_frames,
)
from penstock.engine.model.verification import verified, verified_greedy
from penstock.engine.prefill_rate import RunningMean
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.run.speculator import Speculator
from penstock.engine.schedule.kv_stores import KVStores, out_of_memory
from penstock.engine.schedule.scheduler import PrefillChunk, State, StepPlan
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import PenstockError, StepFailed
from penstock.kv.states import RecurrentState

WHOLE_TOKENS = 512
"""Least number of tokens at the end of a prompt, where its question is, that read all in front of
them, with `attend_prompt`."""


@dataclass(frozen=True, slots=True)
class DecodePass:
    sequences: list[Sequence]
    choices: list[list[SampledToken] | Exception]
    """Sampled tokens of each sequence, at least one, or an error."""
    states: list[RecurrentState | None]
    """Recurrent states of each sequence after its tokens; None without recurrent layers."""
    error: Exception | None = None
    together: bool = False
    """Whether a prefill chunk was computed in the same pass, and may have caused the error."""


@dataclass(slots=True)
class PrefillPass:
    sequence: Sequence
    tokens: int
    started_seconds: float
    """Start of the pass, in seconds of `time.perf_counter`."""
    captures: bool = False
    """Whether to checkpoint the states after the pass."""
    chunk: PrefillOutput | None = None
    scores: Scores | None = None
    """Log-probabilities of the prompt tokens that follow each position; None if not requested."""
    error: Exception | None = None
    seconds: float | None = None
    """Seconds that the chunk added to a decode step; None for a pass of its own."""

    def take(self) -> PrefillOutput:
        """Return the arrays and drop the pass's references to them."""
        assert self.chunk is not None
        chunk, self.chunk = self.chunk, None
        return chunk


LEAST_SHARE = 0.25
"""Smallest part of a pass with a decode step that counts as a chunk's: such a step varies."""
StepOutput: TypeAlias = Iterator[DecodePass | PrefillPass]


class ModelExecutor:
    """Runs the model over the engine's sequences. Not thread-safe: owned by the engine's thread.

    Args:
        stores: KV stores; cold nodes are evicted when MLX runs out of memory.
        group: processes that run the same passes over the other shards of the model.
        logits_tokens: maximum number of prompt tokens whose logits are computed together.
        step_tokens: maximum number of tokens of a pass.
    """

    def __init__(
        self,
        runner: Runner,
        stores: KVStores,
        group: ProcessGroup,
        speculator: Speculator,
        *,
        logits_tokens: int,
        step_tokens: int,
    ) -> None:
        self._logits_tokens = logits_tokens
        self._step_tokens = step_tokens
        self._decode_seconds = RunningMean(0.0)
        """Mean seconds of the latest decode steps without a chunk."""
        self._stores = stores
        self._runner = runner
        self._tails = stores.tails
        self._counters = stores.counters
        self._group = group
        self._speculator = speculator

    def run(self, plan: StepPlan[Sequence], meanwhile: Callable[[], object]) -> StepOutput:
        """Yield the passes of a step; each is computed after the previous one was consumed.

        So decoded tokens are postprocessed before the prefill chunk starts, and a chunk can read
        the codes of the block before it. The arrays of two passes are never alive together, except
        for those of a chunk computed in the decode step's pass.
        """
        chunks = list(plan.prefill)
        if plan.decode:
            beside = next((chunk for chunk in chunks[:1] if self._joins(chunk.sequence)), None)
            decoded, read = self._decode(list(plan.decode), meanwhile, beside)
            yield decoded
            del decoded
            if read is not None:
                chunks = chunks[1:]
                # What ran out of memory may have preempted it.
                if read.sequence.state is State.PREFILLING:
                    yield read
                del read
        for chunk in chunks:
            yield from self._prefill(chunk.sequence, chunk.tokens)

    def _joins(self, sequence: Sequence) -> bool:
        """Return whether a chunk of a prompt may be computed in the pass of a decode step."""
        apart = self._stores.by_block or sequence.reads_logits or sequence.reads_alone
        return self._runner.mixes and not apart

    # ---- decoding

    def _decode(
        self,
        sequences: list[Sequence],
        meanwhile: Callable[[], object],
        beside: PrefillChunk[Sequence] | None,
    ) -> tuple[DecodePass, PrefillPass | None]:
        """Compute and sample the next tokens of each sequence, verifying its proposed tokens.

        A chunk `beside` is computed in the same pass, if that has few enough tokens.
        """
        rows = [sequence.row() for sequence in sequences]
        order = in_order(rows)
        sequences, rows = [sequences[i] for i in order], [rows[i] for i in order]
        proposed = self._speculator.propose(sequences)
        proposals = [proposal.tokens for proposal in proposed]
        rows = [
            replace(row, proposed=len(proposal))
            for row, proposal in zip(rows, proposals, strict=True)
        ]
        width = 1 + max(map(len, proposals))
        # What stands behind a proposal is written behind what is ever read.
        new = [
            [s.tokens[-1], *proposal, *[0] * (width - 1 - len(proposal))]
            for s, proposal in zip(sequences, proposals, strict=True)
        ]
        before = self._recurrent_states(sequences)
        if beside is not None and width * len(rows) + beside.tokens > self._step_tokens:
            beside = None
        started = time.perf_counter()
        try:
            samplers = [s.sampler for s in sequences]
            device = self._runner.device
            with device.decoding(len(rows), width, rows[0].held_tokens):
                if beside is None:
                    decoded, chunk = self._runner.decode(new, rows, self._tails, before), None
                else:
                    decoded, chunk = self._mixed(new, rows, beside)
                logits, writes = decoded.logits, [*self._tails.buffers(), *decoded.arrays()]
                if greedy_only(samplers) and _unruled(samplers, proposals):
                    best = likeliest(logits.reshape(-1, logits.shape[-1]))
                    _evaluate(meanwhile, best.tokens, best.values, *writes)
                    chosen = verified_greedy(best.read(), proposals)
                else:
                    _evaluate(meanwhile, logits, *writes)
                    chosen = verified(logits, proposals, samplers, [s.generated for s in sequences])
            states: list[RecurrentState | None] = [None] * len(sequences)
            if before:
                states = self._states_behind(decoded, chosen, new, rows, before)
        # A boundary: a model's code may raise anything, and none of it may end the engine.
        except Exception as error:  # noqa: BLE001
            self._group.fault("decoding", error)
            together = beside is not None
            if beside is not None:
                beside.sequence.reads_alone = True
            return DecodePass(sequences, [], [], without_frames(error), together), None
        if width == 1:  # of several ranks it always is
            chosen = _listed(self._group.chosen(_alone(chosen)))
        seconds = time.perf_counter() - started
        right = [None if isinstance(of, Exception) else len(of) - 1 for of in chosen]
        self._speculator.judge(sequences, proposed, right, None if beside else seconds)
        self._counters.decode_steps += 1
        self._counters.decode_seconds.append(seconds)
        self._counters.model_seconds += seconds
        read = None
        if beside is None:
            self._decode_seconds.add(seconds)
        else:
            added = max(seconds - self._decode_seconds.value, LEAST_SHARE * seconds)
            read = PrefillPass(beside.sequence, beside.tokens, started, True, chunk, seconds=added)
        return DecodePass(sequences, chosen, states), read

    def _mixed(
        self, new: list[list[int]], rows: list[DecodeRow], beside: PrefillChunk[Sequence]
    ) -> tuple[DecodeOutput, PrefillOutput]:
        sequence = beside.sequence
        start = sequence.position
        prompt = sequence.tokens[start : start + beside.tokens]
        return self._runner.mixed(new, rows, self._tails, prompt, sequence.kv.spans(), start)

    def _recurrent_states(self, sequences: list[Sequence]) -> list[RecurrentState | None]:
        return [s.kv.recurrent_state for s in sequences] if self._runner.is_recurrent else []

    def _states_behind(
        self,
        decoded: DecodeOutput,
        chosen: list[list[SampledToken] | Exception],
        new: list[list[int]],
        rows: list[DecodeRow],
        before: list[RecurrentState | None],
    ) -> list[RecurrentState | None]:
        """Return each row's recurrent states after its accepted tokens.

        States cannot be rolled back: after a rejection, the accepted tokens are recomputed from the
        state before the step.
        """
        states: list[RecurrentState | None] = list(decoded.recurrent_states)
        rejected: dict[int, list[int]] = {}
        for row, tokens in enumerate(chosen):
            if not isinstance(tokens, Exception) and len(tokens) < len(new[row]):
                rejected.setdefault(len(tokens), []).append(row)
        for count, members in rejected.items():
            again = self._runner.decode(
                [new[row][:count] for row in members],
                [rows[row] for row in members],
                self._tails,
                [before[row] for row in members],
            )
            mx.eval(again.arrays(), self._tails.buffers())
            for row, state in zip(members, again.recurrent_states, strict=True):
                states[row] = state
        return states

    # ---- prefilling

    def _prefill(self, sequence: Sequence, tokens: int) -> Iterator[PrefillPass]:
        """Yield the passes over the next `tokens` tokens of a prompt.

        For a model that needs mlx-lm's chunks, ends at the next chunk boundary instead.
        """
        for stop in self._stops(sequence, tokens):
            # A decode pass that ran out of memory preempts, and a chunk that fails ends it.
            while sequence.state is State.PREFILLING and sequence.position < stop:
                end = min(stop, self._pass_end(sequence, stop))
                yield self._read(sequence, end - sequence.position, captures=end == stop)

    def _pass_end(self, sequence: Sequence, stop: int) -> int:
        """Return the position, up to `stop`, at which the next pass over a prompt ends."""
        size, start, length = self._stores.block_size, sequence.position, stop
        if self._stores.by_block:
            length = size
        elif sequence.reads_logits and not self._runner.fitness.whole:
            length = self._logits_tokens
        return min(stop, start // size * size + length)

    def _stops(self, sequence: Sequence, tokens: int) -> list[int]:
        """Return the positions, in order, at which a pass over a prompt must end."""
        start = sequence.position
        if self._runner.fitness.whole:
            return [sequence.whole_stop]
        end = start + tokens
        if not self._runner.is_recurrent:
            whole = self._whole_from(sequence)
            return [whole, end] if start < whole < end else [end]
        # Ends of its last whole block, and of the cached path at admission.
        boundaries = {sequence.kv.last_boundary, sequence.kv.matched_tokens}
        boundaries.add(self._whole_from(sequence))
        return [*sorted(stop for stop in boundaries if start < stop < end), end]

    def _whole_from(self, sequence: Sequence) -> int:
        """Return the first position of a prompt's end, which reads all; 0 if all of it does."""
        if not self._runner.prompt_selection.layers:
            return 0
        size = self._stores.block_size
        return max(0, len(sequence.tokens) - WHOLE_TOKENS) // size * size

    def _read(self, sequence: Sequence, count: int, *, captures: bool) -> PrefillPass:
        start, state = sequence.position, sequence.kv.recurrent_state
        tokens = sequence.inputs.tokens(sequence.tokens, start, start + count)
        started = time.perf_counter()
        for attempt in (1, 2):
            try:
                called = time.perf_counter()
                chunk, scores = self._compute(sequence, tokens, start, state)
                self._counters.model_seconds += time.perf_counter() - called
                return PrefillPass(sequence, count, started, captures, chunk, scores)
            # A boundary, as in `_decode`.
            except Exception as error:  # noqa: BLE001
                self._group.fault("reading a prompt", error)
                failed = without_frames(error)
            if not (attempt == 1 and self._shrink_after(failed)):
                break
        return PrefillPass(sequence, count, started, error=failed)

    def _compute(
        self, sequence: Sequence, tokens: Items[int], start: int, state: RecurrentState | None
    ) -> tuple[PrefillOutput, Scores | None]:
        """Compute prompt tokens, and the log-probabilities of their successors if requested."""
        spans, logprobs = sequence.kv.spans(), sequence.kv.prompt_logprobs
        end = start + len(tokens)
        if logprobs is None or end <= logprobs.read_positions:
            arguments = sequence.inputs.arguments(tokens, start)
            choose = end <= self._whole_from(sequence)
            output = self._runner.prefill(tokens, spans, start, state, arguments, choose=choose)
            return output, None
        logits, chunk = self._runner.read(tokens, spans, start, state)
        return chunk, score(logits, logprobs.targets(start, end), logprobs.top)

    def _shrink_after(self, error: Exception) -> bool:
        """Free memory for a retry if MLX ran out of memory; return whether it did."""
        return self._stores.shrink_after(error)


def _evaluate(meanwhile: Callable[[], object], *arrays: mx.array) -> None:
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
    try:
        meanwhile()
    finally:
        mx.eval(*arrays)


def _unruled(samplers: list[TokenSampler], proposals: list[list[int]]) -> bool:
    """Return whether no row with a rule has proposed tokens."""
    pairs = zip(samplers, proposals, strict=True)
    return not any(proposal and sampler.constraint is not NO_RULE for sampler, proposal in pairs)


def _alone(chosen: list[list[SampledToken] | Exception]) -> list[SampledToken | Exception]:
    return [of if isinstance(of, Exception) else of[0] for of in chosen]


def _listed(chosen: list[SampledToken | Exception]) -> list[list[SampledToken] | Exception]:
    return [of if isinstance(of, Exception) else [of] for of in chosen]


def step_error(doing: str, error: Exception) -> PenstockError:
    """Return the error for an answer that failed in a step, without stack frames."""
    if isinstance(error, PenstockError):
        without_frames(error)  # they would keep the step's arrays
        return error
    if out_of_memory(error):
        failed = StepFailed(f"out of memory while {doing}, after cold nodes were evicted: {error}")
        failed.status = 503
        return failed
    failed = StepFailed(f"the model failed while {doing}: {type(error).__name__}: {error}")
    failed.__cause__ = without_frames(error)  # its frames would keep the step's arrays
    return failed
