"""The folder of blocks: real files, real processes, real faults."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_on_disk import keys_of, read, size_of
from patience import SOON

from penstock.prefix.block_hashes import checkpoint_hash, hash_blocks, root_hash
from penstock.tiers.disk import HostArray, Record, SSDStore
from penstock.tiers.disk import disk_store as ssd_store
from penstock.tiers.disk import folder as folder_module
from penstock.tiers.disk.block_files import listed
from penstock.tiers.disk.folder import Folder
from penstock.tiers.disk.index import Entry
from penstock.tiers.disk.integrity import check_block, verify
from penstock.tiers.record import FORMAT, MOST_DEPTH, TOKENS, Damaged, encode

FINGERPRINT = "a model"
ROOT = root_hash(FINGERPRINT)
BLOCK = 4
INDEX_BYTES = 8_000_000
NUMBERS = 1_000


def chain(blocks: int, seed: int = 0) -> list[Record]:
    """Return the blocks of a prompt with random values."""
    tokens = np.random.default_rng(seed).integers(0, 1_000, blocks * BLOCK)
    block_hashes = hash_blocks(tokens, BLOCK, ROOT)
    parents = [ROOT, *block_hashes]
    return [
        Record(key, parents[i], i, {"0.keys": numbers(seed, i), "0.values": numbers(seed, -i)})
        for i, key in enumerate(block_hashes)
    ]


def numbers(seed: int, block: int) -> HostArray:
    raw = np.random.default_rng((seed, block % 1_000)).bytes(4 * NUMBERS)
    return HostArray("float32", (1, 1, NUMBERS, 1), np.frombuffer(raw, np.uint8))


FILE_BYTES = len(encode(chain(1)[0], FINGERPRINT))


@contextmanager
def opened(folder: Path, blocks: int = 100, **more: Any) -> Iterator[SSDStore]:
    """Open a store with room for this number of blocks."""
    limit = INDEX_BYTES + blocks * FILE_BYTES
    store = SSDStore(folder, limit, **{"fingerprint": FINGERPRINT, "floor_bytes": 0, **more})
    try:
        yield store
    finally:
        store.close()


def write(store: SSDStore, records: list[Record]) -> list[str]:
    return [store.write(record) for record in records]


def assert_reads(store: SSDStore, records: list[Record]) -> None:
    wanted = [
        {name: array.data.tobytes() for name, array in record.arrays.items()} for record in records
    ]
    assert read(store, records) == wanted
    for record in records:
        entry = store.index.get(record.key)
        assert entry is not None
        assert (entry.parent, entry.depth) == (record.parent, record.depth)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.safetensors"))


# ---- what comes back


def test_blocks_survive_restart(tmp_path: Path) -> None:
    records = chain(5)
    with opened(tmp_path) as store:
        assert write(store, records) == ["claimed"] * 5
        assert store.held(keys_of(records)) == 5
    with opened(tmp_path) as store:
        assert store.held(keys_of(records)) == 5
        assert_reads(store, records)
        assert store.counts.read_blocks == 5
        assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))


def test_held_blocks_end_at_first_gap(tmp_path: Path) -> None:
    records = chain(1_200)
    with opened(tmp_path, blocks=2_000) as store:
        write(store, records)
        store.index.remove([records[700].key], store._unlink)
        assert store.held(keys_of(records)) == 700
        assert len(read(store, records[690:])) == 10
        assert store.held([]) == 0
        assert store.held(keys_of(chain(3, seed=9))) == 0


def test_block_is_written_once(tmp_path: Path) -> None:
    records = chain(3)
    with opened(tmp_path) as store, opened(tmp_path) as other:
        write(store, records)
        assert write(other, records) == ["known"] * 3
        assert (other.counts.written_bytes, other.counts.known_blocks) == (0, 3)


def test_block_written_by_other_store_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the index lookup and the claim."""
    (record,) = chain(1)
    with opened(tmp_path) as store, opened(tmp_path) as other:

        def slow(*arguments: Any) -> bytes:
            monkeypatch.undo()
            assert other.write(record) == "claimed"
            return encode(*arguments)

        monkeypatch.setattr(ssd_store, "encode", slow)
        assert store.write(record) == "known"
        assert (store.counts.known_blocks, store.counts.written_blocks) == (1, 0)
        assert store.counts.refused_blocks == store.counts.written_bytes == 0
        assert (other.counts.known_blocks, other.counts.written_blocks) == (0, 1)
        assert store.take(record, encode(record, FINGERPRINT), FINGERPRINT) == "known"
        assert store.counts.known_blocks == 2
        assert_reads(store, [record])


