"""The attention formula, one query at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention.span_attention import AttentionWindow

Numbers = npt.NDArray[np.float64]


def numbers(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32), np.float64)


def sees(attention_window: AttentionWindow, query: int, column: int) -> bool:
    """Return whether the query at a position sees a column."""
    if column > query:
        return False
    return (
        attention_window.window is None
        or column > query - attention_window.window
        or column < attention_window.keep
    )


def attention(
    queries: Numbers,
    keys: Numbers,
    values: Numbers,
    *,
    queries_at: Sequence[int],
    columns_at: Sequence[int],
    attention_window: AttentionWindow,
    scale: float,
    sinks: Numbers | None = None,
) -> Numbers:
    """Return (heads, n, value_dim) for queries (heads, n, d) and keys (kv_heads, m, d)."""
    heads, n, _ = queries.shape
    r = heads // keys.shape[0]
    result = np.zeros((heads, n, values.shape[-1]))
    for row, query in enumerate(queries_at):
        seen = [i for i, column in enumerate(columns_at) if sees(attention_window, query, column)]
        for head in range(heads):
            scores: Any = scale * (keys[head // r, seen] @ queries[head, row])
            sink = -np.inf if sinks is None else sinks[head]
            top = max(scores.max(initial=-np.inf), sink)
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            result[head, row] = weights @ values[head // r, seen] / total
    return result
