"""What the rows of a packed forward pass read, and where their keys and values are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from penstock.attention.chunk_reads import ChunkReads, MixedReads
from penstock.attention.reads import DecodeReads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.numpy_arrays import Integers
from penstock.plugins.cpu.ordered_attention import (
    OrderedReads,
    chunk_plan,
    step_plan,
    tail_addresses,
)
from penstock.plugins.cpu.step_choices import StepChoice


@dataclass(frozen=True, slots=True)
class LayerReads:
    """Reads of a layer for some rows of a forward pass."""

    reads: DecodeReads | ChunkReads
    """Cache of the layer; of any layer in a decode step."""
    layer: int
    plan: OrderedReads
    rows: int
    choice: StepChoice | None = None
    """Selected tokens; None to read all."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Memory to which keys and values of new tokens are written."""

    firsts: Integers
    """Addresses of the first key and value of each sequence's buffers, (layers, sequences, 2)."""
    head_bytes: Integers
    """Bytes between heads, of keys and of values, (layers, 1, 2)."""
    token_bytes: Integers
    columns: Integers
    """Columns of each sequence's first new token, (sequences,)."""


@dataclass(frozen=True, slots=True)
class PartRead:
    """Addresses that some rows of a forward pass read and write."""

    width: int
    """Number of rows per sequence."""
    seen: Mapping[AttentionWindow, Integers]
    """First and end of the visible columns of each row, by window."""
    spans: Integers
    """Spans that are read, (layers, spans, 6); see `AttendTable`."""
    new_places: Integers
    """Places of new keys and values, (layers, rows, 4); see `AppendTable`."""


def kv_dtype(of_layer: LayerReads) -> mx.Dtype:
    """Return the dtype in which a layer's new keys and values are stored."""
    reads = of_layer.reads
    if isinstance(reads, DecodeReads):
        return reads.step.tails.shapes[of_layer.layer].dtype
    return reads.dtype or mx.float32


def is_unread(reads: DecodeReads | ChunkReads) -> bool:
    """Return whether the output of a layer is not read."""
    return isinstance(reads, ChunkReads) and reads.last


def planned(
    reads: DecodeReads | ChunkReads | MixedReads, rows: int, window: AttentionWindow
) -> list[LayerReads]:
    """Return a layer's reads for the rows of a pass; none if ordered attention cannot read it."""
    if isinstance(reads, MixedReads):
        pairs = zip(reads.parts, reads.sizes, strict=True)
        by_part = [planned(part, count * width, window) for part, (count, width) in pairs]
        return [layer for part in by_part for layer in part] if all(by_part) else []
    if isinstance(reads, ChunkReads):
        plan = chunk_plan(reads, rows, window)
        return [] if plan is None else [LayerReads(reads, reads.layer, plan, rows)]
    in_step = step_plan(reads.step, reads.layer, window)
    if in_step is None:
        return []
    return [LayerReads(reads, reads.layer, in_step[0], rows, in_step[1])]


def planned_step(
    reads: DecodeReads, known: Mapping[int, tuple[int, AttentionWindow]], rows: int
) -> list[LayerReads]:
    """Return the reads of all layers of a decode step; none if one is not read in order."""
    layers = []
    for layer, window in known.values():
        in_step = step_plan(reads.step, layer, window)
        if in_step is None:
            return []
        layers.append(LayerReads(reads, layer, in_step[0], rows, in_step[1]))
    return layers


def tail_columns(reads: DecodeReads | ChunkReads) -> Integers:
    """Return the column of each sequence's first new token in a decode step."""
    assert isinstance(reads, DecodeReads)
    return np.array([row.tail for row in reads.step.rows])


def tail_buffers(part: Sequence[LayerReads]) -> NewTokens:
    """Return the addresses of the tails of a decode step."""
    reads = part[0].reads
    assert isinstance(reads, DecodeReads)
    layers = [of_layer.layer for of_layer in part]
    tails = reads.step.tails.derived(tail_addresses)[layers]
    slots: Integers = np.array([row.slot for row in reads.step.rows])
    firsts: Integers = tails[:, None, :, 0] + slots[:, None] * tails[:, None, :, 1]
    return NewTokens(firsts, tails[:, None, :, 2], tails[:, None, :, 3], tail_columns(reads))


def spans_and_places(
    part: Sequence[LayerReads], buffers: NewTokens, width: int
) -> tuple[Integers, Integers]:
    """Return the spans that layers read, and the places to which new tokens are written.

    Shapes are (layers, spans, 6), see `AttendTable`, and (layers, rows, 4), see `AppendTable`.
    """
    plan = part[0].plan
    spans = plan.of_layers([of_layer.layer for of_layer in part])
    lasts = plan.firsts[1:] - 1
    spans[:, lasts, 0:4:2] = buffers.firsts
    spans[:, lasts, 1:4:2] = buffers.head_bytes
    new_columns = (buffers.columns[:, None] + np.arange(width)).ravel()
    places = np.empty((len(spans), len(new_columns), 4), np.int64)
    places[..., 0::2] = np.repeat(buffers.firsts, width, axis=1)
    places[..., 0::2] += new_columns[:, None] * buffers.token_bytes
    places[..., 1::2] = buffers.head_bytes
    return spans, places
