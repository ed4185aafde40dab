"""Construction of the KV stores: the prefix tree, its retentions, and the cold tiers."""

from __future__ import annotations

from penstock.engine.counters import Counters
from penstock.engine.foundation import Foundation
from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.model.runner_figures import figures_of
from penstock.engine.offload.tier_group import TierGroup, open_tiers
from penstock.engine.prefill_rate import PrefillRate
from penstock.engine.retention.spilling import is_spilled
from penstock.engine.retentions import make_retentions
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.settings import identity
from penstock.kv.block_format import BlockFormats
from penstock.kv.block_spans import (
    SPILLED_LONGER,
    SPILLED_MERGE_BYTES,
    SPILLED_MERGE_TOKENS,
    span_tokens,
)
from penstock.kv.quantization import ALL_RAW, QuantizationRule
from penstock.kv.segment import Segment
from penstock.prefix.prefixes import MAX_MERGE_TOKENS, Prefixes, remembered_nodes
from penstock.prefix.tree import LONGER


def open_stores(
    base: Foundation, fingerprint: str, prefill_rate: PrefillRate
) -> tuple[KVStores, TierGroup]:
    """Create the prefix tree, and open the configured cold tiers.

    Args:
        fingerprint: identifies everything besides the tokens that KV depends on; if empty, it is
            computed from the weights when a cold tier needs it.
        prefill_rate: measured prefill speed, to decide whether restoring is faster.

    Raises:
        LedgerFull: the empty index, or the buffers of the tiers, do not fit.
        SettingError: a tier's limit is too small, or its URL is invalid.
    """
    limits, runner = base.limits, base.runner
    rule, fingerprint = identity(
        limits,
        runner,
        base.group,
        fingerprint=fingerprint,
        calibration=base.calibration,
    )
    prefixes = _tree(base, fingerprint)
    size = prefixes.block_size
    tiers = _tiers(base, prefixes, rule, prefill_rate)
    if tiers:
        base.beside.evicting.append(tiers.save)
    scored = ScoredBlocks(prefixes, base.group.least(base.ledger.limit_bytes))
    base.beside.last.append(scored)
    stores = KVStores(
        prefixes=prefixes,
        scored=scored,
        retentions=make_retentions(base, prefixes, rule, tiers),
        tiers=tiers,
        tails=base.tails,
        figures=figures_of(runner),
        counters=Counters(),
        shared_tokens=0 if runner.fitness.whole else limits.max_kv_size // size * size,
        span_tokens=span_tokens,
    )
    return stores, tiers


def _tree(base: Foundation, fingerprint: str) -> Prefixes[Segment]:
    size, limits = base.limits.block_size, base.limits
    coded = limits.kv_cache_quantization is not None
    # Nodes are spilled as a whole, so they are kept short until most of them are spilled.
    spilled = limits.active_kv_size is not None
    merged = SPILLED_MERGE_TOKENS if spilled else MAX_MERGE_TOKENS
    max_merge_bytes = merged * base.runner.held_token_bytes if coded or spilled else 0
    return Prefixes(
        base.ledger,
        block_size=size,
        fingerprint=fingerprint,
        clock=base.group.clock,
        # Ranks with different weights have different limits.
        remembered=remembered_nodes(base.group.least(base.ledger.limit_bytes)),
        # Quantized nodes may be longer: attention time depends on the number of nodes.
        max_merge_tokens=merged,
        longer=SPILLED_LONGER if spilled else LONGER,
        max_merge_bytes=max(max_merge_bytes, SPILLED_MERGE_BYTES) if spilled else max_merge_bytes,
        grows=is_spilled if spilled else None,
        span_tokens=span_tokens(size),
        beside=base.beside,
    )


def _tiers(
    base: Foundation,
    prefixes: Prefixes[Segment],
    rule: QuantizationRule,
    prefill_rate: PrefillRate,
) -> TierGroup:
    runner, spills = base.runner, base.limits.active_kv_size is not None
    forms = BlockFormats(
        runner.shapes,
        prefixes.block_size,
        ALL_RAW if spills else rule,  # running sequences read spilled blocks as they were computed
        runner.device,
        decodes=spills and not rule.is_raw,
    )
    return open_tiers(
        base.limits,
        prefixes,
        forms,
        prefill_rate,
        in_place=not base.runner.device.facts.own_memory,
        state_form=base.runner.state_form,
        group=base.group,
    )
