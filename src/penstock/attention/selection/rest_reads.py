"""Approximate attention to the tokens that were not selected, from an index with values.

They are read in 2 bits per value, the selected blocks exactly. This is better than ignoring them,
because their many small weights add up. The result is an additional term in the softmax of the
exact attention: the logarithm of its weight, and a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention import span_attention
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, HALF_NOISE
from penstock.attention.selection.key_index import READ_TOKENS
from penstock.attention.selection.selection import FIRST_TOKENS, Numbers, Scores, Selection
from penstock.attention.span_attention import LOG2_E, MASKED, Partial
from penstock.kv.codecs.coded import Coded
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats


@dataclass(frozen=True, slots=True)
class Sinks:
    """Additional term in each query's softmax, besides the tokens that are read."""

    scores: Floats
    """Logarithms of the weights, (heads, m)."""
    values: Floats | None = None
    """Values with these weights, (heads, m, value_dim); None for zeros."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Attention to the tokens that some KV heads of a row did not select."""

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
    queries: Scores,
    blocks: Numbers,
    layer: int,
    ops: AttentionOps,
) -> Rest:
    """Attend to the rest with MLX's operations, some thousand tokens at a time.

    Args:
        selection: selective attention with indexed values.
        queries: (kv_heads, m, dim), scaled so that e^score is a weight.
        blocks: indices of the selected blocks, (kv_heads, blocks).
    """
    scaled, index = mx.array(queries), selection.index
    dim = _dim(row.parts[0].segment.layers[layer][1])
    transformed = index.codec.transform_query(scaled)
    above = HALF_NOISE * mx.array(squares_of(queries))[..., None]
    hidden = _hidden(selection, row, blocks)
    centers = selection.center_scores(row, queries, layer)
    beside = None if centers is None else centers.repeat(BLOCK_TOKENS, axis=-1)
    whole: Partial | None = None
    start = 0
    for coded, first, last in _pieces(selection, row, layer):
        keys, values = index.sides(coded.take(first, last), dim)
        sizes = keys.parts[1].astype(mx.float32).swapaxes(0, 1)
        scores = index.codec.score(transformed, keys, ops) - above * (sizes * sizes)
        if beside is not None:
            scores = scores + mx.array(beside[..., start : start + last - first])
        seen = ~mx.array(hidden[:, None, start : start + last - first]) & mx.isfinite(scores)
        scores = mx.where(seen, scores * LOG2_E, MASKED)
        top, weights, total = span_attention.weigh(scores, ops)
        part = Partial(top, total, index.value_codec.mix(weights, values, ops).astype(mx.float32))
        whole = part if whole is None else span_attention.together(whole, part)
        mx.eval(whole.top, whole.total, whole.mixed)
        start += last - first
    assert whole is not None
    mean = index.value_codec.inverse_transform(whole.mixed / whole.total, dim)
    sums = (whole.top + mx.log2(whole.total)) / LOG2_E
    return Rest(np.array(sums.squeeze(-1)), np.array(mean))


def _pieces(selection: Selection, row: DecodeRow, layer: int) -> list[tuple[Coded, int, int]]:
    return [
        (coded, start, min(start + READ_TOKENS, stop))
        for coded, first, stop in selection.indexed(row, layer)
        for start in range(first, stop, READ_TOKENS)
    ]


def _hidden(selection: Selection, row: DecodeRow, blocks: Numbers) -> npt.NDArray[np.bool_]:
    """Return which candidate tokens are read exactly, (kv_heads, tokens) bool."""
    count = (selection.recent_start(row.position) - FIRST_TOKENS) // BLOCK_TOKENS
    hidden = np.zeros((len(blocks), count), np.bool_)
    np.put_along_axis(hidden, blocks - FIRST_TOKENS // BLOCK_TOKENS, True, axis=1)
    return hidden.repeat(BLOCK_TOKENS, axis=1)


def _dim(side: Side) -> int:
    if isinstance(side, Coded):
        return side.dim
    assert isinstance(side, mx.array)
    return side.shape[-1]


def squares_of(queries: Scores) -> Scores:
    """Return the squared norm of each query, (kv_heads, m)."""
    squares: Scores = np.square(queries).sum(axis=-1)
    return squares
