"""Index of a folder of blocks, with their sizes and eviction order.

SQLite in WAL mode, shared by all processes that use the folder. Each change is one transaction, so
the sum of all bytes, including those of unfinished files, never exceeds the limit. Recency is
measured in uses, not in seconds, so clock changes do not matter.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import log2
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

BUSY_SECONDS = 5.0
"""Seconds that a transaction waits for the lock of another process."""
WORTH_OF_A_HIT = 256.0
"""Increase of a block's value, in uses, when its hits double."""
KEYS_AT_ONCE = 500
PAGE_ENTRIES = 256
Unlink: TypeAlias = Callable[[bytes], None]
"""Callback that removes a block's file if it exists."""
Claim: TypeAlias = Literal["claimed", "known", "full", "orphan", "budget"]
"""Result of a request to write a block. claimed: write it now. known: it is present or being
written. full: it does not fit. orphan: its parent is missing, so it could not be restored. budget:
the daily write limit is exhausted."""
DAY_SECONDS = 86_400
REMEMBERED_DAYS = 30
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    parent BLOB NOT NULL,
    depth INTEGER NOT NULL CHECK (depth >= 0),
    nbytes INTEGER NOT NULL CHECK (nbytes BETWEEN 0 AND 1 << 40),
    hits INTEGER NOT NULL DEFAULT 0 CHECK (hits BETWEEN 0 AND 1 << 50),
    used INTEGER NOT NULL CHECK (used BETWEEN 0 AND 1 << 50),
    worth REAL NOT NULL,
    written_seconds REAL NOT NULL,
    owner TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_worth ON blocks (worth, depth DESC);
CREATE INDEX IF NOT EXISTS by_parent ON blocks (parent);
CREATE TABLE IF NOT EXISTS sums (nbytes INTEGER NOT NULL, uses INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS days (day INTEGER PRIMARY KEY, nbytes INTEGER NOT NULL) STRICT;
INSERT INTO sums SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM sums);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON blocks
    BEGIN UPDATE sums SET nbytes = nbytes + NEW.nbytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON blocks
    BEGIN UPDATE sums SET nbytes = nbytes - OLD.nbytes; END;
"""

_RECOUNT = """
UPDATE sums SET nbytes = counted.nbytes, uses = counted.uses
    FROM (
        SELECT ifnull(sum(nbytes), 0) AS nbytes, ifnull(max(used), 0) AS uses FROM blocks
    ) AS counted
    WHERE sums.nbytes != counted.nbytes OR sums.uses NOT BETWEEN counted.uses AND 1 << 50
"""
"""Statement that corrects the sums of an inconsistent index when it is opened."""

_LEAST = """
SELECT key, nbytes FROM blocks WHERE owner IS NULL AND key != ?
    AND NOT EXISTS (SELECT 1 FROM blocks AS child WHERE child.parent = blocks.key)
    ORDER BY worth, depth DESC LIMIT 1
"""


_FORGET_DAYS = """
DELETE FROM days WHERE day NOT IN (SELECT day FROM days ORDER BY abs(day - ?) LIMIT ?)
"""
"""Statement that keeps the days nearest to today, so that a temporary clock jump loses nothing."""


class _Full(Exception):
    """Raised if a block does not fit even after evicting all other blocks."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: bytes
    fingerprint: str
    parent: bytes
    depth: int
    nbytes: int
    hits: int
    used: int
    """Sequence number of the last use, counted over all blocks."""
    written_seconds: float
    """Seconds since 1970."""
    owner: str | None
    """Name of the writer while the file is being written; None once it is complete."""


_COLUMNS = ", ".join(Entry.__dataclass_fields__)


