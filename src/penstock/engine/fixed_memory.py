"""Memory reserved once at startup: the pool of tails, and the buffers of the largest steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2

import mlx.core as mx

from penstock.config import MAX_BATCH_SIZE, PREFILL_CHUNK, EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.model.runner_figures import figures_of
from penstock.engine.model.shared_text import SharedText
from penstock.engine.model.step_peaks import SLACK
from penstock.engine.model.step_trials import Reserve
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.run.measured_steps import LOGIT_COPIES, decode, prefill, sample, step_peaks
from penstock.engine.schedule.budget import FixedReservations
from penstock.engine.schedule.costs import MASK_BYTES, MemoryEstimator
from penstock.errors import StepTooLarge
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory.sizes import format_bytes

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


SMALL_BATCH = 8
"""Batch size assumed to fit."""
FIRST = 4
"""Tokens or sequences of the first trial step."""
DOUBLINGS = 3
"""Maximum doublings beyond twice the usual size; from there on memory grows linearly."""


def check_largest_steps(
    ledger: Ledger, limits: EngineSettings, runner: Runner, group: ProcessGroup, columns: int
) -> None:
    """Raise if a batch or chunk cannot fit in the memory left by the weights; skips default sizes.

    Small steps are run within reserved bytes, doubling in size while the next one should fit. The
    bytes of the largest step are extrapolated from the last two.

    Args:
        group: process group of the ranks; the one that needs the most memory decides.

    Raises:
        StepTooLarge: a step cannot fit; the error has the bytes needed.
    """
    free, reserve = ledger.free_bytes, partial(ledger.reserve, Kind.BUFFERS)
    sequences, tokens = limits.max_batch_size, limits.step_tokens
    if sequences > MAX_BATCH_SIZE:
        pool = sequences * columns * runner.token_bytes
        masks = MASK_BYTES * sequences * runner.vocabulary_size
        _check("max_batch_size", sequences, pool + masks, ledger)
        width, logits = limits.speculative_tokens + 1, LOGIT_COPIES * 4 * runner.vocabulary_size
        row = width * (runner.step_token_bytes + logits) + columns * runner.token_bytes
        for run, beside, unit in (
            (partial(sample, runner), pool + masks, logits),
            (partial(_decode, runner, columns, width), pool, row),
        ):
            trial = SizedTrial(run, unit, reserve, group)
            step = trial.needed(SMALL_BATCH, sequences, free - beside)
            _check("max_batch_size", sequences, beside + int(SLACK * step), ledger)
    if tokens > PREFILL_CHUNK and not runner.fitness.whole:
        setting = "prefill_chunk" if tokens == limits.prefill_chunk else "block_size"
        _check(setting, tokens, tokens * runner.held_token_bytes, ledger)
        # Back ends that bound the number of scores reach it within a chunk of the default size.
        trial = SizedTrial(partial(prefill, runner), runner.step_token_bytes, reserve, group)
        step = trial.needed(PREFILL_CHUNK, tokens, free)
        _check(setting, tokens, int(SLACK * step), ledger)


def _check(setting: str, value: int, needed: int, ledger: Ledger) -> None:
    limit, free = ledger.limit_bytes, ledger.free_bytes
    if needed <= free:
        return
    flag = f"--{setting.replace('_', '-')}"
    raise StepTooLarge(
        f"{setting} ({flag}) of {value:,} needs about {format_bytes(needed)} for one step; the "
        f"limit of {format_bytes(limit)} leaves {format_bytes(free)} beside the weights. Lower "
        f"{flag}, or raise --memory-limit",
        needed,
        free,
        limit,
    )


class SizedTrial:
    """Measures steps of growing size, each within a reservation of its expected bytes.

    Args:
        run: runs a step of a number of tokens or rows.
        unit_bytes: approximate bytes per token or row.
        reserve: reserves bytes during a step.
        group: process group of the ranks; the one that needs the most memory decides.
    """

    def __init__(
        self,
        run: Callable[[int], object],
        unit_bytes: int,
        reserve: Reserve,
        group: ProcessGroup,
    ) -> None:
        self._run = run
        self._unit_bytes = unit_bytes
        self._reserve = reserve
        self._group = group

    def needed(self, small: int, target: int, free_bytes: int) -> int:
        """Return the bytes of a step of `target` tokens or rows, running only steps that fit.

        Args:
            small: size up to which steps are run if they fit; larger ones may be extrapolated.
            target: size of the step.
            free_bytes: maximum expected bytes of a step that is run.
        """
        size, less, taken = min(FIRST, small), 0, 0
        expected = self._unit_bytes * size
        while expected <= free_bytes:
            less, taken = taken, self._taken(size, expected)
            if size == target:
                return taken
            if size >= small << DOUBLINGS + 1:
                return _line(size, less, taken, target)
            following = min(2 * size, target)
            # A constant plus linear growth, or a power law.
            power = taken * (taken / max(1, less)) ** log2(following / size)
            if size >= 2 * small:
                line = _line(size, less, taken, target)
                if max(line, power) > free_bytes or target <= 2 * size:
                    return max(line, int(power))
            expected = int(SLACK * (power if less else taken * following / size))
            size = following
        return max(expected, expected * target // size)

    def _taken(self, size: int, expected: int) -> int:
        with self._reserve(expected):
            if size <= FIRST:
                self._run(size)  # the first run may allocate caches
            return max(1, self._group.maximum(_peak(partial(self._run, size))))


def _line(size: int, less: int, taken: int, target: int) -> int:
    """Extrapolate bytes linearly from two steps, of `size` and of half that size."""
    return taken + (taken - less) * (target - size) * 2 // size


def _decode(runner: Runner, columns: int, width: int, count: int) -> None:
    decode(runner, Tails(count, columns, runner.shapes), width, count)


def _peak(run: Callable[[], object]) -> int:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before
