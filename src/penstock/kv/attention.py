"""Attention over parts that lie where they were written: exact, without joining them first.

The keys and values that a sequence reads lie in parts: segments of the prefix tree, its own run,
its tail. Each part scores the queries by itself, and the partial results are merged by the
running maximum and sum of the softmax (Milakov & Gimelshein 2018, "Online normalizer calculation
for softmax"). The queries of all sequences that read the same part meet its keys in one matrix
product, so that a shared prefix is read once a step (Juravsky et al. 2024, "Hydragen").

All of it is in base 2: scores are scaled by log2(e) as well, and 2^x takes the place of e^x. On
the CPU `mx.exp` takes 8.9 ns an element, `mx.power` 3.1, and the polynomial below 1.6 (1 M
scores, MLX 0.32.4, one core): of a decode step over 8 x 8,192 shared tokens, `mx.exp` alone
would be two thirds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TypeAlias

import mlx.core as mx

from penstock.kv.codecs.coded import Coded
from penstock.kv.lanes import has_lanes, lane

KVData: TypeAlias = "mx.array | Coded"
"""Keys or values of consecutive columns of one sequence: (kv_heads, n, dim), or coded."""
LOG2_E = log2(2.718281828459045)
MASKED = -1e30
"""The score of a column that is not seen; finite, so that no difference of two is NaN."""
SCORES_AT_ONCE = 2**19
"""Scores that a prefill chunk computes at a time; 2 MiB in float32."""
SCORE_BUFFERS = 8
"""Arrays of float32 that are alive together while scores become weights: 7.7 at most, measured."""
HALF_SCORE_BUFFERS = 10
"""The same where keys are of half precision, which is dequantized and narrowed again: 9.5 at
most."""
LANES_FROM = 2**16
"""Scores from which it pays to divide them between two streams."""
CODED_LANES_FROM = 2**12
"""The same where most of what is read is coded: MLX multiplies codes on one core alone."""
CODED_LANES_ROWS = 4
"""Up to so many rows. Of more, codes become floats, and BLAS has both cores for their product."""
POLYNOMIAL_FROM = 2**16
"""Elements from which 14 quick passes beat one slow one."""

# 2^f for f in -0.5..0.5, the minimax polynomial of degree 5 with 2^0 = 1: relative error 1.1e-7.
_EXP2 = (1.0, 0.69314685, 0.240222347, 0.0555088523, 0.00967192603, 0.00132244622)
_ROUND = 1.5 * 2**23  # adding it leaves the nearest integer in the low bits of a float32


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Which columns a query at `position` sees: none behind it, the last `window`, the first
    `keep`.

    `window` counts the query's own column; None sees everything in front.
    """

    window: int | None = None
    keep: int = 0

    def starts_at(self, position: int) -> int:
        """Return the first column that is seen beyond the kept ones."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def sees_all(self, position: int) -> bool:
        """Tell whether a query at `position` sees every column in front of it."""
        return self.starts_at(position) <= self.keep

    def within(self, window: int | None) -> AttentionWindow:
        """Return this sight, narrowed by the window of a mask that the model asked for.

        A narrower window hides the kept tokens, too, as in the rings of `penstock.kv`.
        """
        if window is None or (self.window is not None and self.window <= window):
            return self
        return AttentionWindow(window)

    def mask(self, queries: mx.array, columns: mx.array) -> mx.array:
        """Return what is seen: positions (n,) and columns (m,) give (n, m) booleans."""
        q, c = queries[:, None], columns[None]
        seen = c <= q
        if self.window is not None:
            near = c > q - self.window
            seen = seen & (near | (c < self.keep) if self.keep else near)
        return seen


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over some of the columns, unnormalized, in float32.

    top: (..., 1), the largest score; total: (..., 1), the sum of 2^(score - top);
    mixed: (..., value_dim), the values weighted by the same.
    """

    top: mx.array
    total: mx.array
    mixed: mx.array


