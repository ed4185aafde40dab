"""Construction of an engine's components, each after its memory was reserved.

foundation: ledger, weights, tails, buffers of a step
──> stores: tree, retention, tiers ──> scheduling: budget, scheduler, admission, restoring
──> the three phases of a step, the intake of requests, the view for queries
"""

from __future__ import annotations

from typing import Any

from penstock.config import EngineSettings
from penstock.engine.draft.draft_choice import open_draft
from penstock.engine.foundation import lay_foundation, too_small
from penstock.engine.intake import Intake
from penstock.engine.memory_pressure import MemoryPressure
from penstock.engine.model.span_inputs import open_features
from penstock.engine.model.text_decoding import text_of
from penstock.engine.planner import StepPlanner
from penstock.engine.postprocess import Postprocessor
from penstock.engine.prefill_rate import PrefillRate
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.run.executor import ModelExecutor
from penstock.engine.run.speculator import Speculator
from penstock.engine.scheduling import make_scheduling
from penstock.engine.stores import open_stores
from penstock.engine.view import EngineView
from penstock.errors import LedgerFull
from penstock.ledger import Ledger


class EngineParts:
    """Connected components of one engine. Engine thread only.

    Args:
        limits: validated settings; `self.limits` has them adapted to the model.
        group: process group of the ranks among which the model is divided.
        fingerprint: identifies everything besides the tokens that KV depends on.
        ledger: memory ledger; None creates one.

    Raises:
        ModelError: the engine cannot run this model.
        NeverFits: weights and buffers alone exceed the memory limit.
        SettingError: the model does not support these settings.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        limits: EngineSettings,
        group: ProcessGroup,
        fingerprint: str,
        draft: Any = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.group = group
        self.clock = group.clock
        self.tokenizer = tokenizer
        self.text = text_of(tokenizer)
        self.ledger = Ledger(limits.memory_limit) if ledger is None else ledger
        try:
            self._make_stores(model, limits, fingerprint, draft)
        except LedgerFull as error:
            raise too_small(self.ledger, error) from None
        self._make_step()
        self._make_ways_in()

    def _make_stores(
        self, model: Any, limits: EngineSettings, fingerprint: str, draft: Any
    ) -> None:
        base = lay_foundation(model, limits, self.group, self.ledger)
        self.limits, self.runner = base.limits, base.runner
        self.estimator, self.tails = base.estimator, base.tails
        token_seconds = self.group.mean(base.estimator.prefill_token_seconds)
        self.prefill_rate = PrefillRate(token_seconds, self.limits.step_tokens)
        self.stores, self.tiers = open_stores(base, fingerprint, self.prefill_rate)
        self.counters, self.prefixes = self.stores.counters, self.stores.prefixes
        alone = self.group.size == 1  # other ranks receive only a request's tokens
        self.features = open_features(model, self.prefixes, alone=alone)
        base.beside.last.append(self.features)
        self.draft = open_draft(draft, self.tokenizer, base, self.stores)
        scheduling = make_scheduling(base, self.stores, self.tiers, self.draft.fixed_bytes)
        self.budget, self.scheduler = scheduling.budget, scheduling.scheduler
        self.admission, self.restoring = scheduling.admission, scheduling.restoring

    def _make_step(self) -> None:
        # Otherwise prompts may be computed in separate passes, whose times add up for
        # --max-stall-ms.
        shares_all = self.runner.mixes and self.runner.mixes_exactly and not self.stores.by_block
        self.pressure = MemoryPressure(self.limits.memory_threshold, self.prefixes, self.group)
        self.planner = StepPlanner(
            self.scheduler,
            self.admission,
            self.restoring,
            self.pressure,
            self.features,
            prefill_rate=self.prefill_rate,
            max_stall_ms=self.limits.max_stall_ms,
            whole_blocks=self.stores.whole_blocks,
            one_pass=shares_all,
        )
        self.speculator = Speculator(self.stores, self.limits.speculative_tokens, self.draft)
        self.executor = ModelExecutor(
            self.runner,
            self.stores,
            self.group,
            self.speculator,
            logits_tokens=self.estimator.logits_tokens,
            mixed_tokens=self.estimator.mixed_tokens,
            ends=self.text.ends,
        )
        self.postprocessor = Postprocessor(
            self.stores,
            self.tiers,
            self.scheduler,
            admission=self.admission,
            group=self.group,
            prefill_rate=self.prefill_rate,
            ends=self.text.ends,
        )

    def _make_ways_in(self) -> None:
        self.intake = Intake(
            self.text,
            stores=self.stores,
            tiers=self.tiers,
            scheduler=self.scheduler,
            admission=self.admission,
            budget=self.budget,
            features=self.features,
            clock=self.clock,
        )
        self.view = EngineView(
            limits=self.limits,
            count_weights=self.runner.weight_bytes,
            stores=self.stores,
            tiers=self.tiers,
            scheduler=self.scheduler,
            admission=self.admission,
            budget=self.budget,
            estimator=self.estimator,
            decode=self.text.decoded,
            draft=self.draft,
            count_features=self.features.recount,
        )
