"""Forward passes of a step, the second of its three calls.

    decode ──> compute and sample a token for each running sequence
        decode again ──> further tokens, while nothing else waits
        prefill ──> compute chunks of prompts

If model and memory allow it, chunks of several prompts and the decode step are computed in one
pass, which reads the weights once. A pass has no visible effect: it writes past each sequence's
committed length, which only postprocessing advances. An error is returned with the pass, not
raised. If a pass shared by several chunks, or by a chunk and a decode step, fails, no answer fails:
all of them are computed again separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TypeAlias

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow, in_order
from penstock.engine.model.prompt_logprobs import Scores
from penstock.engine.model.runner import (
    DecodeOutput,
    MixedOutput,
    PrefillOutput,
    PromptChunk,
    Runner,
)
from penstock.engine.model.sampling import (
    NO_RULE,
    SampledToken,
    TokenSampler,
    greedy_only,
    likeliest,
    likeliest_tokens,
    sample_all,
    without_frames,
)
from penstock.engine.model.verification import verified, verified_greedy
from penstock.engine.model.wide_steps import skips_padding
from penstock.engine.prefill_rate import RunningMean
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.run.speculator import Speculator
from penstock.engine.schedule.kv_stores import KVStores, out_of_memory
from penstock.engine.schedule.scheduler import PrefillChunk, State, StepPlan
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import PenstockError, StepFailed
from penstock.kv.states import RecurrentState

WHOLE_TOKENS = 512
"""Minimum number of tokens at the end of a prompt, usually its question, that attend to all tokens
before them despite `attend_prompt`."""


@dataclass(frozen=True, slots=True)
class DecodePass:
    sequences: list[Sequence]
    choices: list[list[SampledToken] | Exception]
    """Sampled tokens of each sequence, at least one, or an error."""
    states: list[RecurrentState | None]
    """Recurrent states of each sequence after its tokens; None without recurrent layers."""
    error: Exception | None = None
    further: int = 0
    """Number of tokens at the end of each row's choices that further forward passes gave."""
    mixed: bool = False
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
    """Seconds that the pass added to a decode step; None without one."""
    pass_tokens: int | None = None
    """Number of tokens in all chunks of a shared pass, on its first chunk; 0 on the others."""

    def take(self) -> PrefillOutput:
        """Return the arrays and drop the pass's references to them."""
        assert self.chunk is not None
        chunk, self.chunk = self.chunk, None
        return chunk


FURTHER_SECONDS = 0.03
"""Time of a step after which it begins no further pass, so that texts appear smoothly."""
LEAST_SHARE = 0.25
"""Minimum share of a pass's time that is attributed to its chunks and not to its decode step."""
StepOutput: TypeAlias = Iterator[DecodePass | PrefillPass]