class Index:
    """A process's connection to the index. Not thread-safe: used only by the tier's thread.

    Raises sqlite3.DatabaseError if the file is not an index or is damaged.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._db = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)
        self._db.text_factory = _text
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.create_function("log2", 1, log2, deterministic=True)
            with self._writing():
                for statement in _statements(_SCHEMA):
                    self._db.execute(statement)
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            with self._writing():
                self._db.execute(_RECOUNT)
            self._same = _identity(file)
        except BaseException:
            self._db.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._number("SELECT nbytes FROM sums")

    @property
    def is_current(self) -> bool:
        """Whether the opened index file is still in place, not removed or rebuilt."""
        return _identity(self._file) == self._same

    @property
    def uses(self) -> int:
        return self._number("SELECT uses FROM sums")

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM blocks").fetchone()[0])

    def written_bytes(self, day: int) -> int:
        row = self._db.execute("SELECT nbytes FROM days WHERE day = ?", (day,)).fetchone()
        return 0 if row is None else int(row[0])

    def get(self, key: bytes) -> Entry | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM blocks WHERE key = ?", (key,)).fetchone()
        return None if row is None else Entry(*row)

    def entries(self) -> Iterator[Entry]:
        query = f"SELECT {_COLUMNS} FROM blocks ORDER BY worth DESC, depth"
        return (Entry(*row) for row in self._db.execute(query).fetchall())

    def pages(self) -> Iterator[list[Entry]]:
        """Yield all entries in pages, ordered by key; concurrent changes may be missed."""
        after = b""
        query = f"SELECT {_COLUMNS} FROM blocks WHERE key > ? ORDER BY key LIMIT {PAGE_ENTRIES}"
        while page := [Entry(*row) for row in self._db.execute(query, (after,))]:
            yield page
            after = page[-1].key

    def held(self, block_hashes: Sequence[bytes], fingerprint: str) -> int:
        """Return the number of a chain's leading blocks that are completely written."""
        count = 0
        for start in range(0, len(block_hashes), KEYS_AT_ONCE):
            batch = block_hashes[start : start + KEYS_AT_ONCE]
            present = self._found(batch, fingerprint)
            for key in batch:
                if key not in present:
                    return count
                count += 1
        return count

    def deepest(self, block_hashes: Sequence[bytes], fingerprint: str) -> int | None:
        """Return the index of the last block that is completely written; None if there is none."""
        for start in reversed(range(0, len(block_hashes), KEYS_AT_ONCE)):
            batch = block_hashes[start : start + KEYS_AT_ONCE]
            present = self._found(batch, fingerprint)
            for place in reversed(range(len(batch))):
                if batch[place] in present:
                    return start + place
        return None

    def _found(self, block_hashes: Sequence[bytes], fingerprint: str) -> set[bytes]:
        query = (
            f"SELECT key FROM blocks WHERE key IN ({', '.join('?' * len(block_hashes))}) "
            "AND fingerprint = ? AND owner IS NULL"
        )
        return {row[0] for row in self._db.execute(query, (*block_hashes, fingerprint))}

    def claim(
        self, entry: Entry, limit_bytes: int, unlink: Unlink, budget_bytes: int | None = None
    ) -> Claim:
        """Add an entry for a block to write, making room; its bytes count for the daily budget.

        Args:
            entry: entry of the block.
            limit_bytes: limit of the folder.
            unlink: removes the files of evicted blocks.
            budget_bytes: maximum bytes written per day; None for no limit.
        """
        day = int(entry.written_seconds // DAY_SECONDS)
        with suppress(_Full), self._writing():
            if self._knows(entry.key):
                return "known"
            if entry.depth and not self._knows(entry.parent):
                return "orphan"
            if budget_bytes is not None and self.written_bytes(day) + entry.nbytes > budget_bytes:
                return "budget"
            self._make_room(entry.nbytes, limit_bytes, unlink, keep=entry.parent)
            used = self._next_use()
            row = {**_fields(entry), "used": used, "worth": float(used)}
            names = ", ".join(row)
            places = ", ".join(f":{name}" for name in row)
            self._db.execute(f"INSERT INTO blocks ({names}) VALUES ({places})", row)
            self._db.execute(
                "INSERT INTO days VALUES (:day, :nbytes) "
                "ON CONFLICT (day) DO UPDATE SET nbytes = nbytes + :nbytes",
                {"day": day, "nbytes": entry.nbytes},
            )
            self._db.execute(_FORGET_DAYS, (day, REMEMBERED_DAYS))
            return "claimed"
        return "full"

    def adopt(self, entries: Iterable[Entry]) -> None:
        """Add entries of existing files unless already present."""
        names = list(Entry.__dataclass_fields__)
        with self._writing():
            self._db.executemany(
                f"INSERT OR IGNORE INTO blocks ({', '.join(names)}, worth) "
                f"VALUES ({', '.join(f':{name}' for name in names)}, :used)",
                (_fields(entry) for entry in entries),
            )

    def written(self, key: bytes) -> None:
        with self._writing():
            self._db.execute("UPDATE blocks SET owner = NULL WHERE key = ?", (key,))

    def touch(self, key: bytes) -> None:
        with self._writing():
            used = self._next_use()
            self._db.execute(
                "UPDATE blocks SET worth = worth + :used - used, used = :used WHERE key = :key",
                {"used": used, "key": key},
            )

    def use(self, block_hashes: Sequence[bytes]) -> None:
        with self._writing():
            used = self._next_use()
            self._db.executemany(
                "UPDATE blocks SET used = :used, worth = :used + :hit * log2(hits + 2), "
                "hits = hits + 1 WHERE key = :key",
                [{"used": used, "hit": WORTH_OF_A_HIT, "key": key} for key in block_hashes],
            )

    def remove(self, block_hashes: Sequence[bytes], unlink: Unlink) -> None:
        with self._writing():
            self._remove(block_hashes, unlink)

    def remove_ends(self, block_hashes: Sequence[bytes], unlink: Unlink) -> None:
        with self._writing():
            query = "SELECT 1 FROM blocks WHERE parent = ? LIMIT 1"
            ends = [
                key for key in block_hashes if self._db.execute(query, (key,)).fetchone() is None
            ]
            written = [key for key in ends if (entry := self.get(key)) and entry.owner is None]
            self._remove(written, unlink)

    def remove_if(
        self, block_hashes: Sequence[bytes], is_wanted: Callable[[Entry], bool], unlink: Unlink
    ) -> list[Entry]:
        """Remove the blocks that `is_wanted` selects, and their files; return their entries.

        `is_wanted` is called under the write lock, so that files and index are consistent.
        """
        with self._writing():
            entries = [entry for key in block_hashes if (entry := self.get(key)) is not None]
            gone = [entry for entry in entries if is_wanted(entry)]
            self._remove([entry.key for entry in gone], unlink)
            return gone

    def shrink(self, limit_bytes: int, unlink: Unlink) -> bool:
        """Evict the least valuable blocks down to a limit; False if unfinished ones exceed it."""
        with suppress(_Full), self._writing():
            self._make_room(0, limit_bytes, unlink)
            return True
        return False

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the index's write lock against all processes, in one transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _knows(self, key: bytes) -> bool:
        query = "SELECT 1 FROM blocks WHERE key = ?"
        return self._db.execute(query, (key,)).fetchone() is not None

    def _next_use(self) -> int:
        self._db.execute("UPDATE sums SET uses = uses + 1")
        return self.uses

    def _number(self, query: str) -> int:
        row = self._db.execute(query).fetchone()
        if row is None or not isinstance(row[0], int):
            raise sqlite3.DatabaseError("the index has no sums")
        return row[0]

    def _make_room(self, nbytes: int, limit_bytes: int, unlink: Unlink, keep: bytes = b"") -> None:
        over = self.nbytes + nbytes - limit_bytes
        gone: list[bytes] = []
        while over > 0:
            row = self._db.execute(_LEAST, (keep,)).fetchone()
            if row is None:
                raise _Full
            key, size = row
            self._db.execute("DELETE FROM blocks WHERE key = ?", (key,))
            gone.append(key)
            over -= size
        # Files are removed before the transaction ends, when other processes may use their bytes. A
        # process killed in between leaves entries without a file, which the next read detects.
        for key in gone:
            unlink(key)

    def _remove(self, block_hashes: Sequence[bytes], unlink: Unlink) -> None:
        for key in block_hashes:
            unlink(key)
        self._db.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in block_hashes])


