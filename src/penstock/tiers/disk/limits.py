"""Division of a folder's size limit between index and blocks."""

from __future__ import annotations

from penstock.memory.sizes import format_bytes

INDEX_SHARE = 0.02
"""Share of the limit for the index; 100,000 blocks take 30 MB in it."""
LEAST_INDEX_BYTES = 8_000_000
"""Minimum size of an index with its log, in bytes."""


def payload_bytes(limit_bytes: int) -> int:
    """Return the bytes that a limit leaves for block files; raises ValueError if none."""
    index_bytes = max(LEAST_INDEX_BYTES, int(INDEX_SHARE * limit_bytes))
    if index_bytes >= limit_bytes:
        raise ValueError(
            f"{format_bytes(limit_bytes)} leave no room beside the index, which takes "
            f"{format_bytes(index_bytes)}"
        )
    return limit_bytes - index_bytes
