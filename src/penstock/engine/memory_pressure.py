"""Memory outside the ledger: of the machine, of the process, and freed memory cached by MLX."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

import mlx.core as mx
import psutil

from penstock.engine.ranks.process_group import ProcessGroup
from penstock.heap import give_back_freed_memory
from penstock.kv.segment import Segment
from penstock.prefix.prefixes import Prefixes

logger = logging.getLogger(__name__)

PRESSURE_SECONDS = 1.0
"""Interval between two checks of the machine's memory."""

SPARE_BYTES = 120 * 10**6
"""Resident bytes above the memory limit at which a server starts to evict. Even with allocations
between two checks, the excess stays below 150 MB."""


class MemoryPressure:
    """Evicts cold nodes while the machine or the process is short of memory. Engine thread only.

    Args:
        threshold: share of the machine's memory in use at which eviction starts.
        group: process group of the ranks; the one with the largest excess decides.
    """

    def __init__(self, threshold: float, prefixes: Prefixes[Segment], group: ProcessGroup) -> None:
        self._threshold = threshold
        self._prefixes = prefixes
        self._group = group
        self._looked_seconds = -PRESSURE_SECONDS
        self._bounds_process = False

    def bound_process(self) -> None:
        """Keep the resident memory of this process within the memory limit plus `SPARE_BYTES`.

        Cold nodes are evicted to make room for libraries and texts.
        """
        self._bounds_process = True

    def relieve(self, now_seconds: float) -> None:
        """Check the memory if `PRESSURE_SECONDS` have passed, and evict the excess."""
        if now_seconds - self._looked_seconds < PRESSURE_SECONDS:
            return
        self._looked_seconds = now_seconds
        over = self._group.maximum(max(bytes_over(self._threshold), self._resident_over()))
        if over > 0 and self._prefixes.shrink(over, "pressure"):
            give_back()

    def _resident_over(self) -> int:
        if not self._bounds_process:
            return 0
        ledger = self._prefixes.ledger.whole
        return resident_over(ledger.limit_bytes, ledger.used_bytes)


def bytes_over(threshold: float) -> int:
    """Return the bytes by which the machine's memory use exceeds a threshold.

    Args:
        threshold: share of the machine's memory; 1 or more means no threshold.

    Returns:
        A negative number if the use is below the threshold; 0 without one, or if the use cannot be
        read.
    """
    if threshold >= 1:
        return 0
    memory = _looked_at(psutil.virtual_memory)
    if memory is None:
        return 0
    return int(memory.total - memory.available - threshold * memory.total)


def resident_over(limit_bytes: int, used_bytes: int) -> int:
    """Return the bytes by which this process exceeds its limit plus `SPARE_BYTES`.

    The ledger always keeps half of the limit: otherwise large libraries would use up a small limit.
    The result is 0 or less if the process does not exceed it.
    """
    memory = _looked_at(psutil.Process().memory_info)
    if memory is None:
        return 0
    return min(int(memory.rss) - limit_bytes - SPARE_BYTES, used_bytes - limit_bytes // 2)


def _looked_at(look: Callable[[], Any]) -> Any:
    """Return the result of `look`, or None if it fails."""
    try:
        return look()
    # Reading the memory use may fail for any reason, which must not stop the engine's thread.
    except Exception as error:
        logger.debug("cannot read the machine's memory use", exc_info=error)
        _warn_once(type(error).__name__)
        return None


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "cannot read the machine's memory use (%s); only --memory-limit is enforced, other "
        "processes' memory is not considered",
        reason,
    )


def give_back() -> None:
    """Return to the system the freed memory that MLX and the heap keep."""
    mx.clear_cache()
    give_back_freed_memory()


@dataclass(frozen=True, slots=True)
class MLXShare:
    """One ledger's share of the limits of MLX's allocator, which is global to the process."""

    cache_bytes: int
    limit_bytes: int
    """Active bytes at which MLX stops scheduling operations until some have finished.

    MLX schedules up to a hundred operations ahead and allocates the memory of all of them.
    """
    ledger: int = 0
    """Id of the engine's ledger; engines with the same id share. 0 means not shared."""


class MLXLimits:
    """Limits of MLX's allocator: the sum of the shares of all ledgers in use. Thread-safe.

    Engines with the same ledger count once. The original limits are restored when the last engine
    closes.
    """

    def __init__(self) -> None:
        self._shares: dict[int, MLXShare] = {}
        self._applied: MLXShare | None = None
        self._before: MLXShare | None = None
        self._lock = RLock()
        """Reentrant, because garbage collection of an unclosed engine may call `share` any time."""

    def share(self, owner: int, share: MLXShare | None) -> None:
        """Set the share of one engine; None removes it."""
        with self._lock:
            if share is None:
                self._shares.pop(owner, None)
            else:
                self._shares[owner] = share
            while (target := self._sum()) != self._applied:  # another share may end meanwhile
                self._apply(target)

    def _sum(self) -> MLXShare | None:
        largest: dict[int, MLXShare] = {}
        for share in list(self._shares.values()):
            ledger = share.ledger or id(share)
            other = largest.get(ledger, share)
            largest[ledger] = MLXShare(
                max(share.cache_bytes, other.cache_bytes), max(share.limit_bytes, other.limit_bytes)
            )
        if not largest:
            return None
        shares = largest.values()
        return MLXShare(sum(s.cache_bytes for s in shares), sum(s.limit_bytes for s in shares))

    def _apply(self, target: MLXShare | None) -> None:
        before, new = self._applied, target or self._before
        assert new is not None
        limit_bytes = mx.set_memory_limit(new.limit_bytes)
        if before is None or before.cache_bytes != new.cache_bytes:
            cache_bytes = mx.set_cache_limit(new.cache_bytes)
            if before is None:
                self._before = MLXShare(cache_bytes, limit_bytes)
        self._applied = target


mlx_limits = MLXLimits()
"""The limits of this process's MLX allocator."""
