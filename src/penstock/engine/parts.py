"""Construction of an engine: each part is made after its bytes were reserved.

limits ──> ledger ──> weights, tails, buffers of a step ──> tree, tiers ──> budget
──> scheduler, admission, executor, restoring: what runs sequences on them
"""

from __future__ import annotations

from typing import Any

from penstock.config import EngineSettings
from penstock.engine.intake import Intake
from penstock.engine.memory_pressure import MemoryPressure
from penstock.engine.model.executor import ModelExecutor
from penstock.engine.model.runner import Runner
from penstock.engine.offload.prefill_rate import PrefillRate
from penstock.engine.offload.restoring import Restoring
from penstock.engine.offload.tier_group import TierGroup, open_tiers
from penstock.engine.planner import StepPlanner
from penstock.engine.postprocess import Postprocessor
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.window_relief import WindowRelief
from penstock.engine.retention.windows import Windows, windows_of
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import (
    FixedReservations,
    MemoryBudget,
    reserve_fixed,
    weight_bytes,
)
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.settings import fitting, identity
from penstock.engine.stats import Counters
from penstock.engine.view import EngineView
from penstock.errors import LedgerFull, NeverFits
from penstock.heap import keep_freed_memory
from penstock.kv import backend
from penstock.kv.block_format import BlockFormats
from penstock.kv.block_spans import span_tokens
from penstock.kv.quantization import QuantizationRule
from penstock.kv.segment import Segment
from penstock.ledger import Kind, Ledger
from penstock.memory import format_bytes
from penstock.prefix.bounded_tree import remembered_nodes
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.prefixes import MAX_MERGE_TOKENS, Prefixes


