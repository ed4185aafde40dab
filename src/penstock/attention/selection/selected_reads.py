"""Attention of a row to its selected blocks, by NumPy or by MLX's operations on codes.

Selection has to wait for the queries anyway, and small MLX operations have much overhead on a CPU:
selecting 1,024 of 8,192 tokens takes 0.6 ms per layer with compiled loops, and 1.3 ms with MLX.
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
"""Buffers for the copies of keys and values, by side; fresh pages take longer than copying."""
ALONE = 2**17
"""Maximum multiplications of a product that NumPy's BLAS runs without threads."""


class ChoiceReader:
    """Selects the blocks that rows read, by NumPy and MLX's operations."""

    def __init__(self, selection: Selection, ops: AttentionOps) -> None:
        self.selection = selection
        self.ops = ops

    def prepare(self) -> None:
        """Compile the loops in advance, which would otherwise delay a step by seconds."""

    def read(self, asked: Sequence[Asked], memory: StepMemory) -> dict[int, Scores]:
        """Select and read for several rows at once, where that is faster than one after the other.

        Args:
            asked: rows with float32 KV.
            memory: memory shared by the layers of the step.

        Returns:
            Attention output by index of the row, (kv_heads, m, value_dim).
        """
        return {}

    def blocks(self, asked: Sequence[Asked], memory: StepMemory) -> list[Numbers]:
        """Select blocks for rows, (kv_heads, blocks) each."""
        if not asked:
            return []
        rows, queries = [query.row for query in asked], [query.queries for query in asked]
        return best_blocks(self.selection, rows, queries, asked[0].layer, self.ops)

    def rest(self, asked: Asked, blocks: Numbers, memory: StepMemory) -> Rest | None:
        """Read the tokens that a row did not select, if the index has values."""
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
    """Select the blocks that rows read in a layer, and read them at once where that is faster.

    Args:
        rows: rows of the step, one per new token.
        numbers: indices of the rows with selective attention.
        queries: queries of all rows, (b, heads, 1, dim), float32, scaled so that e^score is a
            weight.
        tails: tail pool, with the new tokens.
        sinks: see `span_attention.merged`, (heads,).
        memory: memory shared by the layers of the step.

    Returns:
        By index of the row: its attention output, (1, heads, 1, value_dim), or the KV to read.
    """
    heads, kv_heads = queries.shape[1], tails.shapes[layer].kv_heads
    choosing = [rows[number] for number in numbers]
    row_tails = [tails.read_block(layer, row.slot, 1, row.tail + 1) for row in choosing]
    mx.eval(queries, row_tails)
    by_row = np.asarray(queries).reshape(len(rows), kv_heads, heads // kv_heads, -1)
    below: Scores | None = None
    if sinks is not None:
        below = np.array(sinks / LOG2_E).reshape(kv_heads, -1)
    memory = StepMemory() if memory is None else memory
    selecting = [
        Asked(row, number, by_row[number], layer, _on_host(tail, reader.ops), below)
        for number, row, tail in zip(numbers, choosing, row_tails, strict=True)
    ]
    chosen: dict[int, mx.array | SelectedKV] = {}
    readable = [query for query in selecting if query.is_readable]
    for number, mixed in reader.read(readable, memory).items():
        chosen[number] = mx.array(mixed.reshape(1, heads, 1, -1))
    apart = [query for query in selecting if query.number not in chosen]
    blocks = reader.blocks(apart, memory)
    there = loaded(reader.selection, [query.row for query in apart], blocks, layer)
    for query, row, row_blocks in zip(apart, there, blocks, strict=True):
        rest = reader.rest(query, row_blocks, memory)
        query = replace(query, row=row)
        if query.is_readable:
            mixed = attend(reader, query, row_blocks, rest, memory.scratch)
            chosen[query.number] = mx.array(mixed.reshape(1, heads, 1, -1))
        else:
            choice = gather(reader.selection, row, row_blocks, layer, reader.ops)
            chosen[query.number] = choice if rest is None else replace(choice, rest=rest.partial())
    return chosen


@dataclass(slots=True)
class StepMemory:
    """Memory shared by the layers of one step."""

    scratch: Scratch = field(default_factory=dict)
    """Buffers for copies, reused by each row and layer."""
    spans: dict[int, tuple[Integers, Integers]] = field(default_factory=dict)
    """Locations of each row's spans, cached by compiled loops."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A row with selective attention in one layer."""

    row: DecodeRow
    number: int
    """Index of the row in the step."""
    queries: Scores
    """Array (kv_heads, m, dim), scaled so that e^score is a weight."""
    layer: int
    tail: Sequence[Scores]
    """Keys and values of the tail, including the new token, (kv_heads, tokens, dim) each; empty if
    NumPy cannot read them."""
    sinks: Scores | None
    """See `span_attention.merged`, in base e, (kv_heads, m)."""

    @property
    def is_readable(self) -> bool:
        """Whether compiled loops or NumPy can read it: all of its KV is unquantized float32."""
        sides = (side for part in self.row.parts for side in part.segment.layers[self.layer])
        return bool(self.tail) and all(map(_is_float32, sides))

    def all_sinks(self, rest: Rest | None, heads: slice = slice(None)) -> Sinks | None:
        """Return the attention sinks of some KV heads, merged with `rest` if given."""
        sinks = None if self.sinks is None else self.sinks[heads]
        if rest is not None:
            return rest.sinks(sinks)
        return None if sinks is None else Sinks(sinks)


def attend_alone(
    reader: ChoiceReader,
    row: DecodeRow,
    queries: mx.array,
    scale: float,
    tail: Sequence[mx.array],
    sinks: mx.array | None = None,
) -> mx.array:
    """Select and read for one row and layer, (1, heads, 1, dim) -> (1, heads, 1, value_dim).

    Args:
        row: row whose parts have only this layer.
        scale: scale of the model's scores.
        tail: keys and values of the tail, (1, kv_heads, tokens, dim) each.
        sinks: attention sinks of the model, (heads,).
    """
    heads, kv_heads = queries.shape[1], tail[0].shape[1]
    scaled = span_attention.grouped(queries.astype(mx.float32) * scale, kv_heads)
    mx.eval(scaled, *tail)
    below = None if sinks is None else np.array(sinks.astype(mx.float32)).reshape(kv_heads, -1)
    query = Asked(row, 0, np.asarray(scaled), 0, _on_host(tail, reader.ops), below)
    if query.is_readable:
        for read in reader.read([query], StepMemory()).values():
            return mx.array(read.reshape(1, heads, 1, -1))
    (blocks,) = reader.blocks([query], StepMemory())
    rest = reader.rest(query, blocks, StepMemory())
    if query.is_readable:
        return mx.array(attend(reader, query, blocks, rest).reshape(1, heads, 1, -1))
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
    """Return a tail's sides as NumPy arrays; empty if NumPy cannot read them."""
    by_numpy = ops.uses_numpy and tail[0].dtype == mx.float32
    return [_held(side) for side in tail] if by_numpy else []


def _is_float32(side: Side) -> bool:
    """Return whether a side is unquantized float32."""
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
    """Attend to the first, the selected and the recent tokens of a row, gathered.

    Args:
        asked: row and its queries.
        blocks: indices of the blocks that each KV head reads, (kv_heads, blocks).
        rest: additional attention to the other tokens; None to ignore them.
        scratch: buffers to reuse; overwritten.

    Returns:
        Array (kv_heads, m, value_dim).
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
    """Gather all tokens that a row reads of one side, (kv_heads, tokens, dim)."""
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
    """Return an array in the reusable buffer of a side, which grows as needed."""
    size = prod(shape)
    if side not in scratch or scratch[side].size < size:
        scratch[side] = np.empty(size, np.float32)
    return scratch[side][:size].reshape(shape)


def _held(side: object) -> Scores:
    array: Scores = np.asarray(side)[0]
    return array


def _columns(side: Side, first: int, last: int, ops: AttentionOps) -> Scores:
    """Return columns `first..last - 1` of a side, (kv_heads, columns, dim)."""
    if not isinstance(side, Coded):
        return _held(side)[:, first:last]
    span = side.codec.span
    begin = first // span * span
    numbers = side.take(begin, -(-last // span) * span).dequantize(ops)
    return _held(numbers)[:, first - begin : last - begin]


def _gather(into: Scores, spans: Sequence[tuple[KVSpan, Side]], blocks: Numbers) -> None:
    """Copy each KV head's blocks; see `selection.gather`."""
    heads, _, dim = into.shape
    grain = gcd(BLOCK_TOKENS, *(span.start for span, _ in spans))
    per_block = BLOCK_TOKENS // grain
    grains = (blocks[..., None] * per_block + np.arange(per_block)).reshape(heads, -1)
    for span, side in spans:
        if isinstance(side, Coded):
            _gather_loaded(into, span, side, blocks)
            continue
        stored, whole = _held(side), span.columns // grain
        for head, numbers in enumerate(grains - span.start // grain):
            rows = stored[head, : whole * grain].reshape(whole, grain * dim)
            out = into[head].reshape(-1, grain * dim)
            inside = (numbers >= 0) & (numbers < whole)
            if inside.all():
                rows.take(numbers, axis=0, out=out, mode="clip")
            else:
                out[inside] = rows.take(numbers[inside], axis=0)


def _gather_loaded(into: Scores, span: KVSpan, side: Coded, blocks: Numbers) -> None:
    """Copy each KV head's blocks of a loaded side."""
    codec, relative = side.codec, blocks - span.start // BLOCK_TOKENS
    assert isinstance(codec, Spilled)
    heads, positions = np.nonzero((relative >= 0) & (relative < span.columns // BLOCK_TOKENS))
    of = codec.blocks(side, heads.astype(np.int32), relative[heads, positions].astype(np.int32))
    (raw,) = codec.reader.fetch([of])
    by_block = into.reshape(len(blocks), -1, BLOCK_TOKENS, into.shape[-1])
    by_block[heads, positions] = raw.view(np.float32).reshape(-1, *by_block.shape[2:])


def _by_columns(queries: Scores, keys: Scores) -> Scores:
    """Multiply queries with keys, (kv_heads, m, tokens), without starting threads."""
    heads, m, dim = queries.shape
    tokens, step = keys.shape[1], max(1, ALONE // (m * dim))
    scores = np.empty((heads, m, tokens), np.float32)
    for start in range(0, tokens, step):
        columns = slice(start, start + step)
        np.matmul(queries, keys[:, columns].swapaxes(1, 2), out=scores[..., columns])
    return scores


def _mixed(weights: Scores, values: Scores) -> Scores:
    """Sum values with weights, (kv_heads, m, dim), without starting threads."""
    (_, m, tokens), dim = weights.shape, values.shape[2]
    step = max(1, ALONE // (m * dim))
    mixed = weights[..., :step] @ values[:, :step]
    for start in range(step, tokens, step):
        columns = slice(start, start + step)
        mixed += weights[..., columns] @ values[:, columns]
    return mixed