def score_bytes(dtype: mx.Dtype) -> int:
    """Return the working memory of one score, in bytes, for keys of this type."""
    return 4 * (SCORE_BUFFERS if dtype == mx.float32 else HALF_SCORE_BUFFERS)


def exp2(x: mx.array) -> mx.array:
    """Return 2^x for x <= 0 as quickly as the back end can; below -126 it is about 0."""
    if x.size < POLYNOMIAL_FROM or x.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return mx.power(2.0, x)
    x = mx.maximum(x, -126.0)
    rounded = x + _ROUND
    f = x - (rounded - _ROUND)
    power = f * _EXP2[5] + _EXP2[4]
    for coefficient in _EXP2[3::-1]:
        power = power * f + coefficient
    exponent = mx.left_shift(rounded.view(mx.int32), mx.array(23, mx.int32))
    return (power.view(mx.int32) + exponent).view(mx.float32)


def in_base_2(queries: mx.array, scale: float) -> mx.array:
    """Scale queries so that `score` makes exponents of 2 of them."""
    return queries * (scale * LOG2_E if queries.dtype == mx.float32 else scale)


def grouped(queries: mx.array, kv_heads: int) -> mx.array:
    """Stack the queries that meet the same key head: (b, heads, n, d) -> (kv_heads, b*r*n, d).

    r = heads / kv_heads: mlx-lm's models let r consecutive heads share one key head.
    """
    b, heads, n, d = queries.shape
    r = heads // kv_heads
    split = queries.reshape(b, kv_heads, r * n, d)
    return split.squeeze(0) if b == 1 else split.swapaxes(0, 1).reshape(kv_heads, b * r * n, d)


