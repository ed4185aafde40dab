"""Blocks in a folder: written once, read back checked, inside a limit that all who share it keep.

    write   claim in the index (room is made) -> file aside -> sync -> rename -> written
    read    index -> file -> straight to where it belongs -> hash, or a miss that is counted

Whatever goes wrong with a record is a miss, and the record is gone afterwards. What goes wrong
with the folder itself is an `OSError`, for whoever drives the store to switch it off.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from penstock.prefix.ssd.index import (
    BUSY_SECONDS,
    PAGE_ENTRIES,
    Claim,
    Entry,
    Index,
    is_alive,
    this_process,
)
from penstock.prefix.ssd.limits import payload_bytes
from penstock.prefix.ssd.record import (
    FORMAT,
    Damaged,
    Record,
    Target,
    decode,
    encode,
    header,
    read_into,
)

logger = logging.getLogger(__name__)

INDEX_NAME = "index.sqlite"
FLOOR_BYTES = 1_000_000_000
"""Free bytes of the disk that are never gone below."""
SUFFIX = ".safetensors"
LOCK_LOOK_SECONDS = 0.02
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL

T = TypeVar("T")
Written: TypeAlias = Claim | Literal["disk"]
"""What became of a write: as `Claim`, or `disk`: too little of it is free."""


@dataclass(slots=True)
class Counts:
    """What happened. A store has its own from the start; who opens it again may go on with one."""

    written_blocks: int = 0
    written_bytes: int = 0
    """Bytes of files: the wear of the disk."""
    known_blocks: int = 0
    """Writes that were not needed."""
    refused_blocks: int = 0
    """Writes for which there was no room, or whose beginning is not there."""
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Spent on `read_bytes`."""
    damaged_blocks: int = 0
    missing_blocks: int = 0
    """In the index, and no file."""


