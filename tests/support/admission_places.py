"""An admission with a real scheduler, budget, tree and pool, without a model or an engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx

from penstock.attention.attention_backend import PlainOperations
from penstock.attention.attention_memory import AttentionMemory
from penstock.config import EngineSettings
from penstock.engine.counters import Counters
from penstock.engine.handle import Handle
from penstock.engine.model.figures import ModelFigures
from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.model.sampling import TokenSampler
from penstock.engine.model.step_peaks import StepPeaks
from penstock.engine.model.text import NoText, TextStream
from penstock.engine.request import Request, Sampling
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.budget import FixedReservations, MemoryBudget
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.ledger import Kind, Ledger
from penstock.prefix.prefixes import Prefixes

BLOCK, PLACES, TOKEN = 16, 2, 1_024
"""Tokens of a block, places of the batch, and bytes of a token."""
SHAPES = (LayerShape(2, 64, 64, mx.float32),)
FIXED = 50_000
SEQUENCE = 131 * (TOKEN + 2 * 32)
"""Bytes of a sequence of 100 tokens and the next 32: keys, values and scores."""
CHUNK = 2 * 131 * TOKEN
"""Bytes of a layer that its chunk joins."""


class NoTiers:
    """Cold tiers that store nothing."""

    def note(self, *given: Any, seen: bool = False) -> None:
        pass

    def note_end(self, *given: Any) -> None:
        pass

    def note_checkpoint(self, *given: Any, answered: bool = False) -> None:
        pass

    def leave(self, restores: Items[Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Places:
    """An admission, and the objects it uses."""

    def __init__(self, limit_bytes: int) -> None:
        limits = EngineSettings(
            memory_limit=limit_bytes, block_size=BLOCK, prefill_chunk=32, max_kv_size=4_096
        )
        figures = ModelFigures(shapes=SHAPES, heads=2, vocabulary_size=100)
        peaks = StepPeaks(0, 0, 0, far=0, far_tokens=1, token_seconds=0.0, measured_tokens=8)
        memory = AttentionMemory(scores_at_once=2**20)
        estimator = MemoryEstimator(figures, limits, memory, peaks, PlainOperations())
        self.ledger = Ledger(limit_bytes)
        aside = FixedReservations(
            weights=self.ledger.reserve(Kind.WEIGHTS, FIXED),
            pool=self.ledger.reserve(Kind.TAILS, 0),
            step=self.ledger.reserve(Kind.BUFFERS, 0),
            chunk=self.ledger.reserve(Kind.BUFFERS, 0),
        )
        self.prefixes: Prefixes[Segment] = Prefixes(self.ledger, block_size=BLOCK, remembered=0)
        self.tails = Tails(PLACES, 8, SHAPES)
        self.stores = KVStores(
            prefixes=self.prefixes,
            retentions=(),
            tiers=NoTiers(),
            scored=ScoredBlocks(self.prefixes, limit_bytes),
            tails=self.tails,
            figures=figures,
            counters=Counters(),
            shared_tokens=4_096,
        )
        self.scheduler: Scheduler[Sequence] = Scheduler(PLACES, 32, BLOCK, 8)
        self.budget = MemoryBudget(aside, estimator, self.prefixes, copying=(), token_bytes=TOKEN)
        self.admission = Admission(
            self.scheduler, budget=self.budget, stores=self.stores, tiers=NoTiers()
        )

    def add(self, number: int, **request: Any) -> Sequence:
        """Queue a sequence of 100 tokens that shares no prefix."""
        prompt = tuple(range(1_000 * number, 1_000 * number + 100))
        made = Request(**{"prompt": prompt, "max_tokens": 200, **request})
        sequence = Sequence(
            id=number,
            request=made,
            choice=0,
            handle=Handle(made, lambda handle: None),
            sampler=TokenSampler(Sampling(), made.prompt, 0),
            text=TextStream(NoText()),
            kv=SequenceKV(self.stores, list(made.prompt), []),
            owners=("client", number),
            priority=made.priority,
            deadline_seconds=made.timeout_seconds,
        )
        self.admission.add([sequence])
        return sequence

    def read(self, sequence: Sequence) -> None:
        """Prefill the rest of a prompt."""
        keys = mx.ones((1, 2, sequence.remaining_tokens, 64))
        sequence.kv.append_chunk(Segment(((keys, keys),), length=keys.shape[2]))
        self.admission.advance(sequence)
        self.admission.check()

    def fill(self, free_bytes: int) -> None:
        """Fill memory up to this number of free bytes."""
        self.ledger.reserve(Kind.BUFFERS, self.ledger.free_bytes - free_bytes)
