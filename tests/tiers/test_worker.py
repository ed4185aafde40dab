"""The cold tier's thread: never blocks callers, and pauses while its folder fails."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from patience import SOON
from server_processes import wait_until
from test_disk_store import FILE_BYTES, FINGERPRINT, INDEX_BYTES, chain, keys_of

from penstock.tiers.disk import Record, SSDStore
from penstock.tiers.disk.disk_store import INDEX_NAME
from penstock.tiers.disk.tombstone import Tombstone
from penstock.tiers.record import FORMAT, Target
from penstock.tiers.worker import ColdTier


def opener(folder: Path, blocks: int = 100) -> Callable[[], SSDStore]:
    limit = INDEX_BYTES + blocks * FILE_BYTES
    return lambda: SSDStore(folder, limit, fingerprint=FINGERPRINT, floor_bytes=0)


@contextmanager
def running(folder: Path, **more: Any) -> Iterator[ColdTier]:
    tier = ColdTier(opener(folder), **more)
    try:
        yield tier
    finally:
        tier.close(SOON)
        assert not tier._thread.is_alive()


@contextmanager
def stalled(tier: ColdTier) -> Iterator[None]:
    """Keep the tier's thread busy."""
    begun, go = threading.Event(), threading.Event()

    def wait(store: SSDStore) -> None:
        begun.set()
        assert go.wait(SOON)

    answer = tier.call(wait, None)
    assert begun.wait(SOON)
    try:
        yield
    finally:
        go.set()
        answer.result(SOON)


def count(tier: ColdTier, keys: Sequence[bytes]) -> Future[int]:
    """Return the number of first blocks of a chain that can be read."""
    return tier.call(lambda store: store.prepare(keys), 0)


def places(records: Sequence[Record]) -> tuple[list[NDArray[np.uint8]], list[dict[str, Target]]]:
    """Return memory for the keys of each record, and the destinations of all its arrays."""
    made = [
        {name: np.zeros_like(array.data) for name, array in record.arrays.items()}
        for record in records
    ]
    targets = [
        {name: Target(a.dtype, a.shape, [room[name]]) for name, a in record.arrays.items()}
        for record, room in zip(records, made, strict=True)
    ]
    return [room["0.keys"] for room in made], targets


def test_blocks_offered_to_tier_survive_restart(tmp_path: Path) -> None:
    records = chain(6)
    with running(tmp_path) as tier:
        assert all(tier.offer(record) for record in records)
    with running(tmp_path) as tier:
        assert count(tier, keys_of(records)).result(SOON) == 6
        found, targets = places(records)
        assert tier.restore(keys_of(records), lambda: targets).result(SOON) == 6
        assert [room.tobytes() for room in found] == [
            record.arrays["0.keys"].data.tobytes() for record in records
        ]
        stats = tier.stats()
        assert (stats.counts.read_blocks, stats.counts.written_blocks, stats.off) == (6, 0, None)
        assert stats.held_bytes == sum(
            path.stat().st_size for path in tmp_path.rglob("*.safetensors")
        )


def test_full_disk_is_logged_once_and_still_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = chain(4)
    with running(tmp_path) as tier:
        assert all(tier.offer(record) for record in records[:2]) and tier.flush(SOON)
        assert tier.stats().full is None

    def no_space() -> SSDStore:
        store = opener(tmp_path)()
        store.floor_bytes = 1 << 60
        store._has_space(0)
        return store

    tier = ColdTier(no_space)
    try:
        assert tier.call(lambda store: store.held([]), 0).result(SOON) == 0
        told = tier.stats().full
        assert told is not None and "free some space" in told
        assert all(tier.offer(record) for record in records) and tier.flush(SOON)
        stats = tier.stats()
        assert (stats.counts.written_blocks, stats.counts.refused_blocks) == (0, 2)
        assert stats.off is None and stats.full is not None
        _, targets = places(records[:2])
        assert tier.restore([r.key for r in records[:2]], lambda: targets).result(SOON) == 2
    finally:
        tier.close(SOON)
    assert [line for line in caplog.messages if "pausing writes" in line] == [
        f"pausing writes to the SSD cache: {told}"
    ]


