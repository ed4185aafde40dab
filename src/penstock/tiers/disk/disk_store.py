"""Store of blocks in a folder, verified when read, within a limit shared by all processes.

    write   claim in the index (makes room) -> temporary file -> sync -> rename -> written
    read    index -> file -> into the buffers -> hash check, or a counted miss

A damaged record is a miss, and is removed. An error of the folder itself is an `OSError`, after
which the worker switches the tier off.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.kv.block_spans import Spans
from penstock.memory.sizes import format_bytes
from penstock.prefix.block_hashes import checkpoint_hash, hash_blocks, is_hash_of
from penstock.tiers.disk.block_files import (
    SUFFIX,
    Writer,
    block_file,
    block_path,
    file_size,
    listed,
    opened,
    read_ahead,
    read_entries,
    remove_file,
    sync_folder,
)
from penstock.tiers.disk.index import (
    BUSY_SECONDS,
    PAGE_ENTRIES,
    Claim,
    Entry,
    Index,
    end_writer,
    is_alive,
    is_damage,
    new_writer,
)
from penstock.tiers.disk.limits import payload_bytes
from penstock.tiers.record import (
    FORMAT,
    ArrayPart,
    Damaged,
    FileSource,
    Record,
    Target,
    encode,
    read_from,
    read_parts,
    read_tokens,
)
from penstock.tiers.store import Store

logger = logging.getLogger(__name__)

INDEX_NAME = "index.sqlite"
BLOCKS_NAME = "blocks"
ASIDE_NAME = "aside"
LOCK_NAME = "lock"
FLOOR_BYTES = 1_000_000_000
"""Minimum bytes of free disk space to leave."""
READ_SECONDS = 10.0
"""Maximum seconds that `close` waits for reads."""
LOCK_LOOK_SECONDS = 0.02

Written: TypeAlias = Claim | Literal["disk"]
"""Outcome of a write: a `Claim`, or `disk` if too little disk space is free."""


class SSDStore(Store):
    """Store of one model's blocks, in a folder that other processes and models may share.

    Not thread-safe: used only by the tier's thread.

    Args:
        folder: folder of the blocks; created if missing, accessible only to its owner.
        limit_bytes: limit for all files in the folder, including unfinished ones and the index.
        fingerprint: identifies everything besides the tokens that KV depends on.
        floor_bytes: bytes of disk space to leave free.
        budget_bytes: bytes that all processes may write per day; None means no limit.
        spans: numbers of blocks that are stored in one record.

    Raises:
        OSError: the folder cannot be created or written to.
        sqlite3.OperationalError: another process holds the index for too long.
        ValueError: the limit is too small for an index.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        fingerprint: str,
        floor_bytes: int = FLOOR_BYTES,
        budget_bytes: int | None = None,
        spans: Spans = Spans(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(fingerprint, "ssd", spans)
        self.limit_bytes = limit_bytes
        self.payload_bytes = payload_bytes(limit_bytes)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self._folder = folder / FORMAT
        self._blocks = self._folder / BLOCKS_NAME
        self._aside = self._folder / ASIDE_NAME
        for directory in (folder, self._folder, self._blocks, self._aside):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._used: list[bytes] = []
        self._writer = Writer()
        self.index = self._open_index()
        self._owner = new_writer()
        self._has_space(0)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes

    def _first(self, block_hashes: Sequence[bytes]) -> int:
        return self.index.held(block_hashes, self.fingerprint)

    def _last(self, block_hashes: Sequence[bytes]) -> int:
        last = self.index.deepest(block_hashes, self.fingerprint)
        return 0 if last is None else last + 1

    def chains(self, most_bytes: int) -> list[list[bytes]]:
        entries = [
            entry
            for entry in self.index.entries()
            if entry.owner is None
            and entry.fingerprint == self.fingerprint
            and entry.key != checkpoint_hash(entry.parent)
        ]
        by_key = {entry.key: entry for entry in entries}
        chains: list[list[bytes]] = []
        covered: set[bytes] = set()
        for entry in sorted(entries, key=lambda entry: (-entry.used, -entry.depth)):
            if entry.key in covered:
                continue
            chain = [entry]
            while (parent := by_key.get(chain[-1].parent)) is not None:
                chain.append(parent)
            most_bytes -= sum(link.nbytes for link in chain if link.key not in covered)
            if most_bytes < 0:
                break
            covered.update(link.key for link in chain)
            if chain[-1].depth == 0:  # otherwise the chain could not be read
                chains.append(self._block_keys(chain[::-1]))
        return chains

    def _block_keys(self, chain: Iterable[Entry]) -> list[bytes]:
        """Return the hashes of all blocks in a chain's records, up to the first invalid one."""
        block_hashes: list[bytes] = []
        for entry in chain:
            try:
                with opened(self._path(entry.key)) as file:
                    tokens, blocks = read_tokens(FileSource(file))
            except (FileNotFoundError, Damaged):
                break
            if not is_hash_of(entry.key, entry.parent, tokens, blocks):
                break
            block_hashes += hash_blocks(tokens, len(tokens) // blocks, entry.parent)
        return block_hashes

    def write(self, record: Record) -> Written:
        """Write a record unless present; evict the least valuable and those it replaces."""
        if self.index.get(record.key) is not None:
            self.index.touch(record.key)
            self.counts.known_blocks += 1
            return "known"
        written = self._keep(record, encode(record, self.fingerprint), self.fingerprint)
        if written == "claimed" and record.replaces:
            self.index.remove_ends(record.replaces, self._unlink)
        return written

    def take(self, record: Record, raw: bytes, fingerprint: str) -> Written:
        """Write a verified block file of any model, unchanged, unless present; see `write`."""
        if self.index.get(record.key) is not None:
            self.counts.known_blocks += 1
            return "known"
        return self._keep(record, raw, fingerprint)

    def _keep(self, record: Record, raw: bytes, fingerprint: str) -> Written:
        if not self.index.is_current:
            raise OSError(f"the index of {self._folder} was removed or rebuilt by another process")
        if not self._has_space(len(raw)):
            self.counts.refused_blocks += 1
            return "disk"
        entry = Entry(
            key=record.key,
            fingerprint=fingerprint,
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
            if claim == "budget" and self.budget_bytes is not None:
                self.full = (
                    f"the daily write limit of {format_bytes(self.budget_bytes)} is "
                    f"used up: raise --ssd-write-budget, or wait for midnight UTC"
                )
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

    def prepare(
        self, block_hashes: Sequence[bytes], known: int = 0, *, resumable: bool = False
    ) -> int:
        """See `Store.prepare`; also has the system read the files ahead."""
        count = self.held(block_hashes, resumable=resumable)
        ends = [*self.spans.ends(count), count] if count else []
        self._used += [block_hashes[end - 1] for end in dict.fromkeys(ends)]
        ahead = [block_hashes[end - 1] for end in dict.fromkeys(ends) if end > known]
        if resumable and count:
            ahead.append(checkpoint_hash(block_hashes[count - 1]))
            self._used.append(ahead[-1])
        for key in ahead:
            with suppress(OSError, Damaged), opened(self._path(key)) as file:
                read_ahead(file)
        return count

    def note_uses(self) -> None:
        if self._used:
            used, self._used = self._used, []
            self.index.use(used)

    def clear(self, *, all_models: bool = True) -> int:
        block_hashes = [
            entry.key
            for entry in self.index.entries()
            if entry.owner is None and (all_models or entry.fingerprint == self.fingerprint)
        ]
        self._forget(block_hashes)
        return len(block_hashes)

    def reconcile(self) -> None:
        """Make index and files consistent, after a crash or manual removal of files."""
        for _ in self.reconciling():
            pass

    def reconciling(self) -> Iterator[None]:
        """Reconcile index and files, yielding periodically to let others use the store."""
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
        """Remove an entry whose file is missing, has the wrong size, or is of a dead writer."""
        if entry.owner is not None:
            gone = not is_alive(entry.owner)
        else:  # unless another process has just removed or rewritten the block
            size = file_size(self._path(entry.key))
            gone = size != entry.nbytes and self.index.get(entry.key) == entry
            self.counts.missing_blocks += gone and size is None
            self.counts.damaged_blocks += gone and size is not None
        if gone:
            self._forget([entry.key])

    def _reconcile_file(self, path: Path) -> None:
        """Remove a dead writer's file; index a block that the index lacks, or remove it."""
        if path.parent == self._aside:
            if not is_alive(path.name.partition(".")[2]):
                remove_file(path)
        elif self._entry_of(path) is None:
            self.index.adopt(
                entry for entry in read_entries([path]) if path == self._path(entry.key)
            )
            if self._entry_of(path) is None:
                remove_file(path)

    def close(self) -> None:
        try:
            self.note_uses()
        finally:
            self._end()

    def abandon(self, error: Exception) -> None:
        """Close after an error; remove a damaged index, so that it is rebuilt."""
        self._end()
        if is_damage(error) and self.index.is_current:
            with suppress(OSError, sqlite3.Error), _alone(self._folder / LOCK_NAME):
                self._remove_index(error)

    def _end(self) -> None:
        self._readers.close(READ_SECONDS)
        self.index.close()
        end_writer(self._owner)

    def _has_space(self, nbytes: int) -> bool:
        """Return whether a file of `nbytes` leaves enough disk space free; sets `full`."""
        free = shutil.disk_usage(self._folder).free
        self.full = None
        if free - nbytes < self.floor_bytes:
            self.full = (
                f"the disk of {self._folder.parent} has {format_bytes(free)} free, and "
                f"{format_bytes(self.floor_bytes)} are always left free: free some space, or name "
                f"another folder"
            )
        return self.full is None

    def _open_index(self) -> Index:
        file = self._folder / INDEX_NAME
        old_mask = os.umask(0o077)  # SQLite creates its files with default permissions
        try:
            with _alone(self._folder / LOCK_NAME):
                try:
                    index = Index(file)
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    self._remove_index(error)
                    index = Index(file)
                if not len(index):
                    index.adopt(read_entries(self._blocks.rglob(f"*{SUFFIX}")))
                return index
        finally:
            os.umask(old_mask)

    def _remove_index(self, error: Exception) -> None:
        logger.warning("the index of %s is damaged and will be rebuilt: %s", self._folder, error)
        for damaged in self._folder.glob(f"{INDEX_NAME}*"):
            damaged.unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return block_file(self._blocks, key)

    def _files(self) -> Iterator[Path]:
        for folder in (self._aside, self._blocks, *listed(self._blocks)):
            yield from (path for path in listed(folder) if path.is_file())

    def _entry_of(self, path: Path) -> Entry | None:
        try:
            key = bytes.fromhex(path.name.removesuffix(SUFFIX))
        except ValueError:
            return None
        return self.index.get(key) if path == self._path(key) else None

    def _unlink(self, key: bytes) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):
            if not path.is_dir():
                raise
            shutil.rmtree(path)  # a folder with the name of a block file
        except NotADirectoryError:
            return

    def _forget(self, block_hashes: Sequence[bytes]) -> None:
        self.index.remove(block_hashes, self._unlink)

    def _put(self, key: bytes, raw: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        aside = self._aside / f"{key.hex()}.{self._owner}"
        try:
            self._writer.write(aside, raw)
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)
        sync_folder(path.parent)

    def _read_into(self, key: bytes, targets: Mapping[str, Target]) -> int:
        with opened(self._path(key)) as file:
            words = read_from(FileSource(file), targets)
            self._check_is(words, key)
            return os.fstat(file).st_size

    def read_parts(self, key: bytes, parts: Sequence[ArrayPart]) -> list[NDArray[np.uint8]]:
        with opened(block_path(str(self._blocks), key)) as file:
            return read_parts(FileSource(file), parts)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock for opening the index; waits up to `BUSY_SECONDS` for other processes."""
    until = time.monotonic() + BUSY_SECONDS
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise sqlite3.OperationalError("another process is opening the index") from None
                time.sleep(LOCK_LOOK_SECONDS)
        yield
