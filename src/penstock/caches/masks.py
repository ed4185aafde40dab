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
    """Return (queries, past + queries), or with left_padding (batch, 1, queries, ...).

    Query i is at column past + i and sees the columns up to its own, at most `window_size`
    of them, and none of the first `left_padding[row]`.
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
    """Return the mask of one unpadded sequence in its shortest form."""
    if window_size is None and not as_array:
        return None if queries == 1 else "causal"
    if window_size is None and queries == 1:
        return None
    return causal(queries, past, window_size)


def by_position(
    column: mx.array, query: mx.array, keep: int, recent: int, window_size: int | None = None
) -> mx.array:
    """Return the mask of columns in any order, from the positions of their tokens.

    column: (..., columns) int, the position of each column's token, negative for none. query: (...,
    queries) int. A query sees tokens up to its own: the first `keep`, and the last `recent`
    counting itself; with `window_size`, none further away than that. Returns (..., queries,
    columns).
    """
    column, query = column[..., None, :], query[..., :, None]
    seen = (column >= 0) & (column <= query) & ((column < keep) | (column > query - recent))
    return seen if window_size is None else seen & (column > query - window_size)