def test_idle_tier_adopts_files_missing_in_index(tmp_path: Path) -> None:
    records = chain(3)
    with running(tmp_path) as tier:
        assert all(tier.offer(record) for record in records) and tier.flush(SOON)
        lost = [records[2].key]
        tier.call(lambda store: store.index.remove(lost, lambda key: None), None).result(SOON)
    with running(tmp_path) as tier:
        wait_until(lambda: tier.stats().held_bytes == 3 * FILE_BYTES)
        assert count(tier, keys_of(records)).result(SOON) == 3


def test_slow_disk_drops_writes_without_blocking(tmp_path: Path) -> None:
    records = chain(10)
    room = 3 * records[0].nbytes
    with running(tmp_path, queue_bytes=room) as tier:
        with stalled(tier):
            taken = [tier.offer(record) for record in records]  # or waits for ever
            assert taken == [True] * 3 + [False] * 7
            assert tier.stats().queued_bytes == room
        assert tier.flush(SOON)
        stats = tier.stats()
        assert (stats.counts.written_blocks, stats.dropped_blocks, stats.queued_bytes) == (3, 7, 0)


def test_reads_run_before_queued_writes(tmp_path: Path) -> None:
    records = chain(20)
    with running(tmp_path) as tier:
        tier.offer(records[0])
        assert tier.flush(SOON)
        with stalled(tier):
            for record in records[1:]:
                tier.offer(record)
            restored = tier.restore(keys_of(records), lambda: places(records)[1])
        assert restored.result(SOON) == 1, "the writes came first"


def test_failing_folder_switches_tier_off_and_on_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "cache"
    records = chain(4)
    with running(folder, retry_seconds=0.3) as tier:
        tier.offer(records[0])
        assert tier.flush(SOON)
        shutil.rmtree(folder)
        folder.write_text("a file stands where the folder was")
        tier.offer(records[1])
        assert tier.flush(SOON)
        assert "cache" in str(tier.stats().off)
        assert len([r for r in caplog.records if "switched off" in r.message]) == 1
        assert tier.restore(keys_of(records), lambda: places(records)[1]).result(SOON) == 0
        assert not tier.offer(records[2])
        wait_until(lambda: tier.stats().faults > 1)
        assert count(tier, keys_of(records)).result(SOON) == 0, "tried again, and it fails again"
        assert len([r for r in caplog.records if "switched off" in r.message]) == 1
        folder.unlink()
        wait_until(lambda: tier.stats().off is None)
        assert count(tier, keys_of(records)).result(SOON) == 0
        assert "available again" in caplog.text
        assert all(tier.offer(record) for record in records)
        assert tier.flush(SOON)
        assert count(tier, keys_of(records)).result(SOON) == 4
        assert tier.stats().faults >= 2


def test_uncreatable_folder_switches_tier_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running(tmp_path / "file" / "cache") as tier:
        assert count(tier, keys_of(chain(2))).result(SOON) == 0
        assert "file" in str(tier.stats().off)
        assert not tier.offer(chain(1)[0])


def test_clear_drops_queued_blocks(tmp_path: Path) -> None:
    records = chain(5)
    with running(tmp_path) as tier:
        tier.offer(records[0])
        assert tier.flush(SOON)
        with stalled(tier):
            for record in records[1:]:
                tier.offer(record)
            cleared = tier.clear()
        assert cleared.result(SOON) == 1
        assert tier.flush(SOON)
        assert count(tier, keys_of(records)).result(SOON) == 0
        assert tier.stats().queued_bytes == 0


