"""Cold-tier folders with blocks that need no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blocks_on_disk import read

from penstock.prefix.block_hashes import hash_blocks, root_hash
from penstock.tiers.disk import HostArray, Record, SSDStore
from penstock.tiers.record import FORMAT, encode

A, B = "aaaa" * 8, "bbbb" * 8
BLOCK = 4
ROOM_BYTES = 100_000_000


def numbers(seed: int, count: int = 500) -> HostArray:
    raw = np.random.default_rng(seed).bytes(4 * count)
    return HostArray("float32", (1, 1, count, 1), np.frombuffer(raw, np.uint8))


def chain(blocks: int, seed: int = 0, model: str = A) -> list[Record]:
    """Return the blocks of a prompt with their tokens, as the engine writes them."""
    tokens = np.random.default_rng(seed).integers(0, 1_000, blocks * BLOCK).astype(np.uint32)
    root = root_hash(model)
    keys = hash_blocks(tokens, BLOCK, root)
    return [
        Record(
            key,
            ([root, *keys])[i],
            i,
            {
                "tokens": HostArray(
                    "uint32",
                    (BLOCK,),
                    np.frombuffer(tokens[i * BLOCK : (i + 1) * BLOCK].tobytes(), np.uint8),
                ),
                "0.keys": numbers(1_000 * seed + i),
            },
        )
        for i, key in enumerate(keys)
    ]


FILE_BYTES = len(encode(chain(1)[0], A))


@contextmanager
def opened(
    folder: Path, model: str = A, limit_bytes: int = ROOM_BYTES, **more: Any
) -> Iterator[SSDStore]:
    store = SSDStore(folder, limit_bytes, fingerprint=model, floor_bytes=0, **more)
    try:
        yield store
    finally:
        store.close()


def fill(folder: Path, *chains: list[Record], model: str = A) -> Path:
    with opened(folder, model) as store:
        for records in chains:
            assert [store.write(record) for record in records] == ["claimed"] * len(records)
    return folder


def held(folder: Path, records: list[Record], model: str = A) -> int:
    """Return the number of blocks of a chain that a server can read."""
    with opened(folder, model) as store:
        return len(read(store, records))


def file_of(folder: Path, record: Record) -> Path:
    name = record.key.hex()
    return folder / FORMAT / "blocks" / name[:2] / f"{name}.safetensors"


def files(folder: Path) -> list[Path]:
    return sorted((folder / FORMAT / "blocks").rglob("*.safetensors"))


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
