"""Read blocks of a folder as a request does, and measure its size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from penstock.tiers.disk import Record, SSDStore
from penstock.tiers.record import Target


def keys_of(records: Sequence[Record]) -> list[bytes]:
    return [record.key for record in records]


def read(store: SSDStore, records: Sequence[Record]) -> list[dict[str, bytes]]:
    """Restore blocks as a request does; return the arrays of those that exist."""
    rooms = [
        {name: np.empty(array.data.nbytes, np.uint8) for name, array in record.arrays.items()}
        for record in records
    ]
    targets = [
        {
            name: Target(array.dtype, array.shape, [room[name]])
            for name, array in record.arrays.items()
        }
        for record, room in zip(records, rooms, strict=True)
    ]
    keys = keys_of(records)
    store.prepare(keys)
    count = store.restore(keys, targets)
    store.note_uses()
    return [{name: room.tobytes() for name, room in each.items()} for each in rooms[:count]]


def size_of(folder: Path) -> int:
    """Return the current bytes of all files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it has just been renamed or removed
            total += path.stat().st_size if path.is_file() else 0
    return total
