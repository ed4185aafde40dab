"""Target number of replicas, from queued requests and from claimed KV memory."""

# Ray sends this file's functions to its controller by value, so it imports nothing of ours.
from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

CLAIMED = "penstock_claimed"
"""Name of the metric: a replica's share of KV memory that requests have claimed."""
MOST_CLAIMED = 0.8
"""Claimed share above which requests wait for memory and prefixes have no room."""


def desired(requests: float, target_requests: float, claimed: Iterable[float]) -> int:
    """Return the number of replicas needed, at least 1.

    `claimed` is each replica's share of KV memory that requests read or have reserved.

    >>> desired(9, 4.0, [0.1, 0.1])  # by the queue
    3
    >>> desired(2, 4.0, [0.9, 0.9])  # two long conversations fill two ledgers
    3
    """
    by_queue = ceil(requests / target_requests)
    by_ledger = ceil(sum(claimed) / MOST_CLAIMED)
    return max(1, by_queue, by_ledger)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    claimed = (context.aggregated_metrics or {}).get(CLAIMED, {})
    target = context.config.target_ongoing_requests
    return desired(context.total_num_requests, target, claimed.values()), {}