class SSDStore:
    """The folder of one model's blocks, which other processes and models may use as well.

    Not thread-safe: one owner, the thread with the files.

    Args:
        folder: made if it is not there; only its owner may look into it.
        limit_bytes: for everything in it, files that are being written and the index included.
        fingerprint: what must be equal for KV to be reusable, besides the tokens.
        floor_bytes: free bytes of the disk that are never gone below.
        budget_bytes: what all who share the folder may write in a day together; None is no limit.

    Raises:
        OSError: the folder cannot be made or written to.
        sqlite3.OperationalError: another process holds the index for too long.
        ValueError: the limit has no room for an index.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        fingerprint: str,
        floor_bytes: int = FLOOR_BYTES,
        budget_bytes: int | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.payload_bytes = payload_bytes(limit_bytes)
        self.budget_bytes = budget_bytes
        self.fingerprint = fingerprint
        self.floor_bytes = floor_bytes
        self.counts = Counts()
        self._folder = folder / FORMAT
        self._blocks = self._folder / "blocks"
        self._aside = self._folder / "aside"
        for each in (folder, self._folder, self._blocks, self._aside):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = this_process()
        self.index = self._open_index()

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes of all files of blocks, of all models, those that are being written included."""
        return self.index.nbytes

    def held(self, keys: Sequence[bytes]) -> int:
        """Return how many keys of a chain, from its first on, could be read."""
        return self.index.held(keys, self.fingerprint)

    # ---- acts

    def write(self, record: Record) -> Written:
        """Keep a block, unless it is there; what is worth least gives way.

        Raises:
            OSError: the disk or the folder fails; nothing of the block is left.
        """
        if self.index.get(record.key) is not None:
            self.index.touch(record.key)
            self.counts.known_blocks += 1
            return "known"
        raw = encode(record, self.fingerprint)
        if shutil.disk_usage(self._folder).free - len(raw) < self.floor_bytes:
            self.counts.refused_blocks += 1
            return "disk"
        entry = Entry(
            key=record.key,
            fingerprint=self.fingerprint,
            parent=record.parent,
            depth=record.depth,
            nbytes=len(raw),
            hits=0,
            used=0,
            written_seconds=time.time(),
            owner=self._owner,
        )
        if len(raw) > self.payload_bytes:
            claim: Claim = "full"
        else:
            claim = self.index.claim(entry, self.payload_bytes, self._unlink, self.budget_bytes)
        if claim != "claimed":
            self.counts.known_blocks += claim == "known"
            self.counts.refused_blocks += claim != "known"
            return claim
        try:
            self._put(record.key, raw)
        except BaseException:
            with suppress(OSError, sqlite3.Error):
                self._forget([record.key])
            raise
        self.index.written(record.key)
        self.counts.written_blocks += 1
        self.counts.written_bytes += len(raw)
        return "claimed"

    def read(self, keys: Sequence[bytes]) -> list[Record]:
        """Return the records of a chain's first keys, as far as they are there and whole.

        Raises:
            OSError: the disk fails; a file that is not there is only a miss.
        """
        found: list[Record] = []
        for key in keys:
            record = self._get(key)
            if record is None:
                break
            found.append(record)
        if found:
            self.index.use(keys[: len(found)])
        return found

    def restore(self, keys: Sequence[bytes], targets: Sequence[Mapping[str, Target]]) -> int:
        """Read a chain's first keys to where they belong; return how many, as far as all is well.

        Args:
            keys: of the blocks.
            targets: of each block, for all of its arrays.

        Raises:
            OSError: the disk fails; a file that is not there is only a miss.
        """
        count = 0
        for key, places in zip(keys, targets, strict=True):
            if not self._restore(key, places):
                break
            count += 1
        if count:
            self.index.use(keys[:count])
        return count

    def prepare(self, keys: Sequence[bytes]) -> int:
        """Return how many keys of a chain, from its first on, could be read; the system is told
        that they will be, so that it may read them ahead."""
        count = self.held(keys)
        for key in keys[:count]:
            with suppress(OSError), self._path(key).open("rb") as file:
                _read_ahead(file.fileno())
        return count

    def clear(self, *, all_models: bool = True) -> int:
        """Remove all blocks, or this model's, but those being written; return how many."""
        keys = [
            entry.key
            for entry in self.index.entries()
            if entry.owner is None and (all_models or entry.fingerprint == self.fingerprint)
        ]
        self._forget(keys)
        return len(keys)

    def reconcile(self) -> None:
        """Bring index and files together: after a crash, or after somebody removed files."""
        for _ in self.reconciling():
            pass

    def reconciling(self) -> Iterator[None]:
        """Do as `reconcile`, and yield now and then: others may use the store in between."""
        for page in self.index.pages():
            for entry in page:
                self._reconcile_entry(entry)
            yield
        for number, path in enumerate(self._files()):
            self._reconcile_file(path)
            if number % PAGE_ENTRIES == 0:
                yield
        self.index.shrink(self.payload_bytes, self._unlink)

    def _reconcile_entry(self, entry: Entry) -> None:
        """Remove an entry without a file, and what a writer that was killed has left half done."""
        if entry.owner is not None:
            gone = not is_alive(entry.owner)
        else:  # unless somebody has just removed both
            gone = not self._path(entry.key).is_file() and self.index.get(entry.key) is not None
            self.counts.missing_blocks += gone
        if gone:
            self._forget([entry.key])

    def _reconcile_file(self, path: Path) -> None:
        """Remove what a dead writer has left; take in a block that nobody knows, or remove it."""
        if path.parent == self._aside:
            if not is_alive(path.name.partition(".")[2]):
                path.unlink(missing_ok=True)
        elif self._entry_of(path) is None:
            self.index.adopt(_entries([path]))
            if self._entry_of(path) is None:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    # ---- parts

    def _open_index(self) -> Index:
        """Open the index; one that is damaged is made anew from the headers of the files."""
        file = self._folder / INDEX_NAME
        old_mask = os.umask(0o077)  # SQLite makes its files as others would
        try:
            with _alone(self._folder / "lock"):
                try:
                    index = Index(file)
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError as error:
                    logger.warning("the index %s is damaged and made anew: %s", file, error)
                    for damaged in self._folder.glob(f"{INDEX_NAME}*"):
                        damaged.unlink(missing_ok=True)
                    index = Index(file)
                if not len(index):
                    index.adopt(_entries(self._blocks.rglob(f"*{SUFFIX}")))
                return index
        finally:
            os.umask(old_mask)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._blocks / name[:2] / (name + SUFFIX)

    def _files(self) -> Iterator[Path]:
        for folder in (self._aside, *_listed(self._blocks)):
            yield from (path for path in _listed(folder) if path.is_file())

    def _entry_of(self, path: Path) -> Entry | None:
        """Return the entry whose file this is."""
        try:
            key = bytes.fromhex(path.name.removesuffix(SUFFIX))
        except ValueError:
            return None
        return self.index.get(key) if path == self._path(key) else None

    def _unlink(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)

    def _forget(self, keys: Sequence[bytes]) -> None:
        self.index.remove(keys, self._unlink)

    def _put(self, key: bytes, raw: bytes) -> None:
        """Write a file aside, sync it, and give it its name."""
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        aside = self._aside / f"{key.hex()}.{self._owner}"
        try:
            with os.fdopen(os.open(aside, FLAGS, 0o600), "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def _get(self, key: bytes) -> Record | None:
        """Read a block as a record; None is a miss."""

        def read(descriptor: int) -> tuple[Record, dict[str, str]]:
            raw = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            return decode(raw), header(raw)

        found = self._read(key, read)
        return None if found is None else found[0]

    def _restore(self, key: bytes, targets: Mapping[str, Target]) -> bool:
        """Read a block to where it belongs; False is a miss."""
        return self._read(key, lambda file: (True, read_into(file, targets))) is not None

    def _read(
        self, key: bytes, read: Callable[[int], tuple[T, dict[str, str]]]
    ) -> tuple[T, dict[str, str]] | None:
        """Read a block's file, whose words must be its own; one that is damaged is removed."""
        entry = self.index.get(key)
        if entry is None or entry.owner is not None or entry.fingerprint != self.fingerprint:
            return None
        began = time.perf_counter()
        try:
            with self._path(key).open("rb", buffering=0) as file:
                found = read(file.fileno())
            words = found[1]
            if (words["key"], words["fingerprint"]) != (key.hex(), self.fingerprint):
                raise Damaged("it is another block")
        except FileNotFoundError:
            self.counts.missing_blocks += 1
            self._forget([key])
            return None
        except Damaged:
            self.counts.damaged_blocks += 1
            self._forget([key])
            return None
        self.counts.read_blocks += 1
        self.counts.read_bytes += entry.nbytes
        self.counts.read_seconds += time.perf_counter() - began
        return found


def _read_ahead(descriptor: int) -> None:
    """Have the system read a file into its own memory, where it can be told to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)


def _listed(folder: Path) -> list[Path]:
    """List a folder; one that is none, or is gone by now, is empty."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Be the only process that opens an index; wait for others as long as the index does."""
    until = time.monotonic() + BUSY_SECONDS
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise sqlite3.OperationalError("another process opens the index") from None
                time.sleep(LOCK_LOOK_SECONDS)
        yield


def _entries(paths: Iterable[Path]) -> Iterator[Entry]:
    """Read what the headers of files say; files that are no blocks are passed over."""
    for path in paths:
        try:
            stat = path.stat()
            with path.open("rb") as file:
                size = file.read(8)
                words = header(size + file.read(min(int.from_bytes(size, "little"), stat.st_size)))
            yield Entry(
                key=bytes.fromhex(words["key"]),
                fingerprint=words["fingerprint"],
                parent=bytes.fromhex(words["parent"]),
                depth=int(words["depth"]),
                nbytes=stat.st_size,
                hits=0,
                used=0,
                written_seconds=stat.st_mtime,
                owner=None,
            )
        except (OSError, KeyError, ValueError):
            continue


def _sync_folder(folder: Path) -> None:
    """Make a rename last, where folders can be synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
