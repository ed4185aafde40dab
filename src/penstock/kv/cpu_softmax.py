"""Weights of a softmax on the CPU, made of scores in place, with NumPy.

NumPy's 2^x takes 0.2 ns a number where AVX-512 is, and no memory; MLX's exponential takes 12, and
its arithmetic on a polynomial 2.4 to 15, for each of its passes makes an array (one core,
MLX 0.32.4, NumPy 2.4).
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.kv.attention import MASKED


def weigh_in_place(scores: mx.array, *, causal: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Turn scores (..., n, m) into weights, as `attention.weigh` does; they are evaluated.

    The weights take the place of the scores in their buffer, so no other array may share it.

    Args:
        scores: float32, in base 2.
        causal: the last n columns are those of the n queries, and none sees what is after it.

    Returns:
        Maximum (..., n, 1), weights 2^(score - maximum), and their sum (..., n, 1).
    """
    mx.eval(scores)
    view = np.asarray(scores)  # of the same memory
    n = view.shape[-2]
    if causal:
        np.copyto(view[..., -n:], MASKED, where=_later(n))
    top = view.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        np.subtract(view, top, out=view)
        np.exp2(view, out=view)
    return mx.array(top), scores, scores @ mx.ones((scores.shape[-1], 1), scores.dtype)


@lru_cache(maxsize=16)
def _later(n: int) -> npt.NDArray[np.bool_]:
    return np.triu(np.ones((n, n), np.bool_), 1)
