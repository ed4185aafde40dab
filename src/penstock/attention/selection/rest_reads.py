"""Approximate attention to the unselected tokens, from an index with values.

Unselected tokens have small weights, but so many of them that ignoring them costs accuracy. Their
2-bit keys and values give one more term in the softmax of the exact attention: the logarithm of a
weight, and a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, HALF_NOISE
from penstock.attention.selection.key_index import READ_TOKENS
from penstock.attention.selection.selection import FIRST_TOKENS, Scores, Selection
from penstock.attention.span_attention import LOG2_E, MASKED, Partial
from penstock.kv.codecs.coded import Coded
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats


@dataclass(frozen=True, slots=True)
class Sinks:
    """Additional term in the softmax of each query."""

    scores: Floats
    """Logarithms of the weights, (heads, m)."""
    values: Floats | None = None
    """Values with these weights, (heads, m, value_dim); None for zeros."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Approximate attention to the tokens that a row's KV heads did not select."""

    sums: Scores
    """Logarithms of the sums of the weights, (kv_heads, m); -inf if there are no tokens."""
    mean: Scores
    """Means of the values with these weights, (kv_heads, m, value_dim)."""

    def sinks(self, sinks: Scores | None) -> Sinks:
        """Return the rest as a softmax term, merged with the model's attention sinks."""
        if sinks is None:
            return Sinks(self.sums, self.mean)
        both = np.logaddexp(sinks, self.sums)
        return Sinks(both, self.mean * np.exp(self.sums - both)[..., None])

    def partial(self) -> Partial:
        """Return the rest as a partial result in base 2."""
        top = mx.maximum(mx.array(self.sums)[..., None] * LOG2_E, MASKED)
        return Partial(top, mx.ones(top.shape), mx.array(self.mean))


def joined(parts: Sequence[Rest]) -> Rest:
    """Concatenate parts along the KV heads, in order."""
    sums, means = zip(*((part.sums, part.mean) for part in parts), strict=True)
    return Rest(np.concatenate(sums), np.concatenate(means))


def read(
    selection: Selection,
    row: DecodeRow,
    queries: mx.array,
    blocks: mx.array,
    layer: int,
    ops: AttentionOps,
    centers: mx.array | None = None,
) -> Partial:
    """Attend to the unselected tokens with MLX's operations, `READ_TOKENS` at a time; lazy.

    Args:
        selection: selective attention with indexed values.
        row: sequence whose indexed tokens are read.
        queries: (kv_heads, m, dim), scaled for base e.
        blocks: selected blocks of each KV head, which are left out, (kv_heads, n); see
            `block_choice.best_blocks`.
        layer: index of the layer.
        ops: operations of the device.
        centers: scores due to the key centers, by block, (kv_heads, m, blocks); None without
            centers.

    Returns:
        Partial result in base 2, whose leading axes are (kv_heads, m).
    """
    index = selection.index
    dim = _dim(index.value_side(row.parts[0].segment, layer))
    transformed = index.codec.transform_query(queries)
    above = HALF_NOISE * (queries * queries).sum(axis=-1, keepdims=True)
    hidden = _hidden(selection, row, blocks)
    beside = None if centers is None else mx.repeat(centers, BLOCK_TOKENS, axis=-1)
    whole: Partial | None = None
    start = 0
    for coded, first, last in _pieces(selection, row, layer):
        keys, values = index.sides(coded.take(first, last), dim)
        if whole is not None:
            keys = keys.after(whole.mixed)
        sizes = keys.parts[1].astype(mx.float32).swapaxes(0, 1)
        scores = index.codec.score(transformed, keys, ops) - above * (sizes * sizes)
        columns = slice(start, start + last - first)
        if beside is not None:
            scores = scores + beside[..., columns]
        seen = ~hidden[:, None, columns] & mx.isfinite(scores)
        scores = mx.where(seen, scores * LOG2_E, MASKED)
        top, weights, total = span_attention.weigh(scores, ops)
        part = Partial(top, total, index.value_codec.mix(weights, values, ops).astype(mx.float32))
        whole = part if whole is None else span_attention.together(whole, part)
        start += last - first
    assert whole is not None
    mixed = index.value_codec.inverse_transform(whole.mixed, dim)
    return Partial(whole.top, whole.total, mixed)


def _pieces(selection: Selection, row: DecodeRow, layer: int) -> list[tuple[Coded, int, int]]:
    return [
        (coded, start, min(start + READ_TOKENS, stop))
        for coded, first, stop in selection.indexed(row, layer, FIRST_TOKENS)
        for start in range(first, stop, READ_TOKENS)
    ]


def _hidden(selection: Selection, row: DecodeRow, blocks: mx.array) -> mx.array:
    """Return a mask of the indexed tokens that are read exactly, (kv_heads, tokens)."""
    count = (selection.recent_start(row.position) - FIRST_TOKENS) // BLOCK_TOKENS
    hidden = mx.put_along_axis(
        mx.zeros((blocks.shape[0], count), mx.bool_), blocks, mx.array(True), axis=1
    )
    return mx.repeat(hidden, BLOCK_TOKENS, axis=1)


def _dim(side: Side) -> int:
    if isinstance(side, Coded):
        return side.dim
    assert isinstance(side, mx.array)
    return side.shape[-1]


def squares_of(queries: Scores) -> Scores:
    """Return the squared norm of each query, (kv_heads, m)."""
    squares: Scores = np.square(queries).sum(axis=-1)
    return squares
