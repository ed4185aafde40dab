"""Construction of the stores of KV: the tree, its retention, and the cold tiers below it."""

from __future__ import annotations

from typing import Any

from penstock.engine.foundation import Foundation
from penstock.engine.offload.cold_blocks import ColdBlocks
from penstock.engine.offload.prefill_rate import PrefillRate
from penstock.engine.offload.tier_group import TierGroup, open_tiers
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.spilling import SPILLED_MERGE_TOKENS, Spilling
from penstock.engine.retention.windows import Windows, windows_of
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.settings import identity
from penstock.engine.stats import Counters
from penstock.kv import backend
from penstock.kv.block_format import BlockFormats
from penstock.kv.block_spans import span_tokens
from penstock.kv.quantization import QuantizationRule
from penstock.kv.segment import Segment
from penstock.prefix.bounded_tree import remembered_nodes
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.prefixes import MAX_MERGE_TOKENS, Prefixes

SPARE_SHARE = 4
"""Part of a choice that the cache of blocks has room for beside the active tokens: what one step
leaves out, the next but one wants again. In a dialogue of 32,000 tokens, with 1,024 read and
active, 31 of a step's 177 pairs of blocks are read from the tier, and 48 without it."""


def open_stores(
    base: Foundation, model: Any, fingerprint: str, prefill_rate: PrefillRate
) -> KVStores:
    """Make the tree, and open the cold tiers that the settings name.

    Args:
        base: ledger, runner and pool.
        model: its weights are read if a cold tier needs its name.
        fingerprint: identity of everything but the tokens; empty to have it found.
        prefill_rate: measures how long a prompt takes.

    Raises:
        LedgerFull: there is no room for the empty index, or for blocks that are being written.
        SettingError: a limit is too small for anything, or a URL names no store.
    """
    limits, runner = base.limits, base.runner
    rule, fingerprint = identity(model, limits, runner, base.group, fingerprint=fingerprint)
    prefixes = _tree(base, fingerprint)
    size = prefixes.block_size
    windows = windows_of(runner.attention_windows, limits.max_kv_size)
    tiers = _tiers(base, prefixes, rule, prefill_rate)
    return KVStores(
        prefixes=prefixes,
        limit_bytes=base.group.least(base.ledger.limit_bytes),
        checkpoints=_checkpoints(base, prefixes) if runner.is_recurrent else None,
        windows=Windows(prefixes, windows, runner.shapes) if windows else None,
        requantizer=None if rule is None else Requantizer(rule, prefixes, runner.shapes, limits),
        tiers=tiers,
        spilling=_spilling(base, prefixes, tiers),
        tails=base.tails,
        runner=runner,
        counters=Counters(),
        shared_tokens=0 if runner.fitness.whole else limits.max_kv_size // size * size,
    )


def _spilling(
    base: Foundation, prefixes: Prefixes[Segment], tiers: TierGroup | None
) -> Spilling | None:
    """Make the retention of KV that leaves memory for the tiers; None if all of it stays."""
    active, selection = base.limits.active_kv_size, base.runner.selection
    if active is None or selection is None or tiers is None:
        return None
    spans = BlockFormats(base.runner.shapes, prefixes.block_size).spans
    blocks = ColdBlocks(
        tiers,
        base.runner.shapes,
        record_tokens=spans.blocks * prefixes.block_size,
        ledger=base.ledger,
        cached_tokens=active + selection.tokens // SPARE_SHARE,
        layers=selection.index.layers,
    )
    return Spilling(
        blocks,
        prefixes,
        tiers,
        selection=selection,
        spans=spans,
        active_tokens=active,
        clock=base.group.clock,
    )


def _tree(base: Foundation, fingerprint: str) -> Prefixes[Segment]:
    """Make the empty tree."""
    size, limits = base.limits.block_size, base.limits
    coded = limits.kv_cache_quantization is not None
    # What leaves memory leaves it by nodes: short ones, until little of them is left.
    spilled = limits.active_kv_size is not None
    merged = SPILLED_MERGE_TOKENS if spilled else MAX_MERGE_TOKENS
    return Prefixes(
        base.ledger,
        block_size=size,
        fingerprint=fingerprint,
        clock=base.group.clock,
        # Ranks whose weights differ have limits that do.
        remembered=remembered_nodes(base.group.least(base.ledger.limit_bytes)),
        # Coded nodes may be longer: time goes by the number of parts that are read.
        max_merge_tokens=merged,
        max_merge_bytes=merged * base.runner.held_token_bytes if coded or spilled else 0,
        span_tokens=span_tokens(size),
    )


def _checkpoints(base: Foundation, prefixes: Prefixes[Segment]) -> Checkpoints:
    """Make the retention of recurrent states; those of a prompt are captured where chunks end."""
    size = prefixes.block_size
    chunk = base.limits.step_tokens // size * size
    spacing_tokens = min(span_tokens(size), chunk)
    return Checkpoints(prefixes, base.runner.state_bytes, spacing_tokens=spacing_tokens)


def _tiers(
    base: Foundation,
    prefixes: Prefixes[Segment],
    rule: QuantizationRule | None,
    prefill_rate: PrefillRate,
) -> TierGroup | None:
    """Open the cold tiers that the settings name; None if they name none."""
    return open_tiers(
        base.limits,
        prefixes,
        BlockFormats(base.runner.shapes, prefixes.block_size, rule),
        prefill_rate,
        in_place=not backend.current().own_memory,
        state_form=base.runner.state_form if base.runner.is_recurrent else None,
        group=base.group,
    )
