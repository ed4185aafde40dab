"""Memory reserved once at startup: the pool of tails, and the buffers of the largest steps."""

from __future__ import annotations

from functools import partial

from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.model.runner_figures import figures_of
from penstock.engine.model.shared_text import SharedText
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.run.largest_steps import check_largest_steps
from penstock.engine.run.measured_steps import step_peaks
from penstock.engine.schedule.budget import FixedReservations
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Ledger, Reservation

TAIL_TOKENS = 8
"""Minimum columns of a tail. More columns are copied out less often and leave fewer segments to
read; fewer columns waste less memory."""
MOST_TAIL_TOKENS = 32
POOL_TOKENS = 64
"""Columns of all tails together if the batch is small: eight tails of the minimum length."""
LARGE_POOL_TOKENS = 128
"""Columns of all tails together if they take at most `POOL_SHARE` of the weights' bytes."""
POOL_SHARE = 0.025
"""Largest share of the weights' bytes that `LARGE_POOL_TOKENS` columns may take."""


def reserve_fixed(
    weights: Reservation,
    ledger: Ledger,
    limits: EngineSettings,
    runner: Runner,
    group: ProcessGroup,
) -> tuple[FixedReservations, Tails, MemoryEstimator]:
    """Reserve and allocate the pool of tails, then measure the largest step and reserve its bytes.

    In a group, all ranks reserve the bytes of the rank whose step takes the most.

    Raises:
        LedgerFull, NeverFits: pool and step do not fit in the memory left by the weights.
        StepTooLarge: a batch or chunk is far too large; nothing was reserved.
    """
    slots, spare = limits.max_batch_size, limits.speculative_tokens
    large = LARGE_POOL_TOKENS * runner.token_bytes <= POOL_SHARE * weights.nbytes
    columns = _tail_columns(limits, LARGE_POOL_TOKENS if group.least(large) else POOL_TOKENS)
    check_largest_steps(ledger, limits, runner, group, columns + spare)
    pool = ledger.reserve(Kind.TAILS, slots * (columns + spare) * runner.token_bytes)
    tails = Tails(slots, columns, runner.shapes, spare)
    estimator = measured_estimator(runner, limits, tails, ledger)
    step_bytes = group.maximum(estimator.step_bytes) + (SharedText.nbytes_of() if spare else 0)
    step = ledger.reserve(Kind.BUFFERS, step_bytes)
    tails.drop()  # allocated again when a sequence decodes
    chunk = ledger.reserve(Kind.BUFFERS, 0)
    return FixedReservations(weights=weights, pool=pool, step=step, chunk=chunk), tails, estimator


def measured_estimator(
    runner: Runner, limits: EngineSettings, tails: Tails, ledger: Ledger
) -> MemoryEstimator:
    """Return an estimator, after measuring the peak memory of the largest steps.

    Raises:
        LedgerFull, NeverFits: there is no memory for a step that is measured.
    """
    reserve = partial(ledger.reserve, Kind.BUFFERS)
    peaks = step_peaks(runner, limits, tails, reserve, lambda: ledger.free_bytes)
    return MemoryEstimator(figures_of(runner), limits, runner.device.memory, peaks, runner.ways)


def _tail_columns(limits: EngineSettings, pool_tokens: int) -> int:
    """Return the columns per tail: more if the batch is small."""
    block_size = limits.block_size
    columns = min(MOST_TAIL_TOKENS, pool_tokens // limits.max_batch_size, block_size // 2)
    # Proposed tokens must fit in the tail.
    return min(max(TAIL_TOKENS, columns, 2 * limits.speculative_tokens), block_size)
