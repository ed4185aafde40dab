"""Construction of a draft: the model is loaded and tried, and its bytes are reserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import EngineSettings
from penstock.engine.draft.draft import Draft
from penstock.engine.foundation import Foundation
from penstock.engine.model.runner import Runner
from penstock.engine.model.wide_steps import reads_several
from penstock.engine.schedule.budget import weight_bytes
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.stats import Counters
from penstock.errors import SettingError
from penstock.kv.block_spans import span_tokens
from penstock.kv.segment import Segment
from penstock.kv.tails import Tails
from penstock.ledger import Kind, PartLedger
from penstock.models.mlx_lm import load_all
from penstock.models.vocabulary import DRAFT_SETTING, check_same_vocabulary
from penstock.prefix.prefixes import Prefixes

REMEMBERED_NODES = 64
"""Evicted nodes of the draft's tree that are remembered; no reader asks for the reasons."""


def open_draft(given: Any, tokenizer: Any, base: Foundation, stores: KVStores) -> Draft | None:
    """Make a draft of a model, inside the ledger of the main model; None if it is not to be.

    Args:
        given: folder, file or name of the model, or the model and its tokenizer; None for none.
        tokenizer: the main model's, or None.
        base: of the main model.
        stores: the main model's.

    Raises:
        LedgerFull: there is no room for its weights and buffers.
        ModelError: it cannot be loaded.
        SettingError: it has another vocabulary, or layers that cannot go back to a token.
    """
    if given is None:
        return None
    if base.group.size > 1:
        raise SettingError(
            f"{DRAFT_SETTING} does not work with a model on several machines, which would not "
            f"measure the same; leave it out"
        )
    if not base.limits.speculative_tokens:  # the main model reads one token of a row in a step
        return None
    model, own = _loaded(given, base.ledger.free_bytes)
    ledger, limits = PartLedger(base.ledger, Kind.DRAFT), _plain(base.limits)
    weights = ledger.reserve(Kind.WEIGHTS, weight_bytes(model))
    runner = Runner(model, max_kv_size=limits.max_kv_size, keep=limits.keep_tokens)
    _check(runner, base.runner, own, tokenizer)
    slots, columns, spare = base.tails.slots, base.tails.columns, limits.speculative_tokens
    pool = ledger.reserve(Kind.TAILS, slots * (columns + spare) * runner.token_bytes)
    estimator, tails = MemoryEstimator(runner, limits), Tails(slots, columns, runner.shapes, spare)
    step = ledger.reserve(Kind.BUFFERS, estimator.measure_step(tails))
    tails.drop()  # until a sequence is drafted
    return Draft(
        _stores(runner, tails, ledger, base, stores),
        estimator,
        ledger,
        (weights, pool, step),
        stores.prefixes,
        chunk_tokens=_chunk_tokens(limits, estimator),
        vocabulary_size=base.runner.vocabulary_size,
    )


def _loaded(given: Any, free_bytes: int) -> tuple[Any, Any]:
    """Return the draft model and its tokenizer, or None for that."""
    if isinstance(given, (str, Path)):
        loaded = load_all(given, limit_bytes=free_bytes)
        return loaded.model, loaded.tokenizer
    model, tokenizer = given
    return model, tokenizer


def _chunk_tokens(limits: EngineSettings, estimator: MemoryEstimator) -> int:
    """Return the tokens that are read between two decode steps: whole blocks, at least one."""
    most, size = limits.step_tokens, limits.block_size
    if limits.max_stall_ms and estimator.prefill_token_seconds:
        within = limits.max_stall_ms / 1_000 / estimator.prefill_token_seconds
        most = min(most, int(within))
    return max(size, most // size * size)


def _plain(limits: EngineSettings) -> EngineSettings:
    """Return the settings of the draft's own steps: its KV has neither codecs nor tiers."""
    return limits.model_copy(update={"kv_cache_quantization": None})


def _stores(
    runner: Runner, tails: Tails, ledger: PartLedger, base: Foundation, main: KVStores
) -> KVStores:
    """Make the draft's tree; its hashes are those of the main model's."""
    size = main.block_size
    prefixes: Prefixes[Segment] = Prefixes(
        ledger,
        block_size=size,
        fingerprint=main.prefixes.fingerprint,
        clock=base.group.clock,
        remembered=REMEMBERED_NODES,
        span_tokens=span_tokens(size),
    )
    return KVStores(
        prefixes=prefixes,
        limit_bytes=base.ledger.limit_bytes,
        checkpoints=None,
        windows=None,
        requantizer=None,
        tiers=None,
        spilling=None,
        tails=tails,
        runner=runner,
        counters=Counters(),
        shared_tokens=base.limits.max_kv_size // size * size,
    )


def _check(runner: Runner, main: Runner, own: Any, tokenizer: Any) -> None:
    """Raise SettingError if a model cannot draft for another."""
    if runner.is_recurrent or not reads_several(runner):
        raise SettingError(
            f"{DRAFT_SETTING}: its layers cannot take back tokens that were rejected, as recurrent "
            f"ones cannot; take a model whose layers all attend through mlx-lm's function"
        )
    if own is None or tokenizer is None:
        if runner.vocabulary_size != main.vocabulary_size:
            raise SettingError(
                f"{DRAFT_SETTING}: it has {runner.vocabulary_size:,} tokens and the model has "
                f"{main.vocabulary_size:,}; take one with the same tokenizer"
            )
        return
    check_same_vocabulary(own, tokenizer)
