"""The file of a block: what was written comes back to the bit, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prefix.ssd.record import DTYPES, Damaged, HostArray, Record, decode, encode

KEY, PARENT = bytes(range(16)), bytes(range(16, 32))


def host(dtype: str, *shape: int, seed: int = 0) -> HostArray:
    width = 4 if dtype.endswith("32") else 1 if dtype.endswith("8") else 2
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


def test_what_was_written_comes_back() -> None:
    written = record(*DTYPES.values())
    found, fingerprint = decode(encode(written, "a model"))
    assert same(found, written)
    assert fingerprint == "a model"
    assert found.nbytes == written.nbytes > 0


def test_every_byte_counts() -> None:
    """Each byte flipped in turn, in every bit: the record is refused, or the same."""
    written = record("float16")
    raw = encode(written, "m")
    refused = 0
    for at in range(len(raw)):
        for bit in range(8):
            broken = bytearray(raw)
            broken[at] ^= 1 << bit
            try:
                found, fingerprint = decode(bytes(broken))
            except Damaged:
                refused += 1
            else:
                assert same(found, written), f"byte {at}, bit {bit}"
                assert fingerprint == "m"
    assert refused > 0.95 * 8 * len(raw), "hardly anything was seen"


def test_cut_short_at_every_length_or_made_longer_it_is_refused() -> None:
    raw = encode(record("bfloat16"), "m")
    for length in range(len(raw)):
        with pytest.raises(Damaged):
            decode(raw[:length])
    with pytest.raises(Damaged):
        decode(raw + b"\0")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused(raw: bytes) -> None:
    with pytest.raises(Damaged):
        decode(raw)


@pytest.mark.parametrize(
    ("broken", "says"),
    [({"dtype": "float64"}, "float64; a block holds"), ({"shape": (1, 2, 3, 5)}, "cannot be")],
)
def test_what_cannot_be_read_back_is_not_written(broken: dict[str, Any], says: str) -> None:
    arrays = {"0.keys": replace(host("float32", 1, 2, 3, 4), **broken)}
    with pytest.raises(ValueError, match=says):
        encode(Record(KEY, PARENT, 0, arrays), "m")
