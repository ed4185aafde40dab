"""Construction of the scheduling parts: budget, scheduler, admission and restoring."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.foundation import Foundation
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.windows import WindowRelief, Windows
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.restoring import Restoring
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    budget: MemoryBudget
    scheduler: Scheduler[Sequence]
    admission: Admission
    restoring: Restoring


def make_scheduling(
    base: Foundation, stores: KVStores, tiers: TierGroup, draft_bytes: int = 0
) -> Scheduling:
    """Create the scheduling components and connect them to the ledger and the stores."""
    limits, prefixes = base.limits, stores.prefixes
    budget = MemoryBudget(
        base.fixed,
        base.estimator,
        prefixes,
        copying=[tiers, *stores.retentions],
        token_bytes=base.runner.held_token_bytes,
        draft_bytes=draft_bytes,
    )
    scheduler: Scheduler[Sequence] = Scheduler(
        limits.max_batch_size,
        limits.step_tokens,
        limits.block_size,
        limits.max_queue,
        preempts_for_shares=limits.attend_tokens is None,
        moved=Sequence.note_phase,
    )
    admission = Admission(scheduler, budget=budget, stores=stores, tiers=tiers)
    for windows in stores.all_of(Windows):
        waiting = tiers.waiting_nodes if base.group.size == 1 else frozenset[int]
        base.beside.relief = WindowRelief(windows, admission.readers, waiting)
    restoring = Restoring(
        tiers,
        prefixes,
        scheduler,
        admission=admission,
        stores=stores,
        budget=budget,
        clock=base.group.clock,
    )
    return Scheduling(budget=budget, scheduler=scheduler, admission=admission, restoring=restoring)
