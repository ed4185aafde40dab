"""Boolean attention masks, True where a query may attend to a column."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

Mask = mx.array | Literal["causal"] | None


def causal(
    queries: int,
    past: int,
    window_size: int | None = None,
    left_padding: mx.array | None = None,
) -> mx.array:
    """Return a causal mask, (queries, past + queries), or with left_padding (batch, 1, ...).

    Query i is in column past + i. It sees at most the last `window_size` columns up to its own, and
    none of the first `left_padding[row]`.
    """
    column = mx.arange(past + queries)
    query = mx.arange(past, past + queries)[:, None]
    mask = column <= query
    if window_size is not None:
        mask = mask & (column > query - window_size)
    if left_padding is not None:
        mask = mask & (column >= left_padding[:, None, None, None])
    return mask


def plain(queries: int, past: int, window_size: int | None, as_array: bool) -> Mask:
    """Return the causal mask of one sequence, as None or "causal" if that suffices."""
    if window_size is None and not as_array:
        return None if queries == 1 else "causal"
    if window_size is None and queries == 1:
        return None
    return causal(queries, past, window_size)


def by_position(
    column: mx.array, query: mx.array, keep: int, recent: int, window_size: int | None = None
) -> mx.array:
    """Return the mask of columns in any order, computed from positions, (..., queries, columns).

    A query sees tokens up to its own: the first `keep`, and the last `recent` including itself, and
    with `window_size` only tokens among the last `window_size`.

    Args:
        column: position of the token in each column, negative for none, (..., columns).
        query: position of each query, (..., queries).
    """
    column, query = column[..., None, :], query[..., :, None]
    seen = (column >= 0) & (column <= query) & ((column < keep) | (column > query - recent))
    return seen if window_size is None else seen & (column > query - window_size)
