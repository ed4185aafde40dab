"""Exact attention over non-contiguous parts, without concatenating them.

The KV of a sequence consists of parts: segments of the prefix tree, own spans and the tail. Each
part is scored separately, and the partial results are merged by running maximum and sum of the
softmax (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"). The queries of all
sequences that read the same part are stacked into one matrix product, so a shared prefix is read
once per step (Juravsky et al. 2024, "Hydragen").

Everything is in base 2: scores are scaled by log2(e), and 2^x replaces e^x. Operations that devices
implement differently, such as 2^x, are in `AttentionOps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

ALL_TOKENS = 2**62
"""Number larger than the length of any sequence, for "no limit"."""
LOG2_E = log2(2.718281828459045)
MASKED = -1e30
"""Score of a masked column; finite, so that no difference of two scores is NaN."""


class Arithmetic(Protocol):
    """Operations that devices implement differently; see `AttentionOps`."""

    def exp2(self, x: mx.array) -> mx.array:
        """Return 2^x for x <= 0."""

    def multiply_keys(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Return the products (..., m, n) of queries (..., m, d) with keys (..., n, d)."""


class CodedReader(Protocol):
    """Methods of a codec with which attention reads encoded KV without decoding it."""

    def transform_query(self, queries: mx.array, /) -> mx.array:
        """Transform queries (heads, m, dim) for products with the codes of keys."""

    def inverse_transform(self, mixed: mx.array, dim: int, /) -> mx.array:
        """Transform a result of `mix` back to values (heads, m, dim)."""

    def score(self, queries: mx.array, coded: Any, ops: Any, /) -> mx.array:
        """Multiply transformed queries with keys: (heads, m, tokens)."""

    def mix(self, weights: mx.array, coded: Any, ops: Any, /) -> mx.array:
        """Sum encoded values with weights (heads, m, tokens); see `inverse_transform`."""


class CodedSide(Protocol):
    """Interface of encoded keys or values that attention can read."""

    @property
    def codec(self) -> CodedReader:
        """Codec that scores and mixes this side."""

    @property
    def dim(self) -> int:
        """Head size."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""

    def of_heads(self, start: int, stop: int) -> CodedSide:
        """Return a view of the heads `start..stop - 1`."""

    def after(self, earlier: mx.array) -> CodedSide:
        """Return this side, to be evaluated only after `earlier`."""


KVData: TypeAlias = mx.array | CodedSide
"""Keys or values of consecutive columns of one sequence: (kv_heads, n, dim), or coded."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Columns visible to a query: the last `window` up to its own, and the first `keep`.

    Columns after the query are never visible. If `window` is None, all others are.
    """

    window: int | None = None
    keep: int = 0

    def starts_at(self, position: int) -> int:
        """Return the first column of the window of a query at `position`."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def sees_all(self, position: int) -> bool:
        """Return whether a query at `position` sees every column before it."""
        return self.starts_at(position) <= self.keep

    def within(self, window: int | None) -> AttentionWindow:
        """Return this window, narrowed to the window of a mask that the model requests.

        A narrower window also hides the first `keep` tokens, as mlx-lm's rotating caches do.
        """
        if window is None or (self.window is not None and self.window <= window):
            return self
        return AttentionWindow(window)

    def mask(self, queries: mx.array, columns: mx.array) -> mx.array:
        """Return the mask of query positions (n,) over columns (m,): (n, m), True if visible."""
        q, c = queries[:, None], columns[None]
        seen = c <= q
        if self.window is not None:
            near = c > q - self.window
            seen = seen & (near | (c < self.keep) if self.keep else near)
        return seen


@dataclass(frozen=True, slots=True)
class Partial:
    """Unnormalized attention over a part of the columns, in float32.

    Attributes:
        top: largest score, (..., 1).
        total: sum of the weights 2^(score - top), (..., 1).
        mixed: sum of the values with these weights, (..., value_dim).
    """

    top: mx.array
    total: mx.array
    mixed: mx.array


def in_base_2(queries: mx.array, scale: float) -> mx.array:
    """Scale queries so that `score` returns scores in base 2."""
    return queries * (scale * LOG2_E if queries.dtype == mx.float32 else scale)


