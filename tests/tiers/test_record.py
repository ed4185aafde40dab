"""Record files round trip bit by bit, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tiers.record import (
    DTYPES,
    MOST_HEAD_BYTES,
    TOKENS,
    Damaged,
    FileSource,
    HostArray,
    Record,
    Target,
    decode,
    encode,
    read_from,
    read_tokens,
)

KEY, PARENT = bytes(range(16)), bytes(range(16, 32))


def host(dtype: str, *shape: int, seed: int = 0) -> HostArray:
    width = int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * width)
    return HostArray(dtype, shape, np.frombuffer(raw, np.uint8))


def record(*dtypes: str) -> Record:
    arrays = {
        f"{i}.{side}": host(dtype, 1, 2, 3, 4, seed=2 * i + j)
        for i, dtype in enumerate(dtypes)
        for j, side in enumerate(("keys", "values"))
    }
    return Record(KEY, PARENT, 7, arrays)


def same(a: Record, b: Record) -> bool:
    return (a.key, a.parent, a.depth) == (b.key, b.parent, b.depth) and {
        name: (x.dtype, x.shape, x.data.tobytes()) for name, x in a.arrays.items()
    } == {name: (x.dtype, x.shape, x.data.tobytes()) for name, x in b.arrays.items()}


def placed(raw: bytes, *dtypes: str) -> Record:
    """Read a file of such layers to its destination, each array in three pieces."""
    found = {
        name: HostArray(array.dtype, array.shape, np.zeros_like(array.data))
        for name, array in record(*dtypes).arrays.items()
    }
    targets = {
        name: Target(array.dtype, array.shape, np.split(array.data, (5, 11)))
        for name, array in found.items()
    }
    with TemporaryFile() as file:
        file.write(raw)
        file.flush()
        words = read_from(FileSource(file.fileno()), targets)
    assert words["fingerprint"] == "m"
    return Record(
        bytes.fromhex(words["key"]), bytes.fromhex(words["parent"]), int(words["depth"]), found
    )


def whole(raw: bytes, *_: str) -> Record:
    """Read a whole file."""
    return decode(raw)


WAYS = pytest.mark.parametrize("read", [whole, placed])
Read = Callable[..., Record]


@pytest.mark.parametrize(("depth", "blocks", "end"), [(0, 2, 8), (6, 2, 32), (3, 1, 32)])
def test_end_tokens_follow_from_depth_and_blocks(depth: int, blocks: int, end: int) -> None:
    """Eight tokens in this many blocks."""
    arrays = {TOKENS: host("uint32", 8)}
    assert Record(KEY, PARENT, depth, arrays, blocks=blocks).end_tokens == end
    assert Record(KEY, PARENT, depth, record("float32").arrays).end_tokens == 0


def test_record_tokens_are_read_without_other_arrays() -> None:
    """And never more than a megabyte of them, whatever the header says."""
    arrays = {TOKENS: host("uint32", 8), "behind": host("uint8", 64)}
    raw = encode(Record(KEY, PARENT, 0, arrays, blocks=2), "m")
    size = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:size])
    assert fields["behind"]["data_offsets"][0] == arrays[TOKENS].data.nbytes
    fields[TOKENS]["data_offsets"] = [0, 1 << 40]
    lie = json.dumps(fields).encode()
    with TemporaryFile() as file:
        file.write(raw)
        file.flush()
        tokens, blocks = read_tokens(FileSource(file.fileno()))
        assert (tokens.tobytes(), blocks) == (arrays[TOKENS].data.tobytes(), 2)
        file.seek(0)
        file.write(len(lie).to_bytes(8, "little") + lie)
        file.truncate(2 * MOST_HEAD_BYTES)
        assert read_tokens(FileSource(file.fileno()))[0].nbytes == MOST_HEAD_BYTES


@WAYS
def test_record_round_trips(read: Read) -> None:
    written = record(*DTYPES.values())
    found = read(encode(written, "m"), *DTYPES.values())
    assert same(found, written)
    assert found.nbytes == written.nbytes > 0


@WAYS
def test_any_flipped_bit_is_detected(read: Read) -> None:
    """Each bit of each byte: the record is refused, or equal."""
    written = record("float16")
    raw = encode(written, "m")
    refused = 0
    for at in range(len(raw)):
        for bit in range(8):
            broken = bytearray(raw)
            broken[at] ^= 1 << bit
            try:
                found = read(bytes(broken), "float16")
            except Damaged:
                refused += 1
            else:
                assert same(found, written), f"byte {at}, bit {bit}"
    assert refused > 0.95 * 8 * len(raw), "hardly anything was seen"


@WAYS
def test_truncated_or_extended_record_is_refused(read: Read) -> None:
    raw = encode(record("bfloat16"), "m")
    for length in range(len(raw)):
        with pytest.raises(Damaged):
            read(raw[:length], "bfloat16")
    with pytest.raises(Damaged):
        read(raw + b"\0", "bfloat16")


@WAYS
@given(raw=st.binary(max_size=200))
def test_invalid_bytes_are_refused(read: Read, raw: bytes) -> None:
    with pytest.raises(Damaged):
        read(raw, "float16")


@pytest.mark.parametrize("off", [{"more": True}, {"less": True}, {"dtype": "bfloat16"}])
def test_mismatched_arrays_are_refused(off: dict[str, Any], tmp_path: Path) -> None:
    written = record("float16")
    path = tmp_path / "file"
    path.write_bytes(encode(written, "m"))
    targets = {
        name: Target(off.get("dtype", array.dtype), array.shape, [np.zeros_like(array.data)])
        for name, array in written.arrays.items()
    }
    if "more" in off:
        targets["1.keys"] = targets["0.keys"]
    if "less" in off:
        del targets["0.keys"]
    with path.open("rb") as file, pytest.raises(Damaged, match=r"expected|instead"):
        read_from(FileSource(file.fileno()), targets)


@pytest.mark.parametrize(
    ("broken", "says"),
    [({"dtype": "float64"}, "float64; a block holds"), ({"shape": (1, 2, 3, 5)}, "cannot be")],
)
def test_unreadable_arrays_are_not_written(broken: dict[str, Any], says: str) -> None:
    arrays = {"0.keys": replace(host("float32", 1, 2, 3, 4), **broken)}
    with pytest.raises(ValueError, match=says):
        encode(Record(KEY, PARENT, 0, arrays), "m")