class ModelExecutor:
    """Runs the model over the engine's sequences. Not thread-safe: owned by the engine's thread.

    Args:
        stores: KV stores; cold nodes are evicted when MLX runs out of memory.
        group: process group of the ranks.
        logits_tokens: maximum number of prompt tokens whose logits are computed together.
        mixed_tokens: maximum number of prompt tokens in a pass with several sequences.
        ends: tokens that end an answer.
    """

    def __init__(
        self,
        runner: Runner,
        stores: KVStores,
        group: ProcessGroup,
        speculator: Speculator,
        *,
        logits_tokens: int,
        mixed_tokens: int,
        ends: Container[int] = (),
    ) -> None:
        self._ends = ends
        self._logits_tokens = logits_tokens
        self._mixed_tokens = mixed_tokens
        self._decode_seconds = RunningMean(0.0)
        """Mean seconds of the latest decode steps without a chunk."""
        self._stores = stores
        self._runner = runner
        self._tails = stores.tails
        self._counters = stores.counters
        self._group = group
        self._speculator = speculator
        speculates = speculator.max_tokens > 0 and runner.is_recurrent
        self._skips_padding = speculates and skips_padding(runner)

    def run(
        self,
        plan: StepPlan[Sequence],
        meanwhile: Callable[[], object],
        pending: Callable[[], bool] | None = None,
    ) -> StepOutput:
        """Yield the results of a step: that of the decode, then one for each prefill chunk.

        A forward pass starts after the results of the previous one were consumed. So decoded tokens
        are postprocessed before a separate prefill starts, a chunk can read the codes of the block
        before it, and arrays of two forward passes are never alive together. One forward pass may
        compute several chunks, or chunks and the decode.

        If `pending` is given and the model can repeat a step (`Runner.decode_again`), the decode is
        repeated until `pending` returns true, an answer may have ended, or `FURTHER_SECONDS` are
        over. So the work between two steps is done once for several tokens.
        """
        chunks = list(plan.prefill)
        if plan.decode:
            beside = self._mixed(chunks, plan.decode)
            goes_on = pending if plan.alone else None
            decoded, passes = self._decode(list(plan.decode), meanwhile, beside, goes_on)
            yield decoded
            del decoded
            chunks = chunks[len(passes) :]
            yield from _prefilling(passes)
        while chunks:
            together = self._mixed(chunks)
            passes = self._read_together(together) if len(together) > 1 else []
            if passes:
                chunks = chunks[len(passes) :]
                yield from _prefilling(passes)
            else:
                chunk, *chunks = chunks
                yield from self._prefill(chunk.sequence, chunk.tokens)

    # ---- several in one pass

    def _mixed(
        self, chunks: list[PrefillChunk[Sequence]], decoding: Items[Sequence] = ()
    ) -> list[PrefillChunk[Sequence]]:
        """Return the leading chunks to compute in one pass, together with `decoding`."""
        mixed: list[PrefillChunk[Sequence]] = []
        if not self._runner.mixes or self._stores.by_block or any(s.unmixed for s in decoding):
            return mixed
        tokens = logits = 0
        for chunk in chunks:
            sequence = chunk.sequence
            end = sequence.position + chunk.tokens
            if sequence.unmixed or any(sequence is other.sequence for other in mixed):
                break
            if sequence.reads_logits and not self._runner.mixes_exactly:
                break  # log-probabilities must depend only on the prompt
            if sequence.state is not State.PREFILLING or self._pass_end(sequence, end) < end:
                break
            tokens += chunk.tokens
            logits += len(self._prompt_chunk(chunk).logit_rows)
            if tokens > self._mixed_tokens or logits > self._logits_tokens:
                break
            mixed.append(chunk)
        return mixed

    def _prompt_chunk(self, chunk: PrefillChunk[Sequence]) -> PromptChunk:
        sequence = chunk.sequence
        start, logprobs = sequence.position, sequence.kv.prompt_logprobs
        end = start + chunk.tokens
        skipped = None
        if logprobs is not None and end > logprobs.read_positions:
            skipped = max(0, logprobs.start - start)
        tokens, spans = sequence.tokens[start:end], sequence.kv.spans()
        return PromptChunk(tokens, spans, start, skipped, sequence.adapter)

    def _read_together(self, chunks: list[PrefillChunk[Sequence]]) -> list[PrefillPass]:
        """Prefill chunks in one pass; if it fails, return none, to compute each separately."""
        started = time.perf_counter()
        try:
            output = self._runner.mixed((), (), self._tails, [*map(self._prompt_chunk, chunks)])
            passes = self._passes(chunks, output, started)
        # Caught as in `_decode`.
        except Exception as error:  # noqa: BLE001
            self._group.fault("reading prompts", error)
            self._separate(chunks)
            self._shrink_after(without_frames(error))
            return []
        self._counters.model_seconds += time.perf_counter() - started
        return passes

    def _passes(
        self, chunks: Items[PrefillChunk[Sequence]], output: MixedOutput, started: float
    ) -> list[PrefillPass]:
        """Return one `PrefillPass` for each chunk of a shared pass."""
        passes: list[PrefillPass] = []
        for chunk, computed, logits in zip(chunks, output.chunks, output.logits, strict=True):
            sequence, scores = chunk.sequence, None
            logprobs = sequence.kv.prompt_logprobs
            if logprobs is not None and logits is not None:
                end = sequence.position + chunk.tokens
                scores = logprobs.score(logits, end - len(logits))
            read = PrefillPass(sequence, chunk.tokens, started, True, computed, scores)
            read.pass_tokens = 0 if passes else sum(chunk.tokens for chunk in chunks)
            passes.append(read)
        return passes

    def _separate(
        self, chunks: Items[PrefillChunk[Sequence]], decoding: Items[Sequence] = ()
    ) -> None:
        """Exclude the sequences of a failed shared pass from further ones."""
        for sequence in (*(chunk.sequence for chunk in chunks), *decoding):
            sequence.unmixed = True

    # ---- decoding

    def _decode(
        self,
        sequences: list[Sequence],
        meanwhile: Callable[[], object],
        beside: list[PrefillChunk[Sequence]],
        pending: Callable[[], bool] | None = None,
    ) -> tuple[DecodePass, list[PrefillPass]]:
        """Compute and sample the next tokens of each sequence, verifying its proposed tokens.

        The chunks `beside` are computed in the same pass.
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
        further = 0
        # The padding after a proposal is written past all columns that are read.
        new = [
            [s.tokens[-1], *proposal, *[0] * (width - 1 - len(proposal))]
            for s, proposal in zip(sequences, proposals, strict=True)
        ]
        before = self._recurrent_states(sequences)
        passes: list[PrefillPass] = []
        started = time.perf_counter()
        try:
            samplers = [s.sampler for s in sequences]
            device = self._runner.device
            with device.decoding(len(rows), width, rows[0].held_tokens):
                chosen = None
                if pending is not None and not (beside or before):
                    chosen = self._decode_next(sequences, rows, meanwhile)
                if chosen is None:
                    if beside:
                        prompts = [*map(self._prompt_chunk, beside)]
                        output = self._runner.mixed(new, rows, self._tails, prompts)
                        assert output.decoded is not None
                        decoded, passes = output.decoded, self._passes(beside, output, started)
                        del output
                    else:
                        decoded = self._runner.decode(new, rows, self._tails, before)
                    logits, writes = decoded.logits, [*self._tails.buffers(), *decoded.arrays()]
                    if greedy_only(samplers) and _unruled(samplers, proposals):
                        best = likeliest(logits)
                        _evaluate(meanwhile, best.tokens, best.values, *writes)
                        chosen = verified_greedy(best.read(), proposals)
                    else:
                        _evaluate(meanwhile, logits, *writes)
                        generated = [s.generated for s in sequences]
                        chosen = verified(logits, proposals, samplers, generated)
                if pending is not None and self._repeats(sequences):
                    further = self._decode_again(sequences, rows, chosen, pending, started)
            states: list[RecurrentState | None] = [None] * len(sequences)
            if before:
                states = self._states_behind(decoded, chosen, new, rows, before)
        # The model's code may raise anything, which must not stop the engine.
        except Exception as error:  # noqa: BLE001
            self._group.fault("decoding", error)
            if beside:
                self._separate(beside, sequences)
            mixed = bool(beside)
            return DecodePass(sequences, [], [], without_frames(error), mixed=mixed), []
        if width == 1 and not further:  # always so with several ranks
            chosen = _listed(self._group.chosen(_alone(chosen)))
        seconds = time.perf_counter() - started
        right = [None if isinstance(of, Exception) else len(of) - 1 for of in chosen]
        if not further:
            self._speculator.judge(sequences, proposed, right, None if beside else seconds)
        self._counters.model_seconds += seconds
        for _ in range(1 + further):
            self._counters.decode_steps += 1
            self._counters.decode_seconds.append(seconds / (1 + further))
        if not beside:
            self._decode_seconds.add(seconds / (1 + further))
        for read in passes:
            read.seconds = max(seconds - self._decode_seconds.value, LEAST_SHARE * seconds)
        return DecodePass(sequences, chosen, states, further=further), passes

    def _repeats(self, sequences: Items[Sequence]) -> bool:
        """Return whether a decode step of these sequences may be repeated.

        Each token of an answer with a constraint or a stop string may end it or change what may
        follow, and an answer's first token is delivered at once.
        """
        return self._may_repeat and all(
            s.generated_tokens and s.sampler.constraint is NO_RULE and not s.text.may_stop
            for s in sequences
        )

    @property
    def _may_repeat(self) -> bool:
        speculates = bool(self._speculator.max_tokens)
        return self._runner.repeats and not speculates and self._group.size == 1

    def _decode_next(
        self, sequences: Items[Sequence], rows: list[DecodeRow], meanwhile: Callable[[], object]
    ) -> list[list[SampledToken] | Exception] | None:
        """Decode by a repetition of the step before; None if the rows or their spans are others."""
        if not self._may_repeat:
            return None
        texts = [list[SampledToken]() for _ in rows]
        if not self._repeat(sequences, texts, rows, new_step=True):
            return None
        meanwhile()
        return [*texts]

    def _decode_again(
        self,
        sequences: Items[Sequence],
        rows: list[DecodeRow],
        chosen: Items[list[SampledToken] | Exception],
        pending: Callable[[], bool],
        started: float,
    ) -> int:
        """Decode further tokens of all rows, append them to `chosen`, and return their number.

        Args:
            sequences: sequences of the rows.
            rows: rows of the decode step before.
            chosen: tokens that this step gave.
            pending: see `run`.
            started: start of the step, in seconds of `time.perf_counter`.
        """
        texts = [of for of in chosen if not isinstance(of, Exception)]
        if len(texts) < len(chosen):
            return 0
        most = min(sequence.step_room for sequence in sequences)
        for further in range(1, most):
            ended = any(
                s.ends_with(text[-1].token, self._ends)
                for s, text in zip(sequences, texts, strict=True)
            )
            if ended or pending() or time.perf_counter() - started > FURTHER_SECONDS:
                return further - 1
            rows = [row.ahead(1) for row in rows]
            if not self._repeat(sequences, texts, rows):
                return further - 1
        return max(0, most - 1)

    def _repeat(
        self,
        sequences: Items[Sequence],
        texts: Items[list[SampledToken]],
        rows: list[DecodeRow],
        *,
        new_step: bool = False,
    ) -> bool:
        """Append a token to each row's by `Runner.decode_again`; return whether that succeeds.

        Args:
            sequences: sequences of the rows.
            texts: tokens that this step gave.
            rows: rows of the tokens.
            new_step: see `Runner.decode_again`.
        """
        samplers = [s.sampler for s in sequences]
        lasts = [
            text[-1].token if text else s.tokens[-1]
            for s, text in zip(sequences, texts, strict=True)
        ]
        try:
            logits = self._runner.decode_again(lasts, rows, self._tails, new_step=new_step)
            if logits is None:
                return False
            if greedy_only(samplers):
                tokens = likeliest_tokens(logits)
            else:
                generated = [
                    [*s.generated, *(token.token for token in text)]
                    for s, text in zip(sequences, texts, strict=True)
                ]
                tokens = sample_all(mx.array(logits), samplers, generated)
            del logits  # before the next ones are computed
        # If the error persists, the next step raises it.
        except Exception as error:  # noqa: BLE001
            without_frames(error)
            return False
        sampled = [token for token in tokens if not isinstance(token, Exception)]
        if len(sampled) < len(tokens):
            return False
        for text, token in zip(texts, sampled, strict=True):
            text.append(token)
        return True

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

        Most states cannot be rolled back: after a rejection, the accepted tokens are recomputed
        from the state before the step. All rows are computed in one pass if states skip padding,
        else those with equally many tokens.
        """
        states: list[RecurrentState | None] = list(decoded.recurrent_states)
        counts = [0 if isinstance(of, Exception) else len(of) for of in chosen]
        if self._runner.states_by_token and len(new[0]) > 1:
            return [
                state.after(count - 1) if count else None
                for state, count in zip(decoded.recurrent_states, counts, strict=True)
            ]
        rejected: dict[int, list[int]] = {}
        for row, count in enumerate(counts):
            if 0 < count < len(new[row]):
                rejected.setdefault(0 if self._skips_padding else count, []).append(row)
        for members in rejected.values():
            lengths = [counts[row] for row in members]
            again = self._runner.decode(
                [new[row][: max(lengths)] for row in members],
                [rows[row] for row in members],
                self._tails,
                [before[row] for row in members],
                lengths if min(lengths) < max(lengths) else None,
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
            # Between two passes, the sequence may have been preempted or failed.
            while sequence.state is State.PREFILLING and sequence.position < stop:
                end = min(stop, self._pass_end(sequence, stop))
                yield self._read(sequence, end - sequence.position, captures=end == stop)

    def _pass_end(self, sequence: Sequence, stop: int) -> int:
        """Return the position, up to `stop`, at which the next pass over a prompt ends."""
        size, start, length = self._stores.block_size, sequence.position, stop
        logprobs = sequence.kv.prompt_logprobs
        if self._stores.by_block:
            length = size
        elif logprobs is not None and not self._runner.fitness.whole:
            start, length = max(start, logprobs.start), self._logits_tokens
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
        # Ends of the prompt's last whole block, and of the cached path at admission.
        boundaries = {sequence.kv.last_boundary, sequence.kv.matched_tokens}
        boundaries.add(self._whole_from(sequence))
        return [*sorted(stop for stop in boundaries if start < stop < end), end]

    def _whole_from(self, sequence: Sequence) -> int:
        """Return the position from which a prompt attends to all tokens; 0 if it always does."""
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
            # Caught as in `_decode`.
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
            output = self._runner.prefill(
                tokens, spans, start, state, arguments, choose=choose, adapter=sequence.adapter
            )
            return output, None
        skipped = max(0, logprobs.start - start)
        logits, chunk = self._runner.read(
            tokens, spans, start, state, skipped=skipped, adapter=sequence.adapter
        )
        return chunk, logprobs.score(logits, start + skipped)

    def _shrink_after(self, error: Exception) -> bool:
        """Free memory for a retry if MLX ran out of memory; return whether it did."""
        return self._stores.shrink_after(error)


def _prefilling(passes: list[PrefillPass]) -> Iterator[PrefillPass]:
    """Yield and release each pass, except of sequences preempted or failed meanwhile."""
    while passes:
        read = passes.pop(0)
        if read.sequence.state is State.PREFILLING:
            yield read
        del read


def _evaluate(meanwhile: Callable[[], object], *arrays: mx.array) -> None:
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
    try:
        meanwhile()
    finally:
        mx.eval(*arrays)


def _unruled(samplers: list[TokenSampler], proposals: list[list[int]]) -> bool:
    """Return whether no row with a constraint has proposed tokens."""
    pairs = zip(samplers, proposals, strict=True)
    return not any(proposal and sampler.constraint is not NO_RULE for sampler, proposal in pairs)


def _alone(chosen: list[list[SampledToken] | Exception]) -> list[SampledToken | Exception]:
    return [of if isinstance(of, Exception) else of[0] for of in chosen]


def _listed(chosen: list[SampledToken | Exception]) -> list[list[SampledToken] | Exception]:
    return [of if isinstance(of, Exception) else [of] for of in chosen]


def step_error(doing: str, error: Exception) -> PenstockError:
    """Return the error for an answer that failed in a step, without stack frames."""
    if isinstance(error, PenstockError):
        without_frames(error)  # they would keep the step's arrays alive
        return error
    if out_of_memory(error):
        failed = StepFailed(f"out of memory while {doing}, after cold nodes were evicted: {error}")
        failed.status = 503
        return failed
    failed = StepFailed(f"the model failed while {doing}: {type(error).__name__}: {error}")
    failed.__cause__ = without_frames(error)  # see above
    return failed
