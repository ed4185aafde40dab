"""Parts of a record's arrays, read without the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from objects_in_memory import InMemory
from test_disk_store import chain
from test_remote_store import opened

from penstock.tiers.disk import SSDStore
from penstock.tiers.disk.block_files import block_file
from penstock.tiers.disk.block_files import opened as opened_file
from penstock.tiers.record import Damaged, FileSource, array_offsets, encode
from penstock.tiers.record_parts import ArrayPart
from penstock.tiers.store import Store


@pytest.fixture(params=["disk", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "disk":
        return SSDStore(tmp_path, 10**9, fingerprint="a model", floor_bytes=0)
    return opened(InMemory())


def test_parts_are_the_bytes_that_were_written(store: Store) -> None:
    records = chain(3)
    for record in records:
        store.write(record)
    wanted = {
        record.key: [
            ArrayPart(name, start, nbytes)
            for name, array in record.arrays.items()
            for start, nbytes in ((array.data.nbytes // 2, 8), (0, 4))
        ]
        for record in records
    }
    read = store.read_parts({**wanted, b"unknown".ljust(32): [ArrayPart("0.keys", 0, 4)]})
    assert set(read) == set(wanted), "a record that is not there is a miss"
    assert store.counts.missing_blocks == 1
    for record in records:
        for part, data in zip(wanted[record.key], read[record.key], strict=True):
            held = record.arrays[part.name].data[part.start : part.start + part.nbytes]
            assert np.array_equal(data, held)


def test_a_part_that_no_record_has_is_damage(store: Store) -> None:
    (record,) = chain(1)
    store.write(record)
    assert store.holds(record.key)
    assert store.read_parts({record.key: [ArrayPart("99.keys", 0, 4)]}) == {}
    assert store.counts.damaged_blocks == 1
    assert not store.holds(record.key), "it is removed, to be written anew"


def test_a_file_that_was_cut_short_is_damage(tmp_path: Path) -> None:
    store = SSDStore(tmp_path, 10**9, fingerprint="a model", floor_bytes=0)
    (record,) = chain(1)
    store.write(record)
    path = block_file(store._blocks, record.key)
    path.write_bytes(path.read_bytes()[:-8])
    name = max(record.arrays)
    nbytes = record.arrays[name].data.nbytes
    parts = [ArrayPart(one, 0, record.arrays[one].data.nbytes) for one in record.arrays]
    assert nbytes and store.read_parts({record.key: parts}) == {}
    assert store.counts.damaged_blocks == 1
    store.close()


def test_a_record_with_a_wrong_part_can_be_dropped(store: Store) -> None:
    (record,) = chain(1)
    store.write(record)
    store.drop_damaged(record.key)
    assert not store.holds(record.key)
    assert store.counts.damaged_blocks == 1


def test_a_header_is_read_wherever_its_words_stand(tmp_path: Path) -> None:
    """As another version of the library may write it; what makes no sense is damage."""
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