@pytest.mark.parametrize("lost_index", [False, True])
def test_cleared_blocks_do_not_return_when_folder_does(tmp_path: Path, lost_index: bool) -> None:
    """Nor do files that a new index adopts."""
    folder, away = tmp_path / "cache", tmp_path / "away"
    records = chain(4)
    with running(folder, retry_seconds=0.3) as tier:
        assert all(tier.offer(record) for record in records)
        assert tier.flush(SOON)
        folder.rename(away)
        folder.write_text("a file stands where the folder was")
        tier.offer(chain(5)[4])
        assert tier.flush(SOON) and tier.stats().off is not None
        assert tier.clear().result(SOON) is None
        if lost_index:
            for path in away.rglob("index.sqlite*"):
                path.unlink()
        link = tmp_path / "link"
        link.symlink_to(away)
        link.replace(folder)  # at once: the thread may try the folder at any time
        wait_until(lambda: tier.stats().off is None)
        assert count(tier, keys_of(records)).result(SOON) == 0
        assert not list(folder.rglob("*.safetensors"))
        assert all(tier.offer(record) for record in records)
        assert tier.flush(SOON)
        assert count(tier, keys_of(records)).result(SOON) == 4


@pytest.mark.parametrize("gone", ["the folder", "the index"])
def test_pending_deletion_is_done_by_next_tier(tmp_path: Path, gone: str) -> None:
    """Another tier of the folder deletes before it reads, once."""
    folder, away = tmp_path / "cache", tmp_path / "away"
    moved = folder if gone == "the folder" else folder / FORMAT / INDEX_NAME
    records, tombstone = chain(4), Tombstone(folder, FINGERPRINT)
    with running(folder, tombstone=tombstone) as tier:
        assert all(tier.offer(record) for record in records)
        assert tier.flush(SOON)
    moved.rename(away)
    if gone == "the folder":
        folder.write_text("a file")
    else:
        moved.mkdir()
    with running(folder, tombstone=tombstone) as tier:
        assert count(tier, keys_of(records)).result(SOON) == 0
        assert tier.stats().off is not None
        assert tier.clear().result(SOON) is None
        assert tombstone.read() is True
    if gone == "the folder":
        moved.unlink()
    else:
        moved.rmdir()
    away.rename(moved)
    assert len(list(folder.rglob("*.safetensors"))) == 4, "nothing was removed yet"
    with running(folder, tombstone=Tombstone(folder, FINGERPRINT)) as tier:
        assert count(tier, keys_of(records)).result(SOON) == 0
        assert not list(folder.rglob("*.safetensors"))
        assert tombstone.read() is None and not list(tmp_path.glob(".cache*"))
        assert all(tier.offer(record) for record in records)
        assert tier.flush(SOON)
    with running(folder, tombstone=Tombstone(folder, FINGERPRINT)) as tier:
        assert count(tier, keys_of(records)).result(SOON) == 4, "done once"


def test_unrecordable_deletion_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    folder.write_text("a file stands where the folder was")
    tombstone = Tombstone(folder, FINGERPRINT)
    tombstone.places[1].mkdir()
    with running(folder, tombstone=tombstone) as tier:
        assert count(tier, keys_of(chain(1))).result(SOON) == 0
        assert tier.clear().result(SOON) is None
    assert "would be lost on a restart" in caplog.text


def test_closed_tier_refuses_without_blocking(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        pass
    tier.close()
    assert not tier.offer(chain(1)[0])
    assert count(tier, keys_of(chain(1))).result(SOON) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_does_not_block_callers(tmp_path: Path) -> None:
    """The store fails for a reason other than its folder."""

    def wrong() -> SSDStore:
        raise ValueError("a limit without room")

    tier = ColdTier(wrong)
    assert count(tier, keys_of(chain(2))).result(SOON) == 0
    tier._thread.join(SOON)
    assert not tier._thread.is_alive()
    assert not tier.offer(chain(1)[0])
    assert tier.flush(SOON)
    tier.close()