def test_other_model_finds_nothing_and_shares_limit(tmp_path: Path) -> None:
    mine, theirs = chain(4), chain(4, seed=1)
    with opened(tmp_path, blocks=6) as store, opened(tmp_path, blocks=6, fingerprint="b") as other:
        write(store, mine)
        assert (other.held(keys_of(mine)), read(other, mine)) == (0, [])
        write(other, theirs)
        assert len(files(tmp_path)) == 6
        assert other.nbytes == store.nbytes <= 6 * FILE_BYTES + 100


def test_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as store:
        write(store, chain(2))
        for path in (folder, *folder.rglob("*")):
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# ---- the limit


def test_eviction_order_is_lru_across_restart(tmp_path: Path) -> None:
    first, second, third = (chain(2, seed=i) for i in range(3))
    with opened(tmp_path, blocks=4) as store:
        write(store, first), write(store, second)
    with opened(tmp_path, blocks=4) as store:
        read(store, first)
        write(store, third)
        assert [store.held(keys_of(one)) for one in (first, second, third)] == [2, 0, 2]


def test_rewriting_block_makes_it_recent_without_hit(tmp_path: Path) -> None:
    first, second, third = (chain(2, seed=i) for i in range(3))
    with opened(tmp_path, blocks=4) as store:
        write(store, first), write(store, second), write(store, first)
        write(store, third)
        assert [store.held(keys_of(one)) for one in (first, second, third)] == [2, 0, 2]
        assert store.index.get(first[0].key).hits == 0  # type: ignore[union-attr]


def test_frequently_hit_block_outlives_newer_ones(tmp_path: Path) -> None:
    often = chain(1)
    with opened(tmp_path, blocks=4) as store:
        write(store, often)
        for _ in range(3):
            read(store, often)
        for seed in range(1, 100):
            write(store, chain(1, seed=seed))
        assert store.held(keys_of(often)) == 1
        for seed in range(100, 900):
            write(store, chain(1, seed=seed))
        assert store.held(keys_of(often)) == 0, "and not for ever"


def test_end_of_chain_is_evicted_first(tmp_path: Path) -> None:
    records = chain(4)
    with opened(tmp_path, blocks=4) as store:
        write(store, records)  # the first one least recently
        write(store, chain(2, seed=1))
        assert store.held(keys_of(records)) == 2
        assert store.held(keys_of(chain(2, seed=1))) == 2


def test_chain_longer_than_limit_keeps_beginning(tmp_path: Path) -> None:
    records = chain(7)
    with opened(tmp_path, blocks=4) as store:
        assert write(store, records) == ["claimed"] * 4 + ["full"] + ["orphan"] * 2
        assert store.held(keys_of(records)) == 4


@pytest.mark.parametrize("room", [0.9, 0.1])
def test_oversized_block_is_refused_without_eviction(tmp_path: Path, room: float) -> None:
    small = chain(1)[0]
    with opened(tmp_path, blocks=1) as store:
        write(store, [small])
    limit = INDEX_BYTES + int(room * FILE_BYTES)
    store = SSDStore(tmp_path, limit, fingerprint=FINGERPRINT, floor_bytes=0)
    assert write(store, chain(1, seed=2)) == ["full"]
    assert store.counts.refused_blocks == 1
    assert store.held([small.key]) == 1
    store.close()


