"""Processor time of each pass over the bytes of a restore, as a share of reading the files.

    python tools/restore_passes.py

The files are in the system's memory. Figures are minima of 15 rounds in one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from penstock.tiers.record import (
    FileSource,
    HostArray,
    Record,
    Target,
    decode,
    encode,
    header,
    read_from,
)

ARRAYS, HEADS, TOKENS, ROW_BYTES = 16, 4, 256, 256
"""Arrays of a record, and their shape; 8 layers of float32 with heads of 64."""
FILES, ROUNDS = 16, 15
ARRAY_BYTES = HEADS * TOKENS * ROW_BYTES


def main() -> None:
    """Write records, read them in several ways and print the shares."""
    with TemporaryDirectory() as name:
        paths = [Path(name) / str(number) for number in range(FILES)]
        for number, path in enumerate(paths):
            path.write_bytes(encode(_record(number), "fingerprint"))
        place = np.zeros((FILES, ARRAYS, ARRAY_BYTES), np.uint8)
        buffer = bytearray(paths[0].stat().st_size)
        ways: dict[str, Callable[[int, int], object]] = {
            "into one buffer, again and again": lambda file, n: os.preadv(file, [buffer], 0),
            "each to a place of its own": lambda file, n: os.preadv(file, [*place[n]], 0),
            "to its place, as a restore does": lambda file, n: read_from(
                FileSource(file), _targets(place[n])
            ),
        }
        seconds = {
            way: min(_seconds(paths, read) for _ in range(ROUNDS)) for way, read in ways.items()
        }
        assert all(header(path.read_bytes())["depth"] == str(n) for n, path in enumerate(paths))
        assert bytes(place[3, 2]) == bytes(decode(paths[3].read_bytes()).arrays["02"].data)
    least = min(seconds.values())
    for way, taken in seconds.items():
        print(f"{way:34} {taken / least:5.2f}")


def _record(number: int) -> Record:
    random = np.random.default_rng(number)
    shape = (1, HEADS, TOKENS, ROW_BYTES // 4)
    arrays = {
        f"{n:02}": HostArray("float32", shape, random.integers(0, 255, ARRAY_BYTES, np.uint8))
        for n in range(ARRAYS)
    }
    return Record(bytes([number]) * 16, bytes(16), number, arrays)


def _targets(place: np.ndarray) -> dict[str, Target]:
    shape = (1, HEADS, TOKENS, ROW_BYTES // 4)
    return {
        f"{n:02}": Target("float32", shape, list(array.reshape(HEADS, -1)))
        for n, array in enumerate(place)
    }


def _seconds(paths: list[Path], read: Callable[[int, int], object]) -> float:
    files = [os.open(path, os.O_RDONLY) for path in paths]
    began = time.thread_time()
    for number, file in enumerate(files):
        read(file, number)
    taken = time.thread_time() - began
    for file in files:
        os.close(file)
    return taken


if __name__ == "__main__":
    main()
