"""Memory that an engine takes once: the pool of tails, and the buffers of its largest steps."""

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
"""Least columns of a tail. More are copied out less often, and leave fewer parts to be read; fewer
waste less."""
MOST_TAIL_TOKENS = 32
"""Most columns of a tail."""
POOL_TOKENS = 64
"""Columns of all tails together while a batch has few places: eight tails of the least length."""
LARGE_POOL_TOKENS = 128
"""Columns of all tails together where they take at most `POOL_SHARE` of the weights' bytes."""
POOL_SHARE = 0.025
"""Share of the bytes of the weights."""


def reserve_fixed(
    weights: Reservation,
    ledger: Ledger,
    limits: EngineSettings,
    runner: Runner,
    group: ProcessGroup,
) -> tuple[FixedReservations, Tails, MemoryEstimator]:
    """Reserve and make the pool of tails, then measure a step and reserve its bytes.

    Of a group, the rank whose step takes most counts.

    Raises:
        LedgerFull, NeverFits: there is no room for both beside the weights.
        StepTooLarge: there is no room even for a fraction of them; nothing was reserved.
    """
    slots, spare = limits.max_batch_size, limits.speculative_tokens
    large = LARGE_POOL_TOKENS * runner.token_bytes <= POOL_SHARE * weights.nbytes
    columns = _tail_columns(limits, LARGE_POOL_TOKENS if group.least(large) else POOL_TOKENS)
    check_largest_steps(ledger, limits, runner, group, columns + spare)
    pool = ledger.reserve(Kind.TAILS, slots * (columns + spare) * runner.token_bytes)
    tails = Tails(slots, columns, runner.shapes, spare)
    estimator = measured_estimator(runner, limits, tails, ledger)
    step_bytes = group.most(estimator.step_bytes) + (SharedText.nbytes_of() if spare else 0)
    step = ledger.reserve(Kind.BUFFERS, step_bytes)
    tails.drop()  # until a sequence decodes
    chunk = ledger.reserve(Kind.BUFFERS, 0)
    return FixedReservations(weights=weights, pool=pool, step=step, chunk=chunk), tails, estimator


def measured_estimator(
    runner: Runner, limits: EngineSettings, tails: Tails, ledger: Ledger
) -> MemoryEstimator:
    """Measure the largest steps in reserved bytes; return the estimator of all others.

    Raises:
        LedgerFull, NeverFits: there is no room for a step, or for one that would tell.
    """
    reserve = partial(ledger.reserve, Kind.BUFFERS)
    peaks = step_peaks(runner, limits, tails, reserve, lambda: ledger.free_bytes)
    return MemoryEstimator(figures_of(runner), limits, runner.device.memory, peaks, runner.ways)


def _tail_columns(limits: EngineSettings, pool_tokens: int) -> int:
    """Return the columns of each tail: more where a small batch leaves room for them."""
    block_size = limits.block_size
    columns = min(MOST_TAIL_TOKENS, pool_tokens // limits.max_batch_size, block_size // 2)
    # Proposals end with the tail.
    return min(max(TAIL_TOKENS, columns, 2 * limits.speculative_tokens), block_size)