def test_limit_without_room_for_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no room beside the index"):
        SSDStore(tmp_path, INDEX_BYTES, fingerprint=FINGERPRINT)


def test_folder_stays_within_limit(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=8) as store:
        most, done = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, size_of(tmp_path))

        watching = threading.Thread(target=watch)
        watching.start()
        for seed in range(150):
            write(store, chain(2, seed=seed))
        done.set()
        watching.join()
        assert 8 * FILE_BYTES < most <= store.limit_bytes
        assert len(files(tmp_path)) == 8


def test_nearly_full_disk_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path, floor_bytes=1 << 60) as store:
        assert write(store, chain(1)) == ["disk"]
        assert (store.counts.refused_blocks, files(tmp_path)) == (1, [])
        assert store.full is not None and "are always left free" in store.full


def test_reason_for_not_writing_is_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.full is None
        write(store, chain(1))
    with opened(tmp_path, floor_bytes=1 << 60) as store:
        assert store.full is not None
        store.floor_bytes = 0
        assert write(store, chain(2))[-1] == "claimed"
        assert store.full is None
    with opened(tmp_path, budget_bytes=1) as store:
        assert write(store, chain(3))[-1] == "budget"
        assert store.full is not None and "--ssd-write-budget" in store.full


# ---- what is told of it


def told(seed: int, blocks: int) -> list[Record]:
    """Return a chain of records with their tokens, two blocks each."""
    tokens = np.random.default_rng(seed).integers(0, 1_000, blocks * BLOCK).astype(np.uint32)
    keys = [ROOT, *hash_blocks(tokens, BLOCK, ROOT)]
    return [
        Record(
            keys[i + 2],
            keys[i],
            i,
            {TOKENS: HostArray("uint32", (2 * BLOCK,), part.view(np.uint8))},
            blocks=2,
        )
        for i in range(0, blocks, 2)
        for part in (tokens[i * BLOCK : (i + 2) * BLOCK],)
    ]


def blocks_of(records: list[Record]) -> list[bytes]:
    """Return the hashes of all their blocks."""
    tokens = np.concatenate([one.arrays[TOKENS].data.view(np.uint32) for one in records])
    return hash_blocks(tokens, BLOCK, ROOT)


def test_chains_are_complete_and_ordered_by_recency(tmp_path: Path) -> None:
    first, second = told(1, 4), told(2, 6)
    with opened(tmp_path) as other_model:
        other_model.fingerprint = "another model"
        write(other_model, told(3, 2))
    with opened(tmp_path) as store:
        write(store, first), write(store, second)
        state = Record(checkpoint_hash(first[0].key), first[0].key, 2, state_arrays())
        write(store, [state])
        assert store.chains(1 << 30) == [blocks_of(second), blocks_of(first)]
        store.index.use(keys_of(first))
        assert store.chains(1 << 30) == [blocks_of(first), blocks_of(second)]
        nbytes = sum(store.index.get(key).nbytes for key in keys_of(first))  # type: ignore[union-attr]
        assert store.chains(nbytes) == [blocks_of(first)]
        assert store.chains(nbytes - 1) == []
        store.index.remove([second[0].key], store._unlink)
        assert store.chains(1 << 30) == [blocks_of(first)], "without its beginning it is no chain"


def state_arrays() -> dict[str, HostArray]:
    return {"states.0.0": numbers(5, 0)}


def test_restored_chain_ends_at_mismatched_record(tmp_path: Path) -> None:
    records = told(1, 6)
    with opened(tmp_path) as store:
        write(store, records)
        paths = [store._path(record.key) for record in records]
        paths[1].write_bytes(paths[2].read_bytes())
        assert store.chains(1 << 30) == [blocks_of(records[:1])]
        paths[1].write_bytes(b"nothing")
        assert store.chains(1 << 30) == [blocks_of(records[:1])]