def is_damage(error: BaseException) -> bool:
    """Return whether an error means that the index itself is damaged.

    A failing, full or read-only disk, or another process's lock, is not damage.
    """
    code = getattr(error, "sqlite_errorcode", None)
    wrong = code is None or code & 0xFF in _DAMAGE
    return isinstance(error, sqlite3.DatabaseError) and wrong


_DAMAGE = {
    sqlite3.SQLITE_ERROR,  # a missing table or column
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
}
_numbers = count()
_writers: set[str] = set()
"""Names of this process's open writers, one per open store."""


def new_writer() -> str:
    """Return a unique name for a writer of this process, alive until `end_writer`."""
    name = f"{this_process()}+{next(_numbers)}"
    _writers.add(name)
    return name


def end_writer(name: str) -> None:
    _writers.discard(name)


def is_alive(owner: str) -> bool:
    """Return whether the writer with this name is alive; False for an empty name."""
    process, _, _ = owner.partition("+")
    if process == this_process():
        return owner in _writers
    number = process.partition("@")[0]
    return number.isascii() and number.isdecimal() and _process(int(number)) == process


def this_process() -> str:
    """Return a unique name of this process, from its id and start time."""
    return _process(os.getpid()) or f"{os.getpid()}@"


def _process(number: int) -> str | None:
    """Return the unique name of a running process; None if it does not run.

    On Linux the start time is relative to boot, which clock changes do not affect.
    """
    if sys.platform == "linux":
        try:
            words = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if words[0] in "ZX" else f"{number}@{words[19]}"
    try:
        process = psutil.Process(number)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{number}@{process.create_time():.2f}"
    except (psutil.Error, OverflowError):
        return None


def _identity(file: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        stat = file.stat()
        return stat.st_dev, stat.st_ino
    return None


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _fields(entry: Entry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Entry.__dataclass_fields__}


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
