"""Construction of an engine's retentions: the kinds of state that its layers resume from."""

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
"""Part of a choice that the cache of blocks has room for beside the active tokens: what one step
leaves out, the next but one wants again. In a dialogue of 32,000 tokens, with 1,024 read and
active, 31 of a step's 177 pairs of blocks are read from the tier, and 48 without it."""


def make_retentions(
    base: Foundation,
    prefixes: Prefixes[Segment],
    rule: QuantizationRule | None,
    tiers: TierGroup,
) -> tuple[Retention, ...]:
    """Make the retentions that the model and the settings need; a further kind is a line here.

    Args:
        base: model, settings and ledger.
        prefixes: of the engine.
        rule: which tokens are held in which codecs; None for none.
        tiers: take the KV that leaves memory.

    Raises:
        LedgerFull: there is no room for the buffers of one.
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
    """Make the retention of sliding-window layers, if the model has any."""
    runner = base.runner
    windows = windows_of(runner.attention_windows, base.limits.max_kv_size)
    if windows:
        marks = not runner.is_recurrent
        yield Windows(prefixes, windows, runner.shapes, marks_prompts=marks)


def _states(base: Foundation, prefixes: Prefixes[Segment]) -> Iterator[Retention]:
    """Make the retention of recurrent states; those of a prompt are captured where chunks end."""
    if base.runner.is_recurrent:
        size = prefixes.block_size
        chunk = base.limits.step_tokens // size * size
        spacing_tokens = min(span_tokens(size), chunk)
        yield RecurrentStates(prefixes, base.runner.state_bytes, spacing_tokens=spacing_tokens)


def _rows(base: Foundation) -> Iterator[Retention]:
    """Make the retention of rows, if layers compress."""
    if rows := base.runner.layout.rows:
        yield CompressedRows(rows)


def _codecs(
    base: Foundation, prefixes: Prefixes[Segment], rule: QuantizationRule | None
) -> Iterator[Retention]:
    """Make the retention of KV in codecs, if the settings name some."""
    if rule is not None:
        yield Requantizer(rule, prefixes, base.runner.shapes, base.limits, base.runner.device)


def _index(base: Foundation, prefixes: Prefixes[Segment]) -> Iterator[Retention]:
    """Make the retention of the index of keys, if decode steps choose by one."""
    runner = base.runner
    if runner.selection is not None:
        index = runner.selection.index
        yield KeyIndexing(index, prefixes, runner.index_token_bytes, runner.device)


def _spilling(
    base: Foundation,
    prefixes: Prefixes[Segment],
    rule: QuantizationRule | None,
    tiers: TierGroup,
) -> Iterator[Retention]:
    """Make the retention of KV that leaves memory for the tiers, if some of it does."""
    active, selection = base.limits.active_kv_size, base.runner.selection
    if active is None or selection is None or not tiers:
        return
    spans = BlockFormats(base.runner.shapes, prefixes.block_size).spans
    blocks = ColdBlocks(
        tiers,
        base.runner.shapes,
        record_tokens=spans.blocks * prefixes.block_size,
        ledger=base.ledger,
        cached_tokens=active + selection.tokens // SPARE_SHARE,
        layers=selection.index.layers,
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
