"""Orthonormal rotation that spreads outliers: random signs, then a Hadamard transform.

Every coordinate of a rotated vector is a signed sum of all coordinates, so its distribution is
approximately normal for any vector. Rotation preserves inner products.
"""

from __future__ import annotations

import math
import random
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

SEED = 0


def rotate(x: mx.array, width: int | None = None, factor: float = 1.0) -> mx.array:
    """Rotate (..., dim), zero-padded to `width`, and multiply by `factor`: (..., width) float32."""
    x = x.astype(mx.float32)
    *rows, dim = x.shape
    if width is not None and width > dim:
        x = mx.concatenate([x, mx.zeros((*rows, width - dim))], axis=-1)
    return _transform(x * _signs(x.shape[-1]), factor)


def rotate_back(x: mx.array, dim: int | None = None) -> mx.array:
    back = _transform(x) * _signs(x.shape[-1])
    return back if dim is None else back[..., :dim]


def _transform(x: mx.array, factor: float = 1.0) -> mx.array:
    """Apply Hadamard transforms of the largest power of two that divides dim; self-inverse.

    MLX's transforms of 12, 20 and 28 times a power of two are not symmetric, so not used.
    """
    *rows, dim = x.shape
    size = dim & -dim
    scale = None if factor == 1.0 else factor / math.sqrt(size)
    if size == dim:
        return mx.hadamard_transform(x, scale)
    return mx.hadamard_transform(x.reshape(*rows, dim // size, size), scale).reshape(*rows, dim)


@cache
def signs_of(dim: int) -> npt.NDArray[np.float32]:
    """Return the signs of a rotation, (dim,)."""
    bits = random.Random(f"penstock {SEED} {dim}").getrandbits(dim)
    return np.array([1.0 if bits >> i & 1 else -1.0 for i in range(dim)], np.float32)


def _signs(dim: int) -> mx.array:
    # Made anew each time: an array belongs to the thread that has made it.
    return mx.array(signs_of(dim))
