"""Whether the largest steps that the settings ask for can fit, told before memory is taken.

A small step is doubled as long as the next one would fit, as far as the last two tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2

import mlx.core as mx

from penstock.config import MAX_BATCH_SIZE, EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import TokenSampler, sample_all
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.costs import EVERYTHING
from penstock.errors import StepTooLarge
from penstock.kv.reads import DecodeRow
from penstock.kv.tails import Tails
from penstock.ledger import Ledger
from penstock.memory import format_bytes

SMALL_BATCH = 8


def check_largest_steps(
    ledger: Ledger, limits: EngineSettings, runner: Runner, group: ProcessGroup, columns: int
) -> None:
    """Refuse a batch that cannot fit beside the weights; the usual ones are not tried.

    Args:
        ledger: holds the weights.
        limits: of the engine.
        runner: of its model.
        group: of them, the one that takes most counts.
        columns: of a tail.

    Raises:
        StepTooLarge: with what it would take.
    """
    sequences = limits.max_batch_size
    if sequences > MAX_BATCH_SIZE:
        _check("max_batch_size", sequences, partial(_sampled, runner, sequences, group), ledger)
        _check(
            "max_batch_size",
            sequences,
            partial(_needed, lambda n: _decode(runner, n, columns), SMALL_BATCH, sequences, group),
            ledger,
        )


def _check(setting: str, asked: int, needed: Callable[[int], int], ledger: Ledger) -> None:
    limit = ledger.limit_bytes
    free = limit - ledger.used_bytes
    wanted = needed(free)
    if wanted <= free:
        return
    flag = f"--{setting.replace('_', '-')}"
    raise StepTooLarge(
        f"{setting} ({flag}) of {asked:,} needs about {format_bytes(wanted)} for one step; the "
        f"limit of {format_bytes(limit)} leaves {format_bytes(free)} beside the weights. Lower "
        f"{flag}, or raise --memory-limit",
        wanted,
        free,
        limit,
    )


def _needed(
    run: Callable[[int], object], small: int, asked: int, group: ProcessGroup, free_bytes: int
) -> int:
    """Return what a step of so many sequences or tokens takes; none that would not fit is run."""
    run(small)  # the first time, something else may be made
    size = 2 * small
    less, taken = (max(1, group.most(_peak(partial(run, n)))) for n in (small, size))
    while size < asked:
        following = min(2 * size, asked)
        # What grows in a line, beside what does not grow; or what grows with a power.
        line = taken + (taken - less) * (following - size) / (size / 2)
        power = taken * (taken / less) ** log2(following / size)
        needed = int(max(line, power))
        if needed > free_bytes or following == asked:
            return needed * asked // following
        size, less = following, taken
        taken = max(1, group.most(_peak(partial(run, size))))
    return taken


def _sampled(runner: Runner, asked: int, group: ProcessGroup, free_bytes: int) -> int:
    """Return what it takes to choose tokens for so many: that grows in a line, and takes long."""
    size = runner.vocabulary_size

    def sample(count: int) -> None:
        logits = mx.random.normal((count, size), key=mx.random.key(0))
        samplers = [TokenSampler(EVERYTHING, (0,), choice) for choice in range(count)]
        sample_all(logits, samplers, [()] * count)

    few, more = (group.most(_peak(partial(sample, n * SMALL_BATCH))) for n in (1, 2))
    return (more - few) * asked // SMALL_BATCH


def _decode(runner: Runner, count: int, columns: int) -> None:
    """Decode for so many sequences of nothing."""
    tails = Tails(count, columns, runner.shapes)
    rows = [DecodeRow((), 0, slot, 0) for slot in range(count)]
    recurrent_states = [None] * count if runner.is_recurrent else []
    decoded = runner.decode([0] * count, rows, tails, recurrent_states)
    mx.eval(decoded.logits, decoded.arrays(), tails.buffers())


def _peak(run: Callable[[], object]) -> int:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before