def test_reads_and_writes_are_counted(tmp_path: Path) -> None:
    records = chain(3)
    with opened(tmp_path) as store:
        write(store, records), write(store, records[:1])
        counts = store.counts
        assert (counts.written_blocks, counts.known_blocks) == (3, 1)
        assert counts.written_bytes == 3 * FILE_BYTES == store.nbytes
        assert store.take(records[0], b"its file", FINGERPRINT) == "known"
        assert counts.known_blocks == 2
        began = time.perf_counter()
        assert store.restore(keys_of(records[:1]), [{}], lambda: time.sleep(0.05)) == 0
        assert len(read(store, records)) == 0, "asked for other arrays, it was forgotten"
        write(store, records)
        assert len(read(store, records)) == 3
        assert 0.05 <= counts.read_seconds <= time.perf_counter() - began
        assert (counts.read_blocks, counts.read_bytes) == (3, 3 * FILE_BYTES)


def test_one_model_or_all_can_be_cleared(tmp_path: Path) -> None:
    mine, others = chain(3), chain(2, seed=1)
    with opened(tmp_path) as store, opened(tmp_path, fingerprint="another model") as other:
        write(store, mine), write(other, others)
        store.index.claim(entry_being_written(chain(1, seed=2)[0]), 1 << 30, store._unlink)
        assert store.clear(all_models=False) == 3
        assert (store.held(keys_of(mine)), other.held(keys_of(others))) == (0, 2)
        assert store.clear() == 2
        assert len(store.index) == 1, "what is being written stays"
        assert store.clear() == 0


def test_resume_counts_as_use_of_checkpoint(tmp_path: Path) -> None:
    records = chain(2)
    key = records[-1].key
    state = Record(checkpoint_hash(key), key, 2, state_arrays())
    with opened(tmp_path) as store:
        write(store, [*records, state])
        assert store.prepare(keys_of(records), resumable=True) == 2
        store.note_uses()
        hits = {entry.key: entry.hits for entry in store.index.entries()}
        assert hits == {one.key: 1 for one in (*records, state)}


def test_unfinished_block_of_closed_store_is_removed(tmp_path: Path) -> None:
    (record,) = chain(1)
    with opened(tmp_path) as other:
        with opened(tmp_path) as store:
            entry = replace(entry_being_written(record), owner=store._owner)
            other.index.claim(entry, 1 << 30, other._unlink)
            other.reconcile()
            assert other.index.get(record.key) is not None
        other.reconcile()
        assert other.index.get(record.key) is None


def entry_being_written(record: Record) -> Entry:
    return Entry(record.key, FINGERPRINT, ROOT, 0, FILE_BYTES, 0, 0, time.time(), "9@9+9")


def test_missing_and_truncated_blocks_are_counted_separately(tmp_path: Path) -> None:
    records = chain(4)
    with opened(tmp_path) as store:
        write(store, records)
        store._path(records[3].key).unlink()
        store._path(records[2].key).write_bytes(b"short")
        store.reconcile()
        assert (store.counts.missing_blocks, store.counts.damaged_blocks) == (1, 1)
        assert store.held(keys_of(records)) == 2


def test_only_ends_of_chains_are_replaced(tmp_path: Path) -> None:
    records = chain(3)
    with opened(tmp_path) as store:
        write(store, records)
        store.write(replace(chain(1, seed=1)[0], replaces=keys_of(records)))
        assert store.held(keys_of(records)) == 2
        store.write(replace(chain(1, seed=2)[0], replaces=keys_of(records[:2])))
        assert store.held(keys_of(records)) == 1


