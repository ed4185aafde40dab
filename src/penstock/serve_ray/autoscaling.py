"""Target number of replicas: by waiting requests, and by the bytes their ledgers promised."""

# Ray sends this file's functions to its controller by value, so it imports nothing of ours.
from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

CLAIMED = "penstock_claimed"
"""Name of the metric: a replica's share of KV memory that requests have claimed."""
MOST_CLAIMED = 0.8
"""Share of a replica's memory for KV beyond which requests wait for bytes, and prefixes have no
room."""


def desired(requests: float, target_requests: float, claimed: Iterable[float]) -> int:
    """Return how many replicas are needed, at least 1.

    Args:
        requests: running or waiting, everywhere.
        target_requests: that one replica should have.
        claimed: of each replica, the share of its memory for KV that cannot be evicted now. Running
            requests read it, or it was promised to them.

    >>> desired(9, 4.0, [0.1, 0.1])  # by the queue
    3
    >>> desired(2, 4.0, [0.9, 0.9])  # two long conversations fill two ledgers
    3
    """
    by_queue = ceil(requests / target_requests)
    by_ledger = ceil(sum(claimed) / MOST_CLAIMED)
    return max(1, by_queue, by_ledger)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Be Ray Serve's autoscaling policy; Ray keeps to the bounds and delays that were set."""
    claimed = (context.aggregated_metrics or {}).get(CLAIMED, {})
    target = context.config.target_ongoing_requests
    return desired(context.total_num_requests, target, claimed.values()), {}
