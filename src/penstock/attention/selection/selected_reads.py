"""Attention of a row to the blocks that it chose: by NumPy, or by MLX's operations on codes.

A choice waits for the queries anyway. From then on MLX's operations take longer than their work on
a CPU: 1,024 tokens chosen of 8,192 take 0.6 ms in a layer by compiled loops, and 1.3 ms by MLX's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.joined_reads import read_sides
from penstock.attention.ops import AttentionOps
from penstock.attention.selection import rest_reads
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.rest_reads import Rest, Sinks
from penstock.attention.selection.selection import (
    Numbers,
    Scores,
    SelectedKV,
    Selection,
    best_blocks,
    gather,
    pieces,
)
from penstock.attention.selection.spilled_reads import loaded
from penstock.attention.span_attention import LOG2_E
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import Spilled
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Integers
from penstock.kv.segment import KVSpan
from penstock.kv.tails import Tails

Scratch: TypeAlias = dict[int, Scores]
"""Memory for the copies of keys and of values, by side; fresh pages take longer than copying."""
ALONE = 2**17
"""Multiplications of a product that NumPy's BLAS does without threads, which would wait."""


class ChoiceReader:
    """Lets rows choose the blocks that they read, by NumPy and MLX's operations.

    Args:
        selection: how much is read.
        ops: compute it.
    """

    def __init__(self, selection: Selection, ops: AttentionOps) -> None:
        self.selection = selection
        self.ops = ops

    def prepare(self) -> None:
        """Compile the loops that will be used, which would delay a step by seconds."""

    def read(self, asked: Sequence[Asked], memory: StepMemory) -> dict[int, Scores]:
        """Let rows choose and read at once, where that is quicker than one after the other.

        Args:
            asked: rows whose numbers are all float32.
            memory: of the step.

        Returns:
            Attention by the number of the row, (kv_heads, m, value_dim).
        """
        return {}

    def blocks(self, asked: Sequence[Asked], memory: StepMemory) -> list[Numbers]:
        """Choose blocks for rows, (kv_heads, blocks) each."""
        if not asked:
            return []
        rows, queries = [one.row for one in asked], [one.queries for one in asked]
        return best_blocks(self.selection, rows, queries, asked[0].layer, self.ops)

    def rest(self, asked: Asked, blocks: Numbers, memory: StepMemory) -> Rest | None:
        """Read the tokens that a row did not choose, if they are to be read."""
        if not self.selection.index.with_values:
            return None
        row, queries, layer = asked.row, asked.queries, asked.layer
        return rest_reads.read(self.selection, row, queries, blocks, layer, self.ops)


