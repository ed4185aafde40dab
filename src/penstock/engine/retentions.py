"""Construction of an engine's retentions, one per kind of state that its layers resume from."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.foundation import Foundation
from penstock.engine.offload.cold_blocks import ColdBlocks
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.compressed_rows import CompressedRows
from penstock.engine.retention.key_indexing import KeyIndexing
from penstock.engine.retention.recurrent import RecurrentStates
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.retention import Retention
from penstock.engine.retention.spilling import Spilling
from penstock.engine.retention.windows import Windows, windows_of
from penstock.kv.block_format import BlockFormats
from penstock.kv.block_spans import span_tokens
from penstock.kv.quantization import QuantizationRule
from penstock.kv.segment import Segment
from penstock.prefix.prefixes import Prefixes

SPARE_SHARE = 4
"""The block cache holds 1/4 of a step's selected tokens in addition to the active tokens.
Tokens not selected in one step are often selected again two steps later. In a dialogue of 32,000
tokens, with 1,024 selected and active, a step reads 31 of its 177 pairs of blocks from the tier;
without this extra, 48."""


def make_retentions(
    base: Foundation,
    prefixes: Prefixes[Segment],
    rule: QuantizationRule,
    tiers: TierGroup,
) -> tuple[Retention, ...]:
    """Create the retentions that the model and the settings need; add new kinds here.

    Raises:
        LedgerFull: the buffers of a retention do not fit.
    """
    return (
        *_windows(base, prefixes),
        *_states(base, prefixes),
        *_rows(base),
        *_codecs(base, prefixes, rule),
        *_index(base, prefixes),
        *_spilling(base, prefixes, rule, tiers),
    )


def _windows(base: Foundation, prefixes: Prefixes[Segment]) -> Iterator[Retention]:
    runner = base.runner
    windows = windows_of(runner.attention_windows, base.limits.max_kv_size)
    if windows:
        marks = not runner.is_recurrent
        yield Windows(prefixes, windows, runner.shapes, marks_prompts=marks)


def _states(base: Foundation, prefixes: Prefixes[Segment]) -> Iterator[Retention]:
    if base.runner.is_recurrent:
        size = prefixes.block_size
        chunk = base.limits.step_tokens // size * size
        spacing_tokens = min(span_tokens(size), chunk)
        yield RecurrentStates(prefixes, base.runner.state_bytes, spacing_tokens=spacing_tokens)


def _rows(base: Foundation) -> Iterator[Retention]:
    if rows := base.runner.layout.rows:
        yield CompressedRows(rows)


def _codecs(
    base: Foundation, prefixes: Prefixes[Segment], rule: QuantizationRule
) -> Iterator[Retention]:
    if not rule.is_raw:
        yield Requantizer(rule, prefixes, base.runner.shapes, base.limits, base.runner.device)


def _index(base: Foundation, prefixes: Prefixes[Segment]) -> Iterator[Retention]:
    runner = base.runner
    if runner.selection.layers:
        yield KeyIndexing(runner.selection.index, prefixes, runner.index_token_bytes, runner.device)


def _spilling(
    base: Foundation,
    prefixes: Prefixes[Segment],
    rule: QuantizationRule,
    tiers: TierGroup,
) -> Iterator[Retention]:
    active, selection = base.limits.active_kv_size, base.runner.selection
    if active is None or not selection.layers or not tiers:
        return
    spans = BlockFormats(base.runner.shapes, prefixes.block_size).spans
    blocks = ColdBlocks(
        tiers,
        base.runner.shapes,
        record_tokens=spans.blocks * prefixes.block_size,
        ledger=base.ledger,
        cached_tokens=active + selection.tokens // SPARE_SHARE,
        layers=selection.layers,
        rule=rule,
        ops=base.runner.device,
    )
    yield Spilling(
        blocks,
        prefixes,
        tiers,
        selection=selection,
        spans=spans,
        active_tokens=active,
        clock=base.group.clock,
    )
