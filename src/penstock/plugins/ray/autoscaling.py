"""Target number of replicas, from the number of requests and from KV memory in use."""

# Ray sends these functions to its controller by value, so this file imports nothing of penstock.
from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

CLAIMED = "penstock_claimed"
"""Name of the metric: share of a replica's KV memory that is in use or reserved by requests."""
MOST_CLAIMED = 0.8
"""Claimed share above which requests wait for memory, and little is left for cached prefixes."""


def desired(requests: float, target_requests: float, claimed: Iterable[float]) -> int:
    """Return the number of replicas needed, at least 1.

    Args:
        requests: number of requests, running or queued.
        target_requests: number of requests per replica.
        claimed: share of KV memory that is in use or reserved by requests, for each replica.

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
