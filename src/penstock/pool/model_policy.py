"""Eviction policy of a pool: the models and prefixes to evict for another model. Pure.

    value = seconds to load or compute again x 2 ^ -(idle seconds / half life) / bytes

The least valuable is evicted first, but no pinned model and none with open requests. Where that
does not free enough, a model with open requests is drained: it gets no new ones, and is evicted
after its last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.errors import NeverFits
from penstock.memory.sizes import format_bytes

HALF_LIFE_SECONDS = 300.0
LOAD_BYTES_PER_SECOND = 1e9
"""Assumed speed of loading before the first measurement."""


class Standing(Enum):
    """State of a model in a pool."""

    AWAY = "away"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    """Draining: still loaded, takes no new requests, is evicted after its last answer."""


@dataclass(slots=True, kw_only=True)
class Resident:
    """Facts about a model, by which the policy decides whether to evict it."""

    name: str
    pinned: bool = False
    """Whether the model is never evicted once it is loaded."""
    ttl_seconds: float | None = None
    """Idle seconds after which the model is evicted; None for no limit."""
    standing: Standing = Standing.AWAY
    open_requests: int = 0
    used_seconds: float = 0.0
    """Time of the model's last request, on the pool's clock."""
    fixed_bytes: int = 0
    """Bytes that the model takes without requests: estimated until its first load, then counted."""
    load_seconds: float = 0.0
    """Duration of the model's last load; 0 before the first."""
    cold_bytes: int = 0
    """Bytes of the model's cached prefixes that no request reads."""
    cold_seconds: float = 0.0
    """Seconds to compute the prefixes of `cold_bytes` again."""

    @property
    def is_loaded(self) -> bool:
        return self.standing in (Standing.LOADED, Standing.LEAVING)

    @property
    def may_go(self) -> bool:
        return self.is_loaded and not self.pinned and not self.open_requests

    def has_expired(self, now_seconds: float) -> bool:
        idle = now_seconds - self.used_seconds
        return self.may_go and self.ttl_seconds is not None and idle >= self.ttl_seconds


@dataclass(frozen=True, slots=True)
class FreeableBytes:
    """Bytes that can be freed by evicting a model, or only its unread prefixes."""

    resident: Resident
    nbytes: int
    whole: bool
    """Whether the model itself is evicted, not only its prefixes."""
    value: float
    """Seconds per byte to load or compute again, halved per `HALF_LIFE_SECONDS` of idle time."""


def reliefs(residents: Iterable[Resident], now_seconds: float) -> list[FreeableBytes]:
    """List the models and prefixes that can be evicted, least valuable first."""
    freeable = []
    for resident in residents:
        idle = max(0.0, now_seconds - resident.used_seconds)
        fade = 2.0 ** -(idle / HALF_LIFE_SECONDS)
        cold, seconds = resident.cold_bytes, resident.cold_seconds
        if resident.is_loaded and cold:
            freeable.append(FreeableBytes(resident, cold, False, fade * seconds / cold))
        if resident.may_go:
            nbytes = max(1, resident.fixed_bytes + cold)
            seconds += _load_seconds(resident)
            freeable.append(FreeableBytes(resident, nbytes, True, fade * seconds / nbytes))
    return sorted(freeable, key=lambda relief: (relief.value, relief.whole))


def room_plan(
    residents: Iterable[Resident], nbytes: int, now_seconds: float
) -> list[FreeableBytes] | None:
    """Choose what to evict so that `nbytes` become free; None if evicting all is not enough."""
    taken: dict[str, FreeableBytes] = {}
    for relief in reliefs(residents, now_seconds):
        if _sum(taken.values()) >= nbytes:
            break
        before = taken.get(relief.resident.name)
        if before is None or not before.whole:  # evicting a model evicts its prefixes, too
            taken[relief.resident.name] = relief
    if _sum(taken.values()) < nbytes:
        return None
    # Keep the most valuable of them where the rest is enough.
    for relief in sorted(taken.values(), key=lambda relief: -relief.value):
        if _sum(taken.values()) - relief.nbytes >= nbytes:
            del taken[relief.resident.name]
    return list(taken.values())


def to_drain(residents: Iterable[Resident]) -> Resident | None:
    """Choose the model with open requests to drain: the fastest to reload per byte, or None."""
    busy = [r for r in residents if r.standing is Standing.LOADED and not r.pinned]
    return min(
        busy,
        key=lambda resident: _load_seconds(resident) / max(1, resident.fixed_bytes),
        default=None,
    )


def check_fits(
    resident: Resident, others: Iterable[Resident], limit_bytes: int, aside_bytes: int
) -> None:
    """Raise NeverFits if a model does not fit with every other unpinned model evicted."""
    pinned = [
        r for r in others if r is not resident and r.pinned and r.standing is not Standing.AWAY
    ]
    beside = sum(other.fixed_bytes for other in pinned)
    room = limit_bytes - aside_bytes - beside
    if resident.fixed_bytes <= room:
        return
    names = f" beside {format_bytes(beside)} of pinned {_names(pinned)}" if pinned else ""
    raise NeverFits(
        f"{resident.name} needs {format_bytes(resident.fixed_bytes)}; the memory limit of "
        f"{format_bytes(limit_bytes)} leaves {format_bytes(max(0, room))}{names}. Raise "
        f"--memory-limit{', or pin less' if pinned else ''}",
        resident.fixed_bytes,
        max(0, room),
        limit_bytes,
    )


def _names(residents: Sequence[Resident]) -> str:
    return ", ".join(resident.name for resident in residents)


def _load_seconds(resident: Resident) -> float:
    return resident.load_seconds or resident.fixed_bytes / LOAD_BYTES_PER_SECOND


def _sum(taken: Iterable[FreeableBytes]) -> int:
    return sum(relief.nbytes for relief in taken)
