"""GELU and softmax attention on a CPU, in place with NumPy, whose loops are vectorized.

In a MiniLM layer over 512 tokens, MLX takes 21 ms for the error function and 5 to 19 ms for
softmax; these take 2 ms and 1 to 3 ms, beside 22 ms of matrix products (one EPYC core, MLX 0.32.4,
NumPy 2.4).
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from penstock.kv.numpy_arrays import Floats

PIECE = 65_536
"""Numbers processed at a time, so that they stay in the processor's cache."""
SLOPE = 0.3275911 * math.sqrt(0.5)
TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Coefficients of Abramowitz and Stegun 7.1.26 in t = 1 / (1 + 0.3275911 x), x >= 0; erf(x) is
accurate to 1.5e-7."""


def gelu(x: mx.array) -> mx.array:
    """Compute x * (1 + erf(x / sqrt(2))) / 2 in place; the array's buffer must not be shared."""
    mx.eval(x)
    flat = np.asarray(x).reshape(-1)  # shares the array's memory
    size = min(PIECE, len(flat))
    t, tail, sums = (np.empty(size, np.float32) for _ in range(3))
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), PIECE):
            piece = flat[start : start + PIECE]
            count = len(piece)
            _gelu_piece(piece, t[:count], tail[:count], sums[:count])
    return x


def _gelu_piece(x: Floats, t: Floats, tail: Floats, sums: Floats) -> None:
    """Compute max(x, 0) - |x| q / 2, where q = 1 - erf(|x| / sqrt(2))."""
    np.abs(x, out=tail)
    np.multiply(tail, np.float32(SLOPE), out=t)
    np.add(t, np.float32(1), out=t)
    np.reciprocal(t, out=t)
    np.multiply(t, np.float32(TERMS[0] / 2), out=sums)
    for term in TERMS[1:]:
        np.add(sums, np.float32(term / 2), out=sums)
        np.multiply(sums, t, out=sums)
    np.multiply(sums, tail, out=sums)
    np.multiply(tail, tail, out=tail)
    np.multiply(tail, np.float32(-0.5), out=tail)
    np.exp(tail, out=tail)
    np.multiply(sums, tail, out=sums)
    np.maximum(x, np.float32(0), out=x)
    np.subtract(x, sums, out=x)


def mix(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None
) -> mx.array:
    """Return softmax(queries @ keys^T + mask) @ values."""
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = scores + mask
    mx.eval(scores)
    weights = np.asarray(scores)  # shares the memory of `scores`, which nothing else uses
    with np.errstate(all="ignore"):
        np.subtract(weights, weights.max(axis=-1, keepdims=True), out=weights)
        np.exp(weights, out=weights)
        total = weights.sum(axis=-1, keepdims=True)
    return (scores @ values) / mx.array(total)