class EngineParts:
    """The parts of one engine, connected. Not thread-safe: the engine's thread.

    Args:
        model: mlx-lm's.
        tokenizer: mlx-lm's wrapper, or None.
        limits: settings, checked; those in `self.limits` are fitted to the model.
        group: the processes that run the same engine over the other parts of the model.
        fingerprint: what must be equal for KV to be reusable, besides the tokens.

    Raises:
        ModelError: the engine cannot run this model.
        NeverFits: weights and buffers alone are over the limit.
        SettingError: the model cannot be run with these settings.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        limits: EngineSettings,
        group: ProcessGroup,
        fingerprint: str,
    ) -> None:
        if backend.current().on_heap:
            keep_freed_memory(limits.memory_limit)
        self.limits = limits
        self.group = group
        self.clock = group.clock
        self.tokenizer = tokenizer
        self.counters = Counters()
        self.ledger = Ledger(limits.memory_limit)
        self.tiers: TierGroup | None = None
        try:
            self._make_stores(model, fingerprint)
        except LedgerFull as error:
            raise self._too_small(error) from None
        self._connect()

    def _too_small(self, error: LedgerFull) -> NeverFits:
        """Return the error of a limit in which an empty engine has no room."""
        needed, limit = self.ledger.used_bytes + error.needed_bytes, self.ledger.limit_bytes
        return NeverFits(
            f"weights, tails, the buffers of a step and the index need "
            f"{format_bytes(needed)} and more; the limit is {format_bytes(limit)}. Raise "
            f"memory_limit, or lower max_batch_size or prefill_chunk",
            needed,
            limit,
            limit,
        )

    # ---- memory

    def _make_stores(self, model: Any, fingerprint: str) -> None:
        """Make the parts that take memory."""
        fixed = self._load(model)
        rule, fingerprint = identity(
            model, self.limits, self.runner, self.group, fingerprint=fingerprint
        )
        self._make_tree(fingerprint)
        self.requantizer: Requantizer | None = None
        if rule is not None:
            self.requantizer = Requantizer(rule, self.prefixes, self.runner.shapes, self.limits)
        self._open_tiers(rule)
        copying = (self.tiers, self.requantizer, self.windows)
        self.budget = MemoryBudget(
            fixed,
            self.estimator,
            self.prefixes,
            copying=[part for part in copying if part is not None],
            token_bytes=self.runner.token_bytes,
        )

    def _load(self, model: Any) -> FixedReservations:
        """Make runner and tails, and reserve weights, pool and the buffers of a step."""
        weights = weight_bytes(model)
        # The rank with the least room decides for all: KV is as large on each.
        room = self.group.least(self.limits.memory_limit - weights)
        self.ledger.set_limit(max(0, weights + room))
        reserved = self.ledger.reserve(Kind.WEIGHTS, weights)
        self.runner = Runner(
            model,
            max_kv_size=self.limits.max_kv_size,
            keep=self.limits.keep_tokens,
            ranks=self.group.size,
        )
        self.group.check_equal("what the layers of a part keep of a token", self.runner.keeps)
        self.limits = fitting(self.limits, self.runner, ranks=self.group.size)
        self.estimator = MemoryEstimator(self.runner, self.limits)
        fixed, self.tails = reserve_fixed(
            reserved, self.ledger, self.limits, self.runner, self.estimator, self.group
        )
        return fixed

    def _make_tree(self, fingerprint: str) -> None:
        """Make the tree, and the parts that thin the states and the windows in it."""
        runner, size = self.runner, self.limits.block_size
        coded = self.limits.kv_cache_quantization is not None
        self.prefixes: Prefixes[Segment] = Prefixes(
            self.ledger,
            block_size=size,
            fingerprint=fingerprint,
            clock=self.clock,
            # Ranks whose weights differ have limits that do.
            remembered=remembered_nodes(self.group.least(self.ledger.limit_bytes)),
            # Coded nodes may be longer: time goes by the number of parts that are read.
            max_merge_bytes=MAX_MERGE_TOKENS * runner.token_bytes if coded else 0,
            span_tokens=span_tokens(size),
        )
        self.checkpoints: Checkpoints | None = None
        if runner.is_recurrent:
            # States of a prompt are captured where chunks end.
            chunk = self.limits.step_tokens // size * size
            self.checkpoints = Checkpoints(
                self.prefixes, runner.state_bytes, spacing_tokens=min(span_tokens(size), chunk)
            )
        self.windows: Windows | None = None
        if windows := windows_of(runner.attention_windows, self.limits.max_kv_size):
            self.windows = Windows(self.prefixes, windows, runner.shapes)

    def _open_tiers(self, rule: QuantizationRule | None) -> None:
        """Open the cold tiers that the settings name."""
        self.prefill_rate = PrefillRate(self.group.mean(self.estimator.prefill_token_seconds))
        self.tiers = open_tiers(
            self.limits,
            self.prefixes,
            BlockFormats(self.runner.shapes, self.limits.block_size, rule),
            self.prefill_rate,
            in_place=not backend.current().own_memory,
            state_form=self.runner.state_form if self.runner.is_recurrent else None,
            group=self.group,
        )

    # ---- sequences

    def _connect(self) -> None:
        """Make the parts that run sequences."""
        limits, size = self.limits, self.limits.block_size
        self.stores = KVStores(
            prefixes=self.prefixes,
            checkpoints=self.checkpoints,
            windows=self.windows,
            requantizer=self.requantizer,
            tiers=self.tiers,
            tails=self.tails,
            runner=self.runner,
            counters=self.counters,
            shared_tokens=0 if self.runner.fitness.whole else limits.max_kv_size // size * size,
        )
        self.scheduler: Scheduler[Sequence] = Scheduler(
            limits.max_batch_size, limits.step_tokens, size, limits.max_queue
        )
        self.admission = Admission(self.scheduler, budget=self.budget, stores=self.stores)
        if self.windows is not None:
            written = self.tiers if self.group.size == 1 else None
            self.prefixes.relief = WindowRelief(self.windows, self.admission, written)
        self.restoring: Restoring | None = None
        if self.tiers is not None:
            self.restoring = Restoring(
                self.tiers,
                self.prefixes,
                self.scheduler,
                admission=self.admission,
                stores=self.stores,
                budget=self.budget,
                clock=self.clock,
            )
        self.intake = Intake(
            self.tokenizer,
            stores=self.stores,
            scheduler=self.scheduler,
            admission=self.admission,
            budget=self.budget,
            clock=self.clock,
        )
        self._make_step()
        self.view = EngineView(
            limits=limits,
            stores=self.stores,
            scheduler=self.scheduler,
            admission=self.admission,
            budget=self.budget,
            estimator=self.estimator,
            tokenizer=self.tokenizer,
        )

    def _make_step(self) -> None:
        """Make the parts of a step's three calls."""
        pressure = MemoryPressure(self.limits.memory_threshold, self.prefixes, self.group)
        self.planner = StepPlanner(
            self.scheduler,
            self.admission,
            self.restoring,
            pressure,
            prefill_rate=self.prefill_rate,
            max_stall_ms=self.limits.max_stall_ms,
        )
        self.executor = ModelExecutor(self.stores, self.group, self.limits.speculative_tokens)
        self.postprocessor = Postprocessor(
            self.stores,
            self.scheduler,
            admission=self.admission,
            group=self.group,
            prefill_rate=self.prefill_rate,
            ends=frozenset(() if self.tokenizer is None else self.tokenizer.eos_token_ids),
        )
