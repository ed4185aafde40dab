"""Memory and time of an engine's largest steps, measured once on dummy input."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.config import EngineSettings
from penstock.engine.model.model_probe import outside_row_bytes
from penstock.engine.model.remembered_file import RememberedPeaks
from penstock.engine.model.runner import Runner
from penstock.engine.model.runner_figures import figures_of
from penstock.engine.model.sampling import TokenSampler, sample_all
from penstock.engine.model.step_peaks import StepPeaks, measured_once
from penstock.engine.model.step_trials import (
    TRIAL_ROWS,
    TRIAL_TOKENS,
    MeasuredStep,
    Reserve,
    StepTrials,
    trial_seconds,
)
from penstock.engine.request import Sampling
from penstock.engine.schedule.costs import first_scores_bytes
from penstock.kv.block_format import BlockFormat
from penstock.kv.segment import KVSpan
from penstock.kv.states import RecurrentState, StateForm
from penstock.kv.tails import Tails
from penstock.models.adapters import adapters_of

logger = logging.getLogger(__name__)

FAR_TOKENS = 4_096
"""Context length of the calibration chunk for compressed layers: enough rows to fill the top-k."""
SCAN_TRIAL_TOKENS = 16
"""Tokens of the first trial chunk of a recurrent model; in a shorter one, its states dominate."""
SCAN_TOKENS = 256
"""Maximum number of tokens for whose pairs mlx-lm's scans compute a weight each."""
SCAN_COPIES = 8
"""Number of float32 copies of these weights alive at once: 6 were measured."""
LOGIT_COPIES = 4
"""Approximate number of float32 copies of a row's logits while sampling with all settings."""
EVERYTHING = Sampling(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=True,
    top_logprobs=20,
)
"""Sampling settings that use the most memory."""


def no_reservation(nbytes: int) -> AbstractContextManager[object]:
    return nullcontext()


def no_bound() -> float:
    return inf


def step_peaks(
    runner: Runner,
    limits: EngineSettings,
    tails: Tails,
    reserve: Reserve = no_reservation,
    free: Callable[[], float] = no_bound,
) -> StepPeaks:
    """Return the peak bytes of the largest steps, excluding their results.

    They are measured only if no engine with the same limits and a model of the same shapes was
    created before, in this process or, if measuring takes long, in another one.

    Measuring may allocate the memory of the tails.

    Args:
        reserve: reserves the expected bytes of a step before it runs.
        free: returns the bytes that could be reserved.

    Raises:
        LedgerFull, NeverFits: no step large enough to extrapolate from fits in memory.
    """
    run_as = (
        *(limits.step_tokens, limits.max_batch_size, limits.max_kv_size, limits.keep_tokens),
        *(tails.columns, limits.speculative_tokens, repr(runner.device), runner.divided),
        *(runner.layout.compresses, limits.attend_tokens, limits.attend_full_layers),
        limits.attend_rest,
        runner.ways.nbytes(1, 1) > 0,
    )
    # Ranks run all steps together, but only some of them may have the file.
    open_file = RememberedPeaks if runner.ranks == 1 else None
    return measured_once(
        runner.model, run_as, lambda: run_steps(runner, limits, tails, reserve, free), open_file
    )


def run_steps(
    runner: Runner,
    limits: EngineSettings,
    tails: Tails,
    reserve: Reserve = no_reservation,
    free: Callable[[], float] = no_bound,
) -> StepPeaks:
    """Measure the peak memory of the largest steps on dummy input."""
    width, slots = limits.speculative_tokens + 1, limits.max_batch_size
    figures = figures_of(runner)
    trials = StepTrials(
        reserve,
        free,
        alone=runner.ranks == 1,
        seconds=trial_seconds(runner.weight_bytes()),
        kinds=4 if figures.compresses else 3,
        clock=time.process_time if runner.device.facts.on_heap else time.perf_counter,
    )
    recurrent = figures.is_recurrent and not figures.compresses
    token, logits = runner.step_token_bytes, LOGIT_COPIES * 4 * runner.vocabulary_size
    memory, states = runner.device.memory, runner.state_form

    def scores(tokens: int) -> int:
        return first_scores_bytes(figures, memory, tokens) + scan_bytes(states, tokens)

    def whole(chunk: MeasuredStep) -> int:
        scan = scan_bytes(states, limits.step_tokens) if chunk.size < limits.step_tokens else 0
        return chunk.scaled(limits.step_tokens) + scan

    logger.info("measuring the peak memory of engine steps, starting with a short one")
    # Rows take little time, so most of it is left for chunks, whose memory grows most.
    decoded = trials.measure(
        partial(decode, runner, tails, width), slots, width * (token + logits), first=TRIAL_ROWS
    )
    sampled = trials.measure(partial(sample, runner), slots, logits, first=TRIAL_ROWS)
    read = trials.measure(
        partial(prefill, runner),
        limits.step_tokens,
        token,
        first=SCAN_TRIAL_TOKENS if recurrent else TRIAL_TOKENS,
        scores=scores,
        constant=recurrent,
    )
    far = 0
    if figures.compresses:
        blank = BlockFormat.of(runner.shapes).blank(FAR_TOKENS).nbytes
        beyond = trials.measure(
            partial(_prefill_far, runner),
            limits.step_tokens,
            token,
            beside=blank,
            scores=scores,
        )
        far = blank + whole(beyond)
    outside = outside_row_bytes(runner.model)  # not included in any trial
    return StepPeaks(
        prefill=whole(read) + limits.step_tokens * outside,
        decode=decoded.scaled(slots) + slots * width * outside,
        sample=sampled.scaled(slots),
        far=far,
        far_tokens=FAR_TOKENS,
        token_seconds=read.seconds / read.size,
        measured_tokens=read.size,
    )


def scan_bytes(states: StateForm, tokens: int) -> int:
    """Return the bytes of a scan over a chunk that grow with the square of its length."""
    heads = max((shape[1] for _, shape, _ in states.arrays if len(shape) == 4), default=0)
    return SCAN_COPIES * mx.float32.size * heads * min(tokens, SCAN_TOKENS) ** 2


def prefill(runner: Runner, count: int) -> None:
    runner.prefill([0] * count, (), 0, adapter=len(adapters_of(runner.model).names))


def decode(runner: Runner, tails: Tails, width: int, count: int) -> None:
    kinds = 1 + len(adapters_of(runner.model).names)  # rows with different adapters take the most
    rows = [DecodeRow((), 0, slot, 0, adapter=slot % kinds) for slot in range(count)]
    recurrent_states = [None] * count if runner.is_recurrent else []
    decoded = runner.decode([[0] * width] * count, rows, tails, recurrent_states)
    mx.eval(decoded.logits, decoded.arrays(), tails.buffers())


def sample(runner: Runner, count: int) -> None:
    logits = mx.random.normal((count, runner.vocabulary_size), key=mx.random.key(0))
    samplers = [TokenSampler(EVERYTHING, (0,), choice) for choice in range(count)]
    sample_all(logits, samplers, [()] * count)


def _prefill_far(runner: Runner, count: int) -> None:
    """Prefill a chunk of `count` tokens after `FAR_TOKENS` blank ones."""
    states = runner.state_form
    nothing = {name: mx.zeros(shape, dtype) for name, shape, dtype in states.arrays}
    blank = BlockFormat.of(runner.shapes).blank(FAR_TOKENS)
    span = KVSpan(blank, 0, FAR_TOKENS)
    state, last = RecurrentState(states.states(nothing)), len(adapters_of(runner.model).names)
    runner.prefill([0] * count, [span], FAR_TOKENS, state, adapter=last)
