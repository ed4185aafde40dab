"""Memory of this machine, and the share that penstock uses by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.memory.arithmetic import default_limit_bytes, default_threshold


@dataclass(frozen=True, slots=True)
class MachineMemory:
    total_bytes: int
    available_bytes: int
    recommended_bytes: int
    """Bytes of memory that the device recommends; all memory if it recommends none."""
    default_limit_bytes: int
    default_threshold: float
    """Share of the total memory, in use by all programs, above which cold prefixes are evicted."""


def read_machine_memory(device_info: Mapping[str, str | int]) -> MachineMemory:
    """Read the machine's memory; a container's limit counts as its memory."""
    seen = psutil.virtual_memory()
    total = min(seen.total, _container_limit_bytes() or seen.total)
    recommended = device_info.get("max_recommended_working_set_size")
    recommended = int(recommended or device_info.get("total_memory") or total)
    return MachineMemory(
        total_bytes=total,
        available_bytes=min(seen.available, total),
        recommended_bytes=recommended,
        default_limit_bytes=default_limit_bytes(recommended),
        default_threshold=round(default_threshold(total), 2),
    )


def _container_limit_bytes() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / name
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            return int(text)
    return None
