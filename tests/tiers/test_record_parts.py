"""Reading parts of a record's arrays."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from objects_in_memory import InMemory
from patience import SOON
from test_disk_store import chain
from test_remote_store import opened

from penstock.tiers.disk import SSDStore
from penstock.tiers.disk.block_files import opened as opened_file
from penstock.tiers.record import ArrayPart, Damaged, FileSource, Record, array_offsets, encode
from penstock.tiers.store import Store
from penstock.tiers.worker import ColdTier


@pytest.fixture(params=["disk", "remote"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ColdTier]:
    def make() -> Store:
        if request.param == "disk":
            return SSDStore(tmp_path, 10**9, fingerprint="a model", floor_bytes=0)
        return opened(InMemory())

    opened_tier = ColdTier(make)
    yield opened_tier
    opened_tier.close()


def write(tier: ColdTier, *records: Record) -> None:
    for record in records:
        tier.call(lambda store, record=record: store.write(record), None).result(SOON)


def read(tier: ColdTier, wanted: dict[bytes, list[ArrayPart]]) -> dict[bytes, list[Any]]:
    """Return the parts of records, once incomplete records are reported."""
    parts = tier.read_parts(wanted).result(SOON)
    assert tier.flush(SOON)
    return parts


def holds(tier: ColdTier, key: bytes) -> bool:
    return tier.call(lambda store: store.holds(key), False).result(SOON)


def test_read_parts_match_written_bytes(tier: ColdTier) -> None:
    records = chain(3)
    write(tier, *records)
    wanted = {
        record.key: [
            ArrayPart(name, start, nbytes)
            for name, array in record.arrays.items()
            for start, nbytes in ((array.data.nbytes // 2, 8), (0, 4))
        ]
        for record in records
    }
    parts = read(tier, {**wanted, b"unknown".ljust(32): [ArrayPart("0.keys", 0, 4)]})
    assert set(parts) == set(wanted), "a record that is not there is a miss"
    assert tier.stats().counts.missing_blocks == 1
    for record in records:
        for part, data in zip(wanted[record.key], parts[record.key], strict=True):
            held = record.arrays[part.name].data[part.start : part.start + part.nbytes]
            assert np.array_equal(data, held)


def test_missing_part_counts_as_damage(tier: ColdTier) -> None:
    (record,) = chain(1)
    write(tier, record)
    assert holds(tier, record.key)
    assert read(tier, {record.key: [ArrayPart("99.keys", 0, 4)]}) == {}
    assert tier.stats().counts.damaged_blocks == 1
    assert not holds(tier, record.key), "it is removed, to be written anew"


@pytest.mark.parametrize("tier", ["disk"], indirect=True)
def test_truncated_file_counts_as_damage(tier: ColdTier, tmp_path: Path) -> None:
    (record,) = chain(1)
    write(tier, record)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    name = max(record.arrays)
    nbytes = record.arrays[name].data.nbytes
    parts = [ArrayPart(one, 0, record.arrays[one].data.nbytes) for one in record.arrays]
    assert nbytes and read(tier, {record.key: parts}) == {}
    assert tier.stats().counts.damaged_blocks == 1


def test_record_with_wrong_part_can_be_dropped(tier: ColdTier) -> None:
    (record,) = chain(1)
    write(tier, record)
    tier.call(lambda store: store.drop_damaged(record.key), None).result(SOON)
    assert not holds(tier, record.key)
    assert tier.stats().counts.damaged_blocks == 1


@pytest.mark.parametrize("tier", ["disk"], indirect=True)
def test_parts_are_read_during_write(tier: ColdTier) -> None:
    """A write waits for the disk; a decode step must not wait for the write."""
    (record,) = chain(1)
    write(tier, record)
    written = threading.Event()
    tier.call(lambda store: written.wait(SOON), None)
    part = ArrayPart("0.keys", 0, 4)
    assert set(tier.read_parts({record.key: [part]}).result(SOON)) == {record.key}
    assert not written.is_set()
    written.set()
    tier.close()
    assert tier.read_parts({record.key: [part]}).result(SOON) == {}, "it has ended"


def test_read_error_switches_tier_off(tmp_path: Path) -> None:
    class Broken(SSDStore):
        def read_parts(self, key: bytes, parts: Sequence[ArrayPart]) -> list[Any]:
            raise OSError(errno.EIO, "a disk's bad day")

    tier = ColdTier(lambda: Broken(tmp_path, 10**9, fingerprint="a model", floor_bytes=0))
    (record,) = chain(1)
    write(tier, record)
    assert read(tier, {record.key: [ArrayPart("0.keys", 0, 4)]}) == {}
    assert tier.stats().faults == 1
    tier.close()


def test_header_fields_may_have_any_order(tmp_path: Path) -> None:
    """As other library versions may write it; nonsense is damage."""
    (record,) = chain(1)
    raw = encode(record, "a model")
    size = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:size])

    def offsets(head: str) -> dict[str, int]:
        file = tmp_path / "record"
        file.write_bytes(len(head).to_bytes(8, "little") + head.encode() + raw[size:])
        with opened_file(file) as descriptor:
            return dict(array_offsets(FileSource(descriptor)))

    wanted = {
        name: size + array["data_offsets"][0]
        for name, array in fields.items()
        if name != "__metadata__"
    }
    assert offsets(raw[8:size].decode()) == wanted
    words = fields.pop("__metadata__")
    head = json.dumps({**fields, "__metadata__": words})
    moved = {name: at - size + 8 + len(head) for name, at in wanted.items()}
    assert offsets(head) == moved
    old = json.dumps(
        {"__metadata__": {**words, "format": "another"}, **fields}, separators=(",", ":")
    )
    wrong = [old, head.replace("penstock-block", "another"), '{"__metadata__":{', "[" * 9_000, "7"]
    wrong += ['{"__metadata__":7}', '{"__metadata__":{"format":"penstock-block-1"},"0.keys":{}}']
    for damaged in wrong:
        with pytest.raises(Damaged):
            offsets(damaged)