def grouped(queries: mx.array, kv_heads: int) -> mx.array:
    """Stack the queries of each KV head: (b, heads, n, d) -> (kv_heads, b*r*n, d).

    r = heads / kv_heads: in mlx-lm's models, r consecutive heads share a KV head.
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


def weigh(scores: mx.array, device: Arithmetic) -> tuple[mx.array, mx.array, mx.array]:
    """Convert scores (..., n) to their maximum, weights 2^(score - maximum), and the weights' sum.

    The sum is a product with a matrix of ones, four times as fast as a reduction on the CPU.
    """
    top = _largest(scores)
    weights = device.exp2(scores - top)
    return top, weights, weights @ mx.ones((scores.shape[-1], 1), weights.dtype)


def _largest(scores: mx.array) -> mx.array:
    """Return the maximum over the last axis, (..., 1), in two reductions, which is faster."""
    *rows, n = scores.shape
    if n >= 1024 and n % 64 == 0:
        scores = mx.max(scores.reshape(*rows, n // 64, 64), axis=-2)
    return mx.max(scores, axis=-1, keepdims=True)


def score(
    stacked: mx.array,
    parts: Sequence[KVData],
    device: Arithmetic,
    after: mx.array | None = None,
) -> mx.array:
    """Score queries (..., m, d) against keys (..., n_i, d): (..., m, sum n_i), float32, base 2.

    In half precision only the matrix product is rounded, not the softmax. Encoded parts are read
    one at a time, the first after `after`.
    """
    products: list[mx.array] = []
    codec, queries = None, stacked
    for keys in parts:
        if isinstance(keys, mx.array):
            products.append(device.multiply_keys(stacked, keys))
            continue
        if keys.codec != codec:
            codec, queries = keys.codec, keys.codec.transform_query(stacked)
        coded = keys if after is None else keys.after(after)
        after = keys.codec.score(queries, coded, device)
        products.append(after)
    if len({product.dtype for product in products}) > 1:
        products = [product.astype(mx.float32) for product in products]
    scores = products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)
    if scores.dtype != mx.float32:
        scores = scores.astype(mx.float32)
    return scores if stacked.dtype == mx.float32 else scores * LOG2_E


def mix(
    weights: mx.array, total: mx.array, parts: Sequence[KVData], device: Arithmetic
) -> mx.array:
    """Sum values (..., n_i, d) with float32 weights (..., m, sum n_i): (..., m, d), float32.

    For float16 values the weights are divided by their sum `total` during the product, which could
    overflow otherwise.
    """
    sums: list[mx.array] = []
    codec, mixed, dim = None, None, 0
    start = 0
    for values in parts:
        stop = start + columns(values)
        part_weights = weights if len(parts) == 1 else weights[..., start:stop]
        start = stop
        if isinstance(values, mx.array):
            sums.append(_mix(part_weights, total, values))
            continue
        coded = values.after(total if mixed is None else mixed)
        part_mix = values.codec.mix(part_weights, coded, device).astype(mx.float32)
        if codec is not None and mixed is not None and values.codec != codec:
            sums.append(codec.inverse_transform(mixed, dim))
            mixed = None
        codec, dim = values.codec, values.dim
        mixed = part_mix if mixed is None else mixed + part_mix
    if codec is not None and mixed is not None:
        sums.append(codec.inverse_transform(mixed, dim))
    return sum(sums[1:], start=sums[0])


def columns(side: KVData) -> int:
    return side.shape[-2] if isinstance(side, mx.array) else side.tokens


def _mix(weights: mx.array, total: mx.array, values: mx.array) -> mx.array:
    if values.dtype == mx.float32:
        return weights @ values
    if values.dtype == mx.float16:
        return ((weights / total).astype(mx.float16) @ values).astype(mx.float32) * total
    return (weights.astype(values.dtype) @ values).astype(mx.float32)


def mostly_coded(sides: Sequence[KVData]) -> bool:
    """Return whether more than half of the columns are coded."""
    coded = sum(side.tokens for side in sides if not isinstance(side, mx.array))
    return coded > 0 and 2 * coded > sum(map(columns, sides))


def of_heads(sides: Sequence[KVData], start: int, stop: int) -> list[KVData]:
    """Return the KV heads `start..stop - 1` of each side."""
    return [
        side[start:stop] if isinstance(side, mx.array) else side.of_heads(start, stop)
        for side in sides
    ]


def attend(
    stacked: mx.array,
    keys: Sequence[KVData],
    values: Sequence[KVData],
    seen: mx.array | None,
    after: mx.array | None,
    device: Arithmetic,
) -> Partial:
    """Attend to consecutive parts under one softmax; see `AttentionOps.attend_decode`."""
    scores = score(stacked, keys, device, after)
    if seen is not None:
        scores = mx.where(seen, scores, MASKED)
    top, weights, total = weigh(scores, device)
    return Partial(top, total, mix(weights, total, values, device))


def merged(parts: Sequence[Partial], sinks: mx.array | None = None) -> mx.array:
    """Merge partial results over disjoint columns into the attention output, float32.

    Args:
        sinks: scores in base 2 that count in the softmax but have no value, broadcastable to
            (..., 1).
    """
    whole = parts[0] if len(parts) == 1 and sinks is None else together(*parts, sinks=sinks)
    return whole.mixed / whole.total


def together(*parts: Partial, sinks: mx.array | None = None) -> Partial:
    """Merge partial results over disjoint columns into one; see `merged` for `sinks`."""
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
    return Partial(top, total, mixed)


def seen_by_chunk(
    attention_window: AttentionWindow, start: int, n: int, m: int, columns: mx.array | None
) -> mx.array:
    """Return the (n, m) mask of n queries from `start` on; `columns` defaults to the last m."""
    if columns is None:
        columns = mx.arange(start + n - m, start + n)
    return attention_window.mask(mx.arange(start, start + n), columns)