# ---- damage


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "gone"])
def test_damaged_record_is_a_miss(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = chain(4)
    with opened(tmp_path) as store:
        write(store, records)
        paths = {path.name: path for path in files(tmp_path)}
        path, other = (paths[f"{records[i].key.hex()}.safetensors"] for i in (2, 1))
        raw = bytearray(path.read_bytes())
        if damage == "flip":
            raw[-1] ^= 1
            path.write_bytes(raw)
        elif damage == "cut":
            path.write_bytes(raw[:-1])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "other":
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
        assert_reads(store, records[:2])
        assert len(read(store, records)) == 2
        assert (store.counts.damaged_blocks, store.counts.missing_blocks) == (
            (0, 1) if damage == "gone" else (1, 0)
        )
        assert not path.exists()
        told = [record for record in caplog.records if "is damaged" in record.message]
        assert len(told) == (0 if damage == "gone" else 1), "each is told of once"
        assert store.held(keys_of(records)) == 2
        assert write(store, records[2:3]) == ["claimed"]
        assert_reads(store, records)


def test_damaged_record_error_retains_no_buffers(tmp_path: Path) -> None:
    (record,) = records = chain(1)
    with opened(tmp_path) as store:
        write(store, records)
        (path,) = files(tmp_path)
        raw = bytearray(path.read_bytes())
        raw[8] ^= 1  # the header is no JSON: one error is raised for another
        path.write_bytes(raw)
        asked = Future[None]()
        with pytest.raises(Damaged) as caught:
            store._read_into(record.key, {})
        assert caught.value.__context__ is not None
        asked.set_exception(caught.value)
        assert not store.is_whole(record.key, asked)
        assert caught.value.__traceback__ is caught.value.__context__ is None


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    """A real failure: the file size limit is a few kilobytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    records = chain(2)
    with opened(tmp_path, blocks=1_000) as store:
        write(store, records[:1])
        big = Record(records[1].key, ROOT, 0, {f"{i}.keys": numbers(7, i) for i in range(900)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                store.write(big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert len(files(tmp_path)) == 1
        assert store.nbytes == files(tmp_path)[0].stat().st_size
        assert list((tmp_path / FORMAT / "aside").iterdir()) == []
        assert write(store, records[1:]) == ["claimed"]


def test_missing_folder_raises_error(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        write(store, chain(1))
        for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        with pytest.raises((OSError, sqlite3.Error)):
            store.write(chain(1, seed=1)[0])


@pytest.mark.parametrize("lost", [0, 1])
def test_files_missing_in_index_are_adopted_or_removed(tmp_path: Path, lost: int) -> None:
    records = chain(3)
    with opened(tmp_path) as store:
        write(store, records)
        store.index.remove([records[lost].key], lambda key: None)  # its file stays
        files(tmp_path)[0].with_name("ab.safetensors").write_bytes(b"nothing")
        files(tmp_path)[0].with_name("notes").write_bytes(b"nothing")
        store.reconcile()
        assert_reads(store, records)
        assert {path.stat().st_size for path in (tmp_path / FORMAT / "blocks").rglob("*.*")} == {
            path.stat().st_size for path in files(tmp_path)
        }
        assert len(files(tmp_path)) == 3


def test_block_check_validates_metadata_and_tokens() -> None:
    record = told(1, 2)[0]
    assert check_block(encode(record, FINGERPRINT)).fingerprint == FINGERPRINT
    assert check_block(encode(record, "f" * 256)).record.key == record.key
    for fingerprint in ("", "a\nb", "f" * 257, "\x1b" * 257):
        with pytest.raises(Damaged, match="its fingerprint is invalid"):
            check_block(encode(record, fingerprint))
    tokens = record.arrays[TOKENS]
    others: list[dict[str, HostArray]] = [
        {"0.keys": tokens},
        {TOKENS: replace(tokens, dtype="int32")},
        {TOKENS: replace(tokens, shape=(2, BLOCK))},
        {TOKENS: HostArray("uint32", (0,), tokens.data[:0])},
    ]
    for arrays in others:
        with pytest.raises(Damaged, match="tokens of the block are missing"):
            check_block(encode(replace(record, arrays=arrays), FINGERPRINT))
    for other in (replace(record, depth=-1), replace(record, parent=ROOT[:-1])):
        with pytest.raises(Damaged, match="invalid depth"):
            check_block(encode(other, FINGERPRINT))
    with pytest.raises(Damaged, match="not that of its tokens"):
        check_block(encode(replace(record, key=ROOT), FINGERPRINT))


def test_unrelated_files_are_not_touched(tmp_path: Path) -> None:
    foreign = [tmp_path / "notes.txt", tmp_path / "penstock-block-0" / "blocks" / "x.safetensors"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    with opened(tmp_path, blocks=2) as store:
        for seed in range(5):
            write(store, chain(2, seed=seed))
        store.clear()
        store.reconcile()
        assert store.nbytes == 0
    assert all(path.read_text() == "not ours" for path in foreign)


@pytest.mark.parametrize("damage", ["noise", "middle", "empty"])
def test_damaged_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    records = chain(300)
    with opened(tmp_path, blocks=400) as store:
        write(store, records)
    index = tmp_path / FORMAT / "index.sqlite"
    raw = bytearray(index.read_bytes())
    if damage == "noise":
        raw = bytearray(os.urandom(len(raw)))
    elif damage == "middle":
        raw[len(raw) // 3 : len(raw) // 2] = os.urandom(len(raw) // 2 - len(raw) // 3)
    else:
        raw.clear()
    index.write_bytes(raw)
    with opened(tmp_path, blocks=400) as store:
        store.reconcile()
        assert store.held(keys_of(records)) == 300
        assert_reads(store, records)
        assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))


@pytest.mark.parametrize("wrong", ["nbytes = 0", "nbytes = 1 << 40", "uses = 0", "uses = 1 << 60"])
def test_wrong_index_totals_are_corrected(tmp_path: Path, wrong: str) -> None:
    """Else the folder would grow past its limit, or what is new be the first to go."""
    with opened(tmp_path) as store:
        write(store, chain(3))
    with closing(sqlite3.connect(tmp_path / FORMAT / "index.sqlite")) as db, db:
        db.execute(f"UPDATE sums SET {wrong}")
    with opened(tmp_path) as store:
        assert (store.nbytes, store.index.uses) == (3 * FILE_BYTES, 3)


@pytest.mark.parametrize("depth", [-1, MOST_DEPTH])
def test_file_of_impossible_depth_is_removed(tmp_path: Path, depth: int) -> None:
    record = replace(chain(1)[0], depth=depth)
    with opened(tmp_path) as store:
        path = store._path(record.key)
        path.parent.mkdir()
        path.write_bytes(encode(record, FINGERPRINT))
        store.reconcile()
        assert store.index.get(record.key) is None
        assert not path.exists()


def test_unreadable_file_is_not_reported_as_damaged(tmp_path: Path) -> None:
    """A repair would remove it. A link to itself stands for a file of another owner."""
    (record,) = chain(1)
    with opened(tmp_path) as store:
        write(store, [record])
        path = store._path(record.key)
        path.unlink()
        path.symlink_to(path)
        with Folder(tmp_path) as folder, pytest.raises(OSError, match="symbolic links"):
            verify(folder, repair=True, progress=lambda nbytes: None)
        assert store.index.get(record.key) is not None


def test_shrinking_removes_few_blocks_per_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers wait for the index meanwhile."""
    monkeypatch.setattr(folder_module, "PAGE_ENTRIES", 2)
    with opened(tmp_path) as store:
        write(store, chain(8))
    statements: list[str] = []
    with Folder(tmp_path) as folder:
        folder.index._db.set_trace_callback(statements.append)
        assert folder.shrink(2 * FILE_BYTES, lambda nbytes: None).blocks == 6
    assert sum(one.startswith("BEGIN") for one in statements) == 3


# ---- several processes

WRITER = """
import os, sys
sys.path[:0] = [sys.argv[3], f"{os.path.dirname(sys.argv[3])}/support"]
from pathlib import Path
from test_disk_store import chain, opened
step, skip = sys.argv[2].split(":")
skip = int(skip)
real = {"fsync": os.fsync, "rename": Path.rename, "open": os.open, "unlink": Path.unlink}
def dying(name):
    def call(*arguments, **more):
        global skip
        skip -= 1
        if skip < 0:
            os.kill(os.getpid(), 9)
        return real[name](*arguments, **more)
    return call
if step in ("fsync", "open"):
    setattr(os, step, dying(step))
elif step:
    setattr(Path, step, dying(step))
with opened(Path(sys.argv[1]), blocks=8) as store:
    for seed in range(6):
        for record in chain(4, seed=seed):
            store.write(record)
    print(store.counts.written_blocks)
"""


def run_writer(folder: Path, step: str = ":0") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), step, str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_write_no_block_twice(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=100):
        pass  # the schema is there
    running = [run_writer(tmp_path) for _ in range(3)]
    written = [int(process.communicate(timeout=SOON)[0]) for process in running]
    assert [process.returncode for process in running] == [0] * 3
    with opened(tmp_path, blocks=8) as store:
        assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))
        assert len(files(tmp_path)) == 8
        assert sum(written) >= 24
        for seed in range(6):
            records = chain(4, seed=seed)
            assert_reads(store, records[: store.held(keys_of(records))])


