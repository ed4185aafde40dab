"""Foundation of an engine: the memory that is taken before any KV is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config import EngineSettings
from penstock.engine.model.attention_ways import chosen_ways, turned_off
from penstock.engine.model.choosing import selection
from penstock.engine.model.runner import Runner
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.budget import FixedReservations, reserve_fixed, weight_bytes
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.settings import fitting
from penstock.errors import LedgerFull, NeverFits
from penstock.heap import keep_freed_memory
from penstock.kv import backend
from penstock.kv.tails import Tails
from penstock.ledger import Kind, Ledger
from penstock.memory import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """Ledger, model and pool of one engine; weights, pool and buffers of a step are reserved."""

    limits: EngineSettings
    """Settings, fitted to the model."""
    group: ProcessGroup
    ledger: Ledger
    runner: Runner
    estimator: MemoryEstimator
    tails: Tails
    fixed: FixedReservations


def lay_foundation(
    model: Any, limits: EngineSettings, group: ProcessGroup, ledger: Ledger
) -> Foundation:
    """Make runner and tails, and reserve weights, pool and the buffers of a step.

    Raises:
        LedgerFull: weights and buffers alone are over the limit; see `too_small`.
        ModelError: the engine cannot run this model.
        SettingError: the model cannot be run with these settings.
    """
    if backend.current().on_heap:
        keep_freed_memory(limits.memory_limit)
    weights = weight_bytes(model)
    # The rank with the least room decides for all: KV is as large on each.
    room = group.least(limits.memory_limit - weights)
    ledger.set_limit(max(0, weights + room))
    reserved = ledger.reserve(Kind.WEIGHTS, weights)
    runner = Runner(
        model, max_kv_size=limits.max_kv_size, keep=limits.keep_tokens, ranks=group.size
    )
    group.check_equal("what the layers of a part keep of a token", runner.keeps)
    limits = fitting(limits, runner, room, ranks=group.size)
    runner.selection = selection(runner, limits, compiled=not turned_off(limits))
    runner.most_joined = limits.active_kv_size
    if limits.active_kv_size is None:  # kernels read memory alone
        runner.ways = chosen_ways(runner, limits, ledger)
    estimator = MemoryEstimator(runner, limits)
    fixed, tails = reserve_fixed(reserved, ledger, limits, runner, estimator, group)
    return Foundation(
        limits=limits,
        group=group,
        ledger=ledger,
        runner=runner,
        estimator=estimator,
        tails=tails,
        fixed=fixed,
    )


def too_small(ledger: Ledger, error: LedgerFull) -> NeverFits:
    """Return the error of a limit in which an empty engine has no room."""
    needed, limit = ledger.used_bytes + error.needed_bytes, ledger.limit_bytes
    return NeverFits(
        f"weights, tails, the buffers of a step and the index need "
        f"{format_bytes(needed)} and more; the limit is {format_bytes(limit)}. Raise "
        f"memory_limit, or lower max_batch_size or prefill_chunk",
        needed,
        limit,
        limit,
    )
