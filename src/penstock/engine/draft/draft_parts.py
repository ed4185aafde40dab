"""Construction of a draft: loads and checks the model, and reserves its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import EngineSettings
from penstock.engine.draft.draft import Draft
from penstock.engine.fixed_memory import measured_estimator
from penstock.engine.foundation import Foundation
from penstock.engine.model.model_probe import probe_bytes, weight_bytes
from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.model.runner import Runner
from penstock.engine.model.runner_figures import figures_of
from penstock.engine.model.wide_steps import reads_several
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.schedule.kv_stores import KVStores
from penstock.errors import SettingError
from penstock.kv.block_spans import span_tokens
from penstock.kv.segment import Segment
from penstock.kv.tails import Tails
from penstock.ledger import Kind, PartLedger
from penstock.models.loading import load_all
from penstock.prefix.prefixes import Prefixes

DRAFT_SETTING = "draft_model (--draft-model)"
REMEMBERED_NODES = 64
"""Number of remembered evictions; few, since misses of the draft's cache are not explained."""


def check_same_vocabulary(draft: Any, tokenizer: Any) -> None:
    """Raise SettingError unless two tokenizers have the same vocabulary with the same IDs."""
    theirs, ours = draft.get_vocab(), tokenizer.get_vocab()
    others = len(theirs.items() ^ ours.items())
    if others:
        raise SettingError(
            f"{DRAFT_SETTING}: its tokenizer differs from the model's in {others:,} entries of "
            f"{len(ours):,}; take a model of the same family"
        )


def open_draft_model(source: Any, tokenizer: Any, base: Foundation, stores: KVStores) -> Draft:
    """Load a draft model within the ledger of the main model.

    `source` is the model's folder, file or name, or a pair of model and tokenizer.

    Raises:
        LedgerFull: its weights and buffers do not fit.
        ModelError: the model cannot be loaded.
        SettingError: its vocabulary differs, or its layers cannot roll back rejected tokens.
    """
    model, draft_tokenizer = _loaded(source, base.ledger.free_bytes)
    ledger, limits = PartLedger(base.ledger, Kind.DRAFT), _plain(base.limits)
    weights = ledger.reserve(Kind.WEIGHTS, weight_bytes(model))
    with ledger.reserve(Kind.BUFFERS, probe_bytes(model)):
        runner = Runner(
            model, base.runner.device, max_kv_size=limits.max_kv_size, keep=limits.keep_tokens
        )
    _check(runner, base.runner, draft_tokenizer, tokenizer)
    slots, columns, spare = base.tails.slots, base.tails.columns, limits.speculative_tokens
    pool = ledger.reserve(Kind.TAILS, slots * (columns + spare) * runner.token_bytes)
    tails = Tails(slots, columns, runner.shapes, spare)
    estimator = measured_estimator(runner, limits, tails, ledger)
    step = ledger.reserve(Kind.BUFFERS, estimator.step_bytes)
    tails.drop()  # allocated again for the first draft
    return Draft(
        runner,
        _stores(runner, tails, ledger, base, stores),
        estimator,
        ledger,
        (weights, pool, step),
        stores.prefixes,
        base.beside,
        chunk_tokens=_chunk_tokens(limits, estimator.prefill_token_seconds),
        vocabulary_size=base.runner.vocabulary_size,
    )


def _loaded(source: Any, free_bytes: int) -> tuple[Any, Any]:
    if isinstance(source, (str, Path)):
        loaded = load_all(source, limit_bytes=free_bytes)
        return loaded.model, loaded.tokenizer
    model, tokenizer = source
    return model, tokenizer


def _chunk_tokens(limits: EngineSettings, token_seconds: float) -> int:
    """Return the number of tokens to prefill between two decode steps, in whole blocks."""
    max_tokens, size = limits.step_tokens, limits.block_size
    if limits.max_stall_ms and token_seconds:
        within = limits.max_stall_ms / 1_000 / token_seconds
        max_tokens = min(max_tokens, int(within))
    return max(size, max_tokens // size * size)


def _plain(limits: EngineSettings) -> EngineSettings:
    """Return the settings of the draft: no quantization, no token selection, no spilling."""
    without = ("kv_cache_quantization", "attend_tokens", "attend_prompt", "active_kv_size")
    return limits.model_copy(update=dict.fromkeys(without))


def _check(runner: Runner, main: Runner, draft_tokenizer: Any, tokenizer: Any) -> None:
    if runner.is_recurrent or not reads_several(runner):
        raise SettingError(
            f"{DRAFT_SETTING}: its layers cannot take back tokens that were rejected, as recurrent "
            f"ones cannot; take a model whose layers all attend through mlx-lm's function"
        )
    if draft_tokenizer is None or tokenizer is None:
        if runner.vocabulary_size != main.vocabulary_size:
            raise SettingError(
                f"{DRAFT_SETTING}: it has {runner.vocabulary_size:,} tokens and the model has "
                f"{main.vocabulary_size:,}; take one with the same tokenizer"
            )
        return
    check_same_vocabulary(draft_tokenizer, tokenizer)


def _stores(
    runner: Runner, tails: Tails, ledger: PartLedger, base: Foundation, main: KVStores
) -> KVStores:
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
        scored=ScoredBlocks(prefixes, 0),
        retentions=(),
        tiers=TierGroup({}, prefixes, base.group.clock),
        tails=tails,
        figures=figures_of(runner),
        shared_tokens=base.limits.max_kv_size // size * size,
        span_tokens=span_tokens,
    )
