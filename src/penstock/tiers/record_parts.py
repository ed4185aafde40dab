"""Parts of a record's arrays, read without the rest. Unchecked: a checksum covers whole records.

The caller knows the bytes that it wrote, by checksums of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.tiers.record import Damaged, Source, array_offsets


@dataclass(frozen=True, slots=True, order=True)
class ArrayPart:
    """Consecutive bytes of one array of a record."""

    name: str
    """Name of the array, as `3.keys`."""
    start: int
    """First byte of the part in the array."""
    nbytes: int


def read_parts(source: Source, parts: Sequence[ArrayPart]) -> list[NDArray[np.uint8]]:
    """Read parts of a record's arrays, in the order of their bytes in the file, neighbors together.

    Raises:
        Damaged: the record has no such array, or ends before the part does.
        OSError: the source fails.
    """
    offsets = array_offsets(source)
    buffers = [np.empty(part.nbytes, np.uint8) for part in parts]
    placed = sorted((_place(offsets, part), number) for number, part in enumerate(parts))
    together: list[NDArray[np.uint8]] = []
    start, end, nbytes = 0, 0, source.nbytes
    for at, number in placed:
        if at != end:
            source.fill(together, start)
            start, end, together = at, at, []
        end += parts[number].nbytes
        if end > nbytes:
            raise Damaged("it ends before its arrays do")
        together.append(buffers[number])
    source.fill(together, start)
    return buffers


def _place(offsets: Mapping[str, int], part: ArrayPart) -> int:
    """Return the first byte of a part in the file."""
    if part.name not in offsets:
        raise Damaged(f"it does not hold {part.name}")
    return offsets[part.name] + part.start