def choose(
    reader: ChoiceReader,
    rows: Sequence[DecodeRow],
    numbers: Sequence[int],
    queries: mx.array,
    layer: int,
    tails: Tails,
    sinks: mx.array | None = None,
    memory: StepMemory | None = None,
) -> dict[int, mx.array | SelectedKV]:
    """Choose the blocks that rows read in a layer, and let them read those where that is quicker.

    Args:
        reader: chooses.
        rows: of the step, one for each new token.
        numbers: those of them that choose.
        queries: of all rows, (b, heads, 1, dim), float32, scaled so that e^score is a weight.
        layer: number of the layer.
        tails: the pool, with the new tokens.
        sinks: see `span_attention.merged`, (heads,).
        memory: of the step.

    Returns:
        By the number of the row, its attention, (1, heads, 1, value_dim), or the KV that it is to
        read.
    """
    heads, kv_heads = queries.shape[1], tails.shapes[layer].kv_heads
    choosing = [rows[number] for number in numbers]
    own = [tails.read_block(layer, row.slot, 1, row.tail + 1) for row in choosing]
    mx.eval(queries, own)
    by_row = np.asarray(queries).reshape(len(rows), kv_heads, heads // kv_heads, -1)
    below: Scores | None = None
    if sinks is not None:
        below = np.array(sinks / LOG2_E).reshape(kv_heads, -1)
    memory = StepMemory() if memory is None else memory
    asked = [
        Asked(row, number, by_row[number], layer, _on_host(tail, reader.ops), below)
        for number, row, tail in zip(numbers, choosing, own, strict=True)
    ]
    chosen: dict[int, mx.array | SelectedKV] = {}
    readable = [one for one in asked if one.is_readable]
    for number, mixed in reader.read(readable, memory).items():
        chosen[number] = mx.array(mixed.reshape(1, heads, 1, -1))
    apart = [one for one in asked if one.number not in chosen]
    blocks = reader.blocks(apart, memory)
    there = loaded(reader.selection, [one.row for one in apart], blocks, layer)
    for one, row, wanted in zip(apart, there, blocks, strict=True):
        rest = reader.rest(one, wanted, memory)
        one = replace(one, row=row)
        if one.is_readable:
            mixed = attend(reader, one, wanted, rest, memory.scratch)
            chosen[one.number] = mx.array(mixed.reshape(1, heads, 1, -1))
        else:
            choice = gather(reader.selection, row, wanted, layer, reader.ops)
            chosen[one.number] = choice if rest is None else replace(choice, rest=rest.partial())
    return chosen


@dataclass(slots=True)
class StepMemory:
    """What the layers of one step hand on to each other."""

    scratch: Scratch = field(default_factory=dict)
    """Memory for the copies of one row and layer after the other."""
    spans: dict[int, tuple[Integers, Integers]] = field(default_factory=dict)
    """Places of each row's spans, for a reader that keeps them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A row that reads its choice in one layer."""

    row: DecodeRow
    number: int
    """Place of the row in the step."""
    queries: Scores
    """(kv_heads, m, dim), scaled so that e^score is a weight."""
    layer: int
    tail: Sequence[Scores]
    """Keys and values of the tail, the new token among them, (kv_heads, tokens, dim) each; none if
    NumPy is not to read them."""
    sinks: Scores | None
    """See `span_attention.merged`, in base e, (kv_heads, m)."""

    @property
    def is_readable(self) -> bool:
        """Whether loops or NumPy are to read it: all of its numbers are float32, as computed."""
        sides = (side for part in self.row.parts for side in part.segment.layers[self.layer])
        return bool(self.tail) and all(map(_is_float32, sides))

    def all_sinks(self, rest: Rest | None, heads: slice = slice(None)) -> Sinks | None:
        """Return the sinks of some key heads: the model's, merged with the rest if it is read."""
        own = None if self.sinks is None else self.sinks[heads]
        if rest is not None:
            return rest.sinks(own)
        return None if own is None else Sinks(own)


def attend_alone(
    reader: ChoiceReader,
    row: DecodeRow,
    queries: mx.array,
    scale: float,
    tail: Sequence[mx.array],
    sinks: mx.array | None = None,
) -> mx.array:
    """Let one row of one layer read its choice, (1, heads, 1, dim) -> (1, heads, 1, value_dim).

    Args:
        reader: chooses.
        row: its parts have that layer alone.
        queries: as the model has them.
        scale: factor of the model's scores.
        tail: keys and values of the tail, (1, kv_heads, tokens, dim) each.
        sinks: as the model has them, (heads,).
    """
    heads, kv_heads = queries.shape[1], tail[0].shape[1]
    asked = span_attention.grouped(queries.astype(mx.float32) * scale, kv_heads)
    mx.eval(asked, *tail)
    below = None if sinks is None else np.array(sinks.astype(mx.float32)).reshape(kv_heads, -1)
    one = Asked(row, 0, np.asarray(asked), 0, _on_host(tail, reader.ops), below)
    if one.is_readable:
        for read in reader.read([one], StepMemory()).values():
            return mx.array(read.reshape(1, heads, 1, -1))
    (blocks,) = reader.blocks([one], StepMemory())
    rest = reader.rest(one, blocks, StepMemory())
    if one.is_readable:
        return mx.array(attend(reader, one, blocks, rest).reshape(1, heads, 1, -1))
    choice = gather(reader.selection, row, blocks, 0, reader.ops)
    first, recent = (read_sides(pieces, 0, reader.ops) for pieces in (choice.first, choice.recent))
    keys, values = (
        [*first[side], chosen, *recent[side], tail[side].squeeze(0)]
        for side, chosen in enumerate((choice.keys, choice.values))
    )
    stacked = span_attention.grouped(span_attention.in_base_2(queries, scale), kv_heads)
    exact = reader.ops.attend_decode(stacked, keys, values)
    parts = [exact] if rest is None else [exact, rest.partial()]
    sunk = None if sinks is None else sinks.astype(mx.float32).reshape(kv_heads, -1, 1) * LOG2_E
    merged = span_attention.ungrouped(span_attention.merged(parts, sunk), 1, heads)
    return merged.astype(queries.dtype)


def _on_host(tail: Sequence[mx.array], ops: AttentionOps) -> list[Scores]:
    """Return a tail's sides as NumPy arrays; empty where NumPy does not read them."""
    by_numpy = ops.uses_numpy and tail[0].dtype == mx.float32
    return [_held(side) for side in tail] if by_numpy else []


def _is_float32(side: Side) -> bool:
    """Tell whether a side's numbers are float32, and there as they were computed."""
    if isinstance(side, Coded):
        return isinstance(side.codec, Spilled) and side.codec.dtype == mx.float32
    return isinstance(side, mx.array) and side.dtype == mx.float32


def attend(
    reader: ChoiceReader,
    asked: Asked,
    blocks: Numbers,
    rest: Rest | None = None,
    scratch: Scratch | None = None,
) -> Scores:
    """Let a row read the first tokens, the blocks chosen, and the recent ones, copied together.

    Args:
        reader: chose.
        asked: the row.
        blocks: numbers of the blocks that each key head reads, (kv_heads, blocks).
        rest: what else takes part, if it does.
        scratch: copies of the row before, which those of this one replace.

    Returns:
        (kv_heads, m, value_dim).
    """
    copies = {} if scratch is None else scratch
    keys, values = (_joined(reader, asked, blocks, side, copies) for side in (0, 1))
    sinks = asked.all_sinks(rest)
    scores = _by_columns(asked.queries, keys)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.scores[..., None])
    weights = np.exp(np.subtract(scores, top, out=scores), out=scores)
    total, mixed = weights.sum(axis=-1, keepdims=True), _mixed(weights, values)
    if sinks is not None:
        sunk = np.exp(sinks.scores[..., None] - top)
        total += sunk
        mixed += 0 if sinks.values is None else sunk * sinks.values
    mixed /= total
    return mixed