def ungrouped(stacked: mx.array, b: int, heads: int) -> mx.array:
    """Undo `grouped`: (kv_heads, b*r*n, d) -> (b, heads, n, d)."""
    kv_heads, rows, d = stacked.shape
    n = rows * kv_heads // (b * heads)
    split = stacked.reshape(kv_heads, b, rows // b, d).swapaxes(0, 1)
    return split.reshape(b, heads, n, d)


def weigh(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Turn scores (..., n) into their maximum, weights 2^(score - maximum), and the sum of those.

    The sum is a matrix product with ones: four times as fast as a reduction on the CPU.
    """
    top = _largest(scores)
    weights = exp2(scores - top)
    return top, weights, weights @ mx.ones((scores.shape[-1], 1), weights.dtype)


def _largest(scores: mx.array) -> mx.array:
    """Return the maximum over the last axis, (..., 1); down columns it is twice as fast."""
    *rows, n = scores.shape
    if n >= 1024 and n % 64 == 0:
        scores = mx.max(scores.reshape(*rows, n // 64, 64), axis=-2)
    return mx.max(scores, axis=-1, keepdims=True)


def score(stacked: mx.array, parts: Sequence[KVData], after: mx.array | None = None) -> mx.array:
    """Score queries (..., m, d) against keys (..., n_i, d): (..., m, sum n_i), float32, base 2.

    In half precision the matrix product is the last that is rounded; the softmax is not. Codes
    are read one part after the other, and after `after`.
    """
    products: list[mx.array] = []
    codec, transform_query = None, stacked
    for keys in parts:
        if not isinstance(keys, Coded):
            products.append(stacked @ keys.swapaxes(-1, -2))
            continue
        if keys.codec != codec:
            codec, transform_query = keys.codec, keys.codec.transform_query(stacked)
        after = keys.codec.score(transform_query, keys if after is None else keys.after(after))
        products.append(after)
    if len({product.dtype for product in products}) > 1:
        products = [product.astype(mx.float32) for product in products]
    scores = products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)
    if scores.dtype != mx.float32:
        scores = scores.astype(mx.float32)
    return scores if stacked.dtype == mx.float32 else scores * LOG2_E


def mix(weights: mx.array, total: mx.array, parts: Sequence[KVData]) -> mx.array:
    """Mix values (..., n_i, d) by float32 weights (..., m, sum n_i): (..., m, d), float32.

    total: the weights' sums. Weights of float16 values are divided by them for the product,
    which would overflow otherwise.
    """
    sums: list[mx.array] = []
    codec, transform_query, dim = None, None, 0
    start = 0
    for values in parts:
        stop = start + _columns(values)
        some = weights if len(parts) == 1 else weights[..., start:stop]
        start = stop
        if not isinstance(values, Coded):
            sums.append(_mix(some, total, values))
            continue
        found = values.codec.mix(
            some, values.after(total if transform_query is None else transform_query)
        )
        found = found.astype(mx.float32)
        if codec is not None and transform_query is not None and values.codec != codec:
            sums.append(codec.inverse_transform(transform_query, dim))
            transform_query = None
        codec, dim = values.codec, values.dim
        transform_query = found if transform_query is None else transform_query + found
    if codec is not None and transform_query is not None:
        sums.append(codec.inverse_transform(transform_query, dim))
    return sum(sums[1:], start=sums[0])


def _columns(side: KVData) -> int:
    return side.tokens if isinstance(side, Coded) else side.shape[-2]


def _mix(weights: mx.array, total: mx.array, values: mx.array) -> mx.array:
    if values.dtype == mx.float32:
        return weights @ values
    if values.dtype == mx.float16:
        return ((weights / total).astype(mx.float16) @ values).astype(mx.float32) * total
    return (weights.astype(values.dtype) @ values).astype(mx.float32)


def mostly_coded(sides: Sequence[KVData]) -> bool:
    """Tell whether more than half of the columns are coded."""
    coded = sum(side.tokens for side in sides if isinstance(side, Coded))
    return coded > 0 and 2 * coded > sum(map(_columns, sides))


def _heads(sides: Sequence[KVData], start: int, stop: int) -> list[KVData]:
    return [
        side.of_heads(start, stop) if isinstance(side, Coded) else side[start:stop]
        for side in sides
    ]


def attend_parts(
    stacked: mx.array,
    keys: Sequence[KVData],
    values: Sequence[KVData],
    seen: mx.array | None = None,
    after: mx.array | None = None,
) -> Partial:
    """Let stacked queries (kv_heads, m, d) read consecutive parts, under one softmax.

    On the CPU much work is divided between two streams, by heads.

    Args:
        keys: (kv_heads, n_i, d) each, or coded.
        values: (kv_heads, n_i, value_dim) each, or coded.
        seen: booleans that broadcast to (kv_heads, m, sum n_i); None sees everything.
        after: what must be computed before codes are read.
    """
    kv_heads, rows, _ = stacked.shape
    count = kv_heads * rows * sum(_columns(side) for side in keys)
    coded = mostly_coded(keys)
    many = count >= (CODED_LANES_FROM if coded else LANES_FROM)
    if kv_heads > 1 and many and not (coded and rows > CODED_LANES_ROWS) and has_lanes():
        half = kv_heads // 2
        first = _attend(stacked[:half], _heads(keys, 0, half), _heads(values, 0, half), seen, after)
        with lane(1):
            others = _heads(keys, half, kv_heads), _heads(values, half, kv_heads)
            rest = _attend(stacked[half:], *others, seen, after)
        return Partial(
            mx.concatenate([first.top, rest.top]),
            mx.concatenate([first.total, rest.total]),
            mx.concatenate([first.mixed, rest.mixed]),
        )
    return _attend(stacked, keys, values, seen, after)


def _attend(
    stacked: mx.array,
    keys: Sequence[KVData],
    values: Sequence[KVData],
    seen: mx.array | None,
    after: mx.array | None,
) -> Partial:
    scores = score(stacked, keys, after)
    if seen is not None:
        scores = mx.where(seen, scores, MASKED)
    top, weights, total = weigh(scores)
    return Partial(top, total, mix(weights, total, values))


def merged(parts: Sequence[Partial], sinks: mx.array | None = None) -> mx.array:
    """Merge partial results over disjoint columns into the attention's result, float32.

    Args:
        sinks: scores in base 2 that take part in the softmax and have no value, of a shape that
            broadcasts to (..., 1); gpt-oss has one a head.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0].mixed / parts[0].total
    top = parts[0].top if sinks is None else mx.maximum(parts[0].top, sinks)
    for part in parts[1:]:
        top = mx.maximum(top, part.top)
    shares = [mx.power(2.0, part.top - top) for part in parts]
    total, mixed = shares[0] * parts[0].total, shares[0] * parts[0].mixed
    for share, part in zip(shares[1:], parts[1:], strict=True):
        total = total + share * part.total
        mixed = mixed + share * part.mixed
    if sinks is not None:
        total = total + mx.power(2.0, sinks - top)
    return mixed / total


def attend_chunk(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    columns: mx.array | None,
    start: int,
    scale: float,
    attention_window: AttentionWindow,
    sinks: mx.array | None = None,
    eager: bool = False,
) -> mx.array:
    """Let a prefill chunk read contiguous keys, its own at the end.

    Args:
        queries: (1, heads, n, d), at the positions start .. start + n - 1.
        keys: (1, kv_heads, m, d); the last n are the chunk's own.
        values: (1, kv_heads, m, value_dim).
        columns: (m,) positions of the keys if they are not 0 .. m - 1.
        scale: what the model multiplies its scores by.
        sight: which columns are seen.
        sinks: (heads,) as the model has them, in base e.
        eager: compute slice by slice now; left to MLX, the scores of many are alive together.

    Returns:
        (1, heads, n, value_dim).
    """
    n, m = queries.shape[2], keys.shape[2]
    if mx.default_device() != mx.cpu:
        mask: mx.array | str = "causal"
        if columns is not None or not attention_window.sees_all(start + n - 1):
            mask = _seen(attention_window, start, n, m, columns)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    heads, kv_heads = queries.shape[1], keys.shape[1]
    queries = in_base_2(queries, scale)
    step = max(1, SCORES_AT_ONCE // (heads * m))
    keys, values = keys.squeeze(0), values.squeeze(0)
    done = []
    for first in range(0, n, step):
        some = min(step, n - first)
        # Columns behind the last query of these are seen by none of them.
        reach = m - n + first + some
        at = None if columns is None else columns[:reach]
        scores = score(grouped(queries[:, :, first : first + some], kv_heads), [keys[:, :reach]])
        scores = scores.reshape(kv_heads, heads // kv_heads, some, reach)
        if at is None and attention_window.sees_all(start + first + some - 1):
            own = mx.where(mx.tri(some, some, 0, mx.bool_), scores[..., reach - some :], MASKED)
            if some < reach:
                scores = mx.concatenate([scores[..., : reach - some], own], axis=-1)
            else:
                scores = own
        else:
            scores = mx.where(
                _seen(attention_window, start + first, some, reach, at), scores, MASKED
            )
        top, weights, total = weigh(scores)
        flat = mix(
            weights.reshape(kv_heads, -1, reach),
            total.reshape(kv_heads, -1, 1),
            [values[:, :reach]],
        )
        part = Partial(top, total, flat.reshape(*top.shape[:-1], values.shape[-1]))
        sunk = None if sinks is None else (sinks * LOG2_E).reshape(kv_heads, -1, 1, 1)
        done.append(merged([part], sunk).reshape(1, heads, some, -1))
        if eager and step < n:
            mx.eval(done[-1])
    result = done[0] if len(done) == 1 else mx.concatenate(done, axis=2)
    return result.astype(queries.dtype)


def _seen(
    attention_window: AttentionWindow, start: int, n: int, m: int, columns: mx.array | None
) -> mx.array:
    """Return (n, m) booleans for queries from `start` on, the last of which owns column m - 1."""
    at = mx.arange(start + n - m, start + n) if columns is None else columns
    return attention_window.mask(mx.arange(start, start + n), at)
