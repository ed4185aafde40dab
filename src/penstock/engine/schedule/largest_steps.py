"""Check that the largest steps that the settings ask for fit, before they take memory.

Small steps are run; a straight line through the last two predicts the one that is asked for.
A step is doubled a few times, as long as the next one would fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2

import mlx.core as mx

from penstock.config import MAX_BATCH_SIZE, PREFILL_CHUNK, EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import TokenSampler, sample_all
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.costs import EVERYTHING, MASK_BYTES, SLACK
from penstock.errors import StepTooLarge
from penstock.kv.attention_plan import DecodeRow
from penstock.kv.tails import Tails
from penstock.ledger import Ledger
from penstock.memory import format_bytes

SMALL_BATCH = 8
"""Sequences of the first step that is tried."""
DOUBLINGS = 3
"""Most doublings of a step; its bytes grow in a line from there on."""


def check_largest_steps(
    ledger: Ledger, limits: EngineSettings, runner: Runner, group: ProcessGroup, columns: int
) -> None:
    """Refuse a batch or a chunk that cannot fit beside the weights; the usual ones are not tried.

    Args:
        ledger: the ledger; the weights are counted in it.
        limits: the engine's settings.
        runner: runs its model.
        group: the ranks; the one that takes most counts.
        columns: columns of a tail.

    Raises:
        StepTooLarge: one cannot fit; the error has the bytes that it would take.
    """
    free = ledger.free_bytes
    sequences, tokens = limits.max_batch_size, limits.step_tokens
    if sequences > MAX_BATCH_SIZE:
        pool = sequences * columns * runner.token_bytes
        masks = MASK_BYTES * sequences * runner.vocabulary_size
        _check("max_batch_size", sequences, pool + masks, ledger)
        for run, beside in (
            (partial(_sample, runner), pool + masks),
            (partial(_decode, runner, columns, limits.speculative_tokens + 1), pool),
        ):
            step = _needed(run, SMALL_BATCH, sequences, group, free - beside)
            _check("max_batch_size", sequences, beside + int(SLACK * step), ledger)
    if tokens > PREFILL_CHUNK and not runner.fitness.whole:
        setting = "prefill_chunk" if tokens == limits.prefill_chunk else "block_size"
        _check(setting, tokens, tokens * runner.held_token_bytes, ledger)
        # From a usual chunk on, back ends that bound their scores have as many as they ever do.
        step = _needed(partial(_prefill, runner), PREFILL_CHUNK, tokens, group, free)
        _check(setting, tokens, int(SLACK * step), ledger)


def _check(setting: str, asked: int, needed: int, ledger: Ledger) -> None:
    limit, free = ledger.limit_bytes, ledger.free_bytes
    if needed <= free:
        return
    flag = f"--{setting.replace('_', '-')}"
    raise StepTooLarge(
        f"{setting} ({flag}) of {asked:,} needs about {format_bytes(needed)} for one step; the "
        f"limit of {format_bytes(limit)} leaves {format_bytes(free)} beside the weights. Lower "
        f"{flag}, or raise --memory-limit",
        needed,
        free,
        limit,
    )


def _needed(
    run: Callable[[int], object], small: int, asked: int, group: ProcessGroup, free_bytes: int
) -> int:
    """Return the bytes of a step of `asked` sequences or tokens; only steps that fit are run.

    Args:
        run: runs a step of the given size.
        small: the first size to be tried, and the second half of it more.
        asked: the size in question.
        group: the ranks; the one that takes most counts.
        free_bytes: bytes that a step may take.
    """
    run(small)  # the first time, something else may be made
    size = 2 * small
    less, taken = (max(1, group.most(_peak(partial(run, n)))) for n in (small, size))
    for _ in range(DOUBLINGS):
        line = _line(size, less, taken, asked)
        following = min(2 * size, asked)
        # Bytes that grow in a line, beside a constant; or bytes that grow with a power.
        power = taken * (taken / less) ** log2(following / size)
        if line > free_bytes or power > free_bytes or asked <= 2 * size:
            return max(line, int(power))
        size, less = following, taken
        taken = max(1, group.most(_peak(partial(run, size))))
    return _line(size, less, taken, asked)


def _line(size: int, less: int, taken: int, asked: int) -> int:
    """Return the bytes of a size on the line through those of a size and of its half."""
    return taken + (taken - less) * (asked - size) * 2 // size


def _sample(runner: Runner, count: int) -> None:
    """Choose tokens for so many sequences."""
    logits = mx.random.normal((count, runner.vocabulary_size), key=mx.random.key(0))
    samplers = [TokenSampler(EVERYTHING, (0,), choice) for choice in range(count)]
    sample_all(logits, samplers, [()] * count)


def _decode(runner: Runner, columns: int, width: int, count: int) -> None:
    """Decode `width` tokens for so many empty sequences."""
    tails = Tails(count, columns, runner.shapes)
    rows = [DecodeRow((), 0, slot, 0) for slot in range(count)]
    recurrent_states = [None] * count if runner.is_recurrent else []
    decoded = runner.decode([[0] * width] * count, rows, tails, recurrent_states)
    mx.eval(decoded.logits, decoded.arrays(), tails.buffers())


def _prefill(runner: Runner, count: int) -> None:
    """Read a chunk of so many tokens of number 0."""
    runner.prefill([0] * count, (), 0)


def _peak(run: Callable[[], object]) -> int:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before