def _joined(
    reader: ChoiceReader, asked: Asked, blocks: Numbers, side: int, scratch: Scratch
) -> Scores:
    """Copy all that a row reads of one side together, (kv_heads, tokens, dim)."""
    row, layer, tail = asked.row, asked.layer, asked.tail[side]
    stop = reader.selection.recent_start(row.position)
    chosen = np.concatenate([np.zeros((len(blocks), 1), np.int64), blocks], axis=1)
    count = chosen.shape[1] * BLOCK_TOKENS
    recent = row.position - row.tail - stop
    joined = _empty(scratch, side, (len(blocks), count + recent + tail.shape[1], tail.shape[2]))
    spans = [(span, span.segment.layers[layer][side]) for span in row.parts if span.start < stop]
    _gather(joined[:, :count], spans, chosen)
    start = count
    for segment, first, last in pieces(row.parts, stop, row.position - row.tail):
        end = start + last - first
        joined[:, start:end] = _columns(segment.layers[layer][side], first, last, reader.ops)
        start = end
    joined[:, start:] = tail
    return joined


def _empty(scratch: Scratch, side: int, shape: tuple[int, int, int]) -> Scores:
    """Return an array in the scratch memory of a side, which grows if it must."""
    size = prod(shape)
    if side not in scratch or scratch[side].size < size:
        scratch[side] = np.empty(size, np.float32)
    return scratch[side][:size].reshape(shape)


def _held(side: object) -> Scores:
    held: Scores = np.asarray(side)[0]
    return held


def _columns(side: Side, first: int, last: int, ops: AttentionOps) -> Scores:
    """Return columns first..last-1 of a side, (kv_heads, columns, dim)."""
    if not isinstance(side, Coded):
        return _held(side)[:, first:last]
    span = side.codec.span
    begin = first // span * span
    wide = side.take(begin, -(-last // span) * span).dequantize(ops)
    return _held(wide)[:, first - begin : last - begin]


def _gather(into: Scores, spans: Sequence[tuple[KVSpan, Side]], blocks: Numbers) -> None:
    """Copy each key head's blocks; see `selection.gather`."""
    heads, _, dim = into.shape
    grain = gcd(BLOCK_TOKENS, *(span.start for span, _ in spans))
    per_block = BLOCK_TOKENS // grain
    grains = (blocks[..., None] * per_block + np.arange(per_block)).reshape(heads, -1)
    for span, side in spans:
        if isinstance(side, Coded):
            _gather_loaded(into, span, side, blocks)
            continue
        held, whole = _held(side), span.columns // grain
        for head, numbers in enumerate(grains - span.start // grain):
            rows = held[head, : whole * grain].reshape(whole, grain * dim)
            out = into[head].reshape(-1, grain * dim)
            inside = (numbers >= 0) & (numbers < whole)
            if inside.all():
                rows.take(numbers, axis=0, out=out, mode="clip")
            else:
                out[inside] = rows.take(numbers[inside], axis=0)


def _gather_loaded(into: Scores, span: KVSpan, side: Coded, blocks: Numbers) -> None:
    """Copy each key head's blocks of a side that was loaded."""
    codec, own = side.codec, blocks - span.start // BLOCK_TOKENS
    assert isinstance(codec, Spilled)
    heads, at = np.nonzero((own >= 0) & (own < span.columns // BLOCK_TOKENS))
    of = codec.blocks(side, heads.astype(np.int32), own[heads, at].astype(np.int32))
    (raw,) = codec.reader.fetch([of])
    by_block = into.reshape(len(blocks), -1, BLOCK_TOKENS, into.shape[-1])
    by_block[heads, at] = raw.view(np.float32).reshape(-1, *by_block.shape[2:])


def _by_columns(queries: Scores, keys: Scores) -> Scores:
    """Multiply queries with keys, (kv_heads, m, tokens), in products without threads."""
    heads, m, dim = queries.shape
    tokens, step = keys.shape[1], max(1, ALONE // (m * dim))
    scores = np.empty((heads, m, tokens), np.float32)
    for start in range(0, tokens, step):
        columns = slice(start, start + step)
        np.matmul(queries, keys[:, columns].swapaxes(1, 2), out=scores[..., columns])
    return scores


def _mixed(weights: Scores, values: Scores) -> Scores:
    """Mix values by weights, (kv_heads, m, dim), in products without threads."""
    (_, m, tokens), dim = weights.shape, values.shape[2]
    step = max(1, ALONE // (m * dim))
    mixed = weights[..., :step] @ values[:, :step]
    for start in range(step, tokens, step):
        columns = slice(start, start + step)
        mixed += weights[..., columns] @ values[:, columns]
    return mixed