@pytest.mark.parametrize("step", ["open", "fsync", "rename", "unlink"])
@pytest.mark.parametrize("skip", [0, 1, 5, 12])
def test_killed_writer_loses_at_most_its_block(tmp_path: Path, step: str, skip: int) -> None:
    process = run_writer(tmp_path, f"{step}:{skip}")
    process.communicate(timeout=SOON)
    assert process.returncode == -signal.SIGKILL
    with opened(tmp_path, blocks=8) as store:
        assert size_of(tmp_path) <= store.limit_bytes
        store.reconcile()
        assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))
        assert list((tmp_path / FORMAT / "aside").iterdir()) == []
        assert {path.name.removesuffix(".safetensors") for path in files(tmp_path)} == {
            entry.key.hex() for entry in store.index.entries()
        }
        for seed in range(6):
            records = chain(4, seed=seed)
            held = store.held(keys_of(records))
            assert_reads(store, records[:held])
        assert store.counts.damaged_blocks == 0
        assert "claimed" in write(store, chain(4, seed=77))


def test_reconcile_keeps_block_of_live_writer(tmp_path: Path) -> None:
    """Negative control of `reconcile`: a live writer's claim and file stay."""
    record = chain(1)[0]
    with opened(tmp_path) as store, opened(tmp_path) as other:
        store.write(record)
        with sqlite3.connect(tmp_path / FORMAT / "index.sqlite") as db:
            db.execute("UPDATE blocks SET owner = ?", (store._owner,))
        aside = tmp_path / FORMAT / "aside" / f"{record.key.hex()}.{store._owner}"
        aside.write_bytes(b"half")
        other.reconcile()
        assert aside.exists()
        assert other.index.get(record.key) is not None
        assert other.write(record) == "known"
        assert other.held([record.key]) == 0, "it is not there yet"
        with sqlite3.connect(tmp_path / FORMAT / "index.sqlite") as db:
            db.execute("UPDATE blocks SET owner = ?", (f"{os.getpid()}@1.00",))
        aside.rename(aside.with_name(f"{record.key.hex()}.{os.getpid()}@1.00"))
        other.reconcile()
        assert not list(aside.parent.iterdir())
        assert other.index.get(record.key) is None


def test_leaving_folder_context_closes_index(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, chain(1))
    with Folder(tmp_path) as folder:
        assert folder.index.get(chain(1)[0].key) is not None
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        folder.index.get(chain(1)[0].key)


def test_adopted_blocks_stay_within_limit(tmp_path: Path) -> None:
    records = chain(8)
    with opened(tmp_path) as store:
        write(store, records)
        store.index.remove([record.key for record in records], lambda key: None)
    with opened(tmp_path, blocks=4) as store:
        store.reconcile()
        assert len(files(tmp_path)) == 4


def test_unreadable_folder_raises_instead_of_listing_none(tmp_path: Path) -> None:
    assert listed(tmp_path / "missing") == []
    with pytest.raises(OSError, match="too long"):
        listed(tmp_path / ("x" * 1_000))
