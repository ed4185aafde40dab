"""Foundation of an engine: the model and the memory reserved before any KV is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.attention import devices
from penstock.config import EngineSettings
from penstock.engine.calibration import Calibration
from penstock.engine.fixed_memory import reserve_fixed
from penstock.engine.model.choosing import of_prompts, selection
from penstock.engine.model.model_probe import probe_bytes, weight_bytes
from penstock.engine.model.runner import Runner
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.budget import FixedReservations
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.settings import fitting, kernels_off, kv_dtype
from penstock.errors import LedgerFull, NeverFits
from penstock.extensions import extension
from penstock.heap import keep_freed_memory
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Ledger
from penstock.memory.sizes import format_bytes
from penstock.prefix.beside import Beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """Ledger, runner and tails of an engine, with the memory of weights and steps reserved."""

    limits: EngineSettings
    group: ProcessGroup
    ledger: Ledger
    beside: Beside[Any]
    """Registry of other memory that can be freed; each owner registers when constructed."""
    runner: Runner
    estimator: MemoryEstimator
    tails: Tails
    fixed: FixedReservations
    calibration: Calibration


def lay_foundation(
    model: Any, limits: EngineSettings, group: ProcessGroup, ledger: Ledger
) -> Foundation:
    """Create the runner and the tails, and reserve the memory of weights, pool and steps.

    Raises:
        LedgerFull: weights and buffers alone exceed the memory limit; see `too_small`.
        ModelError: the engine cannot run this model.
        SettingError: the model does not support these settings.
    """
    device = devices.current()
    if device.facts.on_heap:
        keep_freed_memory(limits.memory_limit)
    weights = weight_bytes(model)
    # The rank with the least room decides for all: KV takes as much on each.
    room = group.least(limits.memory_limit - weights)
    ledger.set_limit(max(0, weights + room))
    reserved = ledger.reserve(Kind.WEIGHTS, weights)
    with ledger.reserve(Kind.BUFFERS, probe_bytes(model)):
        runner = Runner(
            model,
            device,
            max_kv_size=limits.max_kv_size,
            keep=limits.keep_tokens,
            ranks=group.size,
            kv_dtype=kv_dtype(model, limits),
        )
    group.check_equal("what the layers of a part keep of a token", runner.keeps)
    limits = fitting(limits, runner, room, ranks=group.size)
    runner.selection = selection(runner, limits, compiled=not kernels_off(limits))
    runner.prompt_selection = of_prompts(runner.selection, limits)
    if limits.active_kv_size is not None:
        runner.most_joined = limits.active_kv_size
    kernels = extension("kernels")
    if kernels is not None:
        runner.ways = kernels.chosen_ways(runner, limits, ledger)
    fixed, tails, estimator = reserve_fixed(reserved, ledger, limits, runner, group)
    calibration = Calibration(runner, estimator, limits, ledger)
    runner.selection = calibration.centered(runner.selection)
    runner.prompt_selection = of_prompts(runner.selection, limits)
    tables = runner.selection.index.table_bytes(limits.max_kv_size + limits.step_tokens)
    fixed.step.resize(fixed.step.nbytes + group.maximum(tables))
    return Foundation(
        limits=limits,
        group=group,
        ledger=ledger,
        beside=Beside(),
        runner=runner,
        estimator=estimator,
        tails=tails,
        fixed=fixed,
        calibration=calibration,
    )


def too_small(ledger: Ledger, error: LedgerFull) -> NeverFits:
    """Return the error for a memory limit too small for an idle engine."""
    needed, limit = ledger.used_bytes + error.needed_bytes, ledger.limit_bytes
    return NeverFits(
        f"weights, tails, the buffers of a step and the index need "
        f"{format_bytes(needed)} and more; the limit is {format_bytes(limit)}. Raise "
        f"memory_limit, or lower max_batch_size or prefill_chunk",
        needed,
        limit,
        limit,
    )
