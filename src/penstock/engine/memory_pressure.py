"""Memory beside the ledger: of the machine, of a server's process, and freed bytes MLX keeps."""

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
"""Time between two looks at the machine's memory."""

SPARE_BYTES = 120 * 10**6
"""Resident bytes above the memory limit from which a server evicts. With the bytes that arrive
between two looks it stays below 150 MB."""


class MemoryPressure:
    """Evicts cold nodes while the machine, or a server's process, is short of memory.

    The engine's thread.

    Args:
        threshold: share of the machine's memory from which it is short.
        prefixes: of the engine.
        group: of the engine's processes; the one that is shortest counts.
    """

    def __init__(self, threshold: float, prefixes: Prefixes[Segment], group: ProcessGroup) -> None:
        self._threshold = threshold
        self._prefixes = prefixes
        self._group = group
        self._looked_seconds = -PRESSURE_SECONDS
        self._bounds_process = False

    def bound_process(self) -> None:
        """Hold this process to the memory limit and `SPARE_BYTES` from now on.

        Memory of its libraries, and texts that it reads, take room from cold nodes.
        """
        self._bounds_process = True

    def relieve(self, now_seconds: float) -> None:
        """Look at the memory, if the last look was long ago, and evict the excess."""
        if now_seconds - self._looked_seconds < PRESSURE_SECONDS:
            return
        self._looked_seconds = now_seconds
        over = self._group.most(max(bytes_over(self._threshold), self._resident_over()))
        if over > 0 and self._prefixes.shrink(over, "pressure"):
            give_back()

    def _resident_over(self) -> int:
        if not self._bounds_process:
            return 0
        ledger = self._prefixes.ledger
        return resident_over(ledger.limit_bytes, ledger.used_bytes)


def bytes_over(threshold: float) -> int:
    """Return by how many bytes all programs together use more than a share of the memory.

    0 where the machine does not say: the own limit holds without it.
    """
    if threshold >= 1:
        return 0
    memory = _looked_at(psutil.virtual_memory)
    if memory is None:
        return 0
    return int(memory.total - memory.available - threshold * memory.total)


def resident_over(limit_bytes: int, used_bytes: int) -> int:
    """Return by how many bytes this process is larger than its limit and its spare bytes.

    Half of the limit is left to the ledger in any case: libraries that take more than the spare
    bytes by themselves would leave a small limit nothing. 0 or less where it is not too large.
    """
    memory = _looked_at(psutil.Process().memory_info)
    if memory is None:
        return 0
    return min(int(memory.rss) - limit_bytes - SPARE_BYTES, used_bytes - limit_bytes // 2)


def _looked_at(look: Callable[[], Any]) -> Any:
    """Return the result of a look at the memory; None where the machine does not say."""
    try:
        return look()
    # A boundary: the engine's thread looks, and to look may fail for reasons of the machine's own.
    except Exception as error:
        logger.debug("cannot read the machine's memory use", exc_info=error)
        _warn_once(type(error).__name__)
        return None


@cache
def _warn_once(reason: str) -> None:
    logger.warning("cannot read the machine's memory use (%s); only the limit applies", reason)


def give_back() -> None:
    """Give freed memory back to the system, with the reserves of MLX and of the heap."""
    mx.clear_cache()
    give_back_freed_memory()


@dataclass(frozen=True, slots=True)
class MLXShare:
    """Limits that one open engine asks of MLX's allocator, which the process shares."""

    cache_bytes: int
    """Freed bytes that MLX keeps: as many as a step takes."""
    limit_bytes: int
    """Active bytes from which MLX begins nothing more until something has ended.

    It begins a hundred operations ahead of those that run, and takes the memory for all of them.
    """


class MLXLimits:
    """Limits of MLX's allocator: the sum of the shares of all open engines. Thread-safe.

    The limits before the first engine are restored after the last.
    """

    def __init__(self) -> None:
        self._shares: dict[int, MLXShare] = {}
        self._applied: MLXShare | None = None
        self._before: MLXShare | None = None
        self._lock = RLock()
        """Reentrant: wherever garbage is collected, the share of an engine that was not closed may
        end."""

    def share(self, owner: int, share: MLXShare | None) -> None:
        """Set the share of one engine; None ends it."""
        with self._lock:
            if share is None:
                self._shares.pop(owner, None)
            else:
                self._shares[owner] = share
            while (wanted := self._sum()) != self._applied:  # another share may end meanwhile
                self._apply(wanted)

    def _sum(self) -> MLXShare | None:
        shares = list(self._shares.values())
        if not shares:
            return None
        return MLXShare(sum(s.cache_bytes for s in shares), sum(s.limit_bytes for s in shares))

    def _apply(self, wanted: MLXShare | None) -> None:
        before, new = self._applied, wanted or self._before
        assert new is not None
        limit_bytes = mx.set_memory_limit(new.limit_bytes)
        if before is None or before.cache_bytes != new.cache_bytes:
            cache_bytes = mx.set_cache_limit(new.cache_bytes)
            if before is None:
                self._before = MLXShare(cache_bytes, limit_bytes)
        self._applied = wanted


mlx_limits = MLXLimits()
"""MLX's allocator is the process's, and so are its limits."""
