"""Access for tools to an existing folder of blocks of all models, which servers may be using.

Changes are split into short transactions, so that servers that use the folder do not wait longer
than for each other.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.errors import CacheFileError, SettingError
from penstock.tiers.disk.block_files import block_file, listed
from penstock.tiers.disk.disk_store import ASIDE_NAME, BLOCKS_NAME, INDEX_NAME, LOCK_NAME
from penstock.tiers.disk.index import DAY_SECONDS, PAGE_ENTRIES, Entry, Index, is_alive, is_damage
from penstock.tiers.disk.tombstone import PREFIX
from penstock.tiers.record import FORMAT

FORMATS = "penstock-block-"
"""Common prefix of the folder names of all format versions."""
SHOWN_CHARACTERS = 12
"""Number of leading characters shown of hashes and fingerprints."""
Progress: TypeAlias = Callable[[int], None]
"""Callback that receives the number of bytes processed since the last call."""


class IndexDamaged(CacheFileError):
    """The index is missing or unreadable; the blocks may be intact."""


@dataclass(frozen=True, slots=True)
class ModelUsage:
    fingerprint: str
    blocks: int
    nbytes: int
    chains: int
    hits: int
    writing_blocks: int


@dataclass(frozen=True, slots=True)
class FolderUsage:
    models: tuple[ModelUsage, ...]
    """Usage of each model, largest first."""
    index_bytes: int
    written_today_bytes: int
    """Bytes written by all processes since midnight UTC, including files removed since."""
    writing_files: int
    left_over_files: int
    """Unfinished files of dead writers, removed by the next process that opens the folder."""
    other_formats: tuple[str, ...]
    """Folders of other format versions, which are ignored."""
    other_format_bytes: int
    foreign: int
    """Number of unrelated files and folders, which are ignored."""
    disk_free_bytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    blocks: int
    nbytes: int
    held_bytes: int


class Folder:
    """Context manager for the blocks of all models in a folder. Not thread-safe.

    Raises:
        SettingError: the folder does not exist, or is not one of the cold tier.
        IndexDamaged: the index is missing or damaged.
        OSError, sqlite3.OperationalError: the folder is unreadable, or the index is locked.
    """

    def __init__(self, path: Path) -> None:
        check_is_ours(path)
        self.path = path
        self.blocks = path / FORMAT / BLOCKS_NAME
        self.aside = path / FORMAT / ASIDE_NAME
        index = path / FORMAT / INDEX_NAME
        remedy = "penstock cache verify --repair rebuilds it"
        if not index.is_file():  # opening would create it
            raise IndexDamaged(f"the index of {path} is missing; {remedy}")
        try:
            self.index = Index(index)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            raise IndexDamaged(f"the index of {path} is damaged ({error}); {remedy}") from None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.index.close()

    def file(self, key: bytes) -> Path:
        return block_file(self.blocks, key)

    def files(self) -> Iterator[Path]:
        for folder in sorted(listed(self.blocks)):
            yield from (path for path in sorted(listed(folder)) if path.is_file())

    def files_aside(self) -> Iterator[tuple[Path, bool]]:
        for path in sorted(listed(self.aside)):
            yield path, is_alive(path.name.partition(".")[2])

    def entries(self, fingerprint: str | None = None) -> list[Entry]:
        entries = self.index.entries()
        return [entry for entry in entries if fingerprint in (None, entry.fingerprint)]

    def model(self, prefix: str) -> str:
        """Return the fingerprint that starts with `prefix`; raises SettingError unless unique."""
        if not prefix:
            raise SettingError("--model needs the beginning of a fingerprint; ls shows them")
        known = {entry.fingerprint for entry in self.index.entries()}
        matches = sorted(fingerprint for fingerprint in known if fingerprint.startswith(prefix))
        if not matches:
            names = ", ".join(map(shown, sorted(known))) or "none"
            raise SettingError(
                f"--model {prefix}: no fingerprint starts with it; there are: {names}"
            )
        if len(matches) > 1:
            names = ", ".join(shown(fingerprint, 2 * SHOWN_CHARACTERS) for fingerprint in matches)
            raise SettingError(f"--model {prefix}: several fingerprints start with it: {names}")
        return matches[0]

    def usage(self) -> FolderUsage:
        others, foreign = self._others()
        aside = [alive for _, alive in self.files_aside()]
        index = self.blocks.with_name(INDEX_NAME)
        return FolderUsage(
            models=_models(self.entries()),
            index_bytes=_sizes(index.parent.glob(f"{INDEX_NAME}*")),
            written_today_bytes=self.index.written_bytes(int(time.time() // DAY_SECONDS)),
            writing_files=sum(aside),
            left_over_files=len(aside) - sum(aside),
            other_formats=tuple(sorted(other.name for other in others)),
            other_format_bytes=_sizes(path for other in others for path in other.rglob("*")),
            foreign=foreign,
            disk_free_bytes=shutil.disk_usage(self.path).free,
        )

    def shrink(self, limit_bytes: int, progress: Progress) -> Freed:
        """Remove the least valuable finished blocks until the rest is within the limit."""
        blocks = nbytes = 0

        def unlink(key: bytes) -> None:
            nonlocal blocks, nbytes
            path = self.file(key)
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                blocks, nbytes = blocks + 1, nbytes + size
                progress(size)

        while (total_bytes := self.index.nbytes) > limit_bytes:
            step = PAGE_ENTRIES * total_bytes // max(len(self.index), 1)
            if not self.index.shrink(max(limit_bytes, total_bytes - step), unlink):
                break
        return Freed(blocks, nbytes, self.index.nbytes)

    def clear(self, progress: Progress, fingerprint: str | None = None) -> Freed:
        """Remove all blocks, or one model's, except those being written; deepest blocks first."""
        blocks = nbytes = 0
        block_hashes = [
            entry.key
            for entry in sorted(self.entries(fingerprint), key=lambda entry: -entry.depth)
            if entry.owner is None
        ]
        for first in range(0, len(block_hashes), PAGE_ENTRIES):
            gone = self.index.remove_if(
                block_hashes[first : first + PAGE_ENTRIES], _is_there, self.unlink
            )
            size = sum(entry.nbytes for entry in gone)
            blocks, nbytes = blocks + len(gone), nbytes + size
            progress(size)
        return Freed(blocks, nbytes, self.index.nbytes)

    def unlink(self, key: bytes) -> None:
        """Remove a block's file if it exists, but not its index entry."""
        self.file(key).unlink(missing_ok=True)

    def _others(self) -> tuple[list[Path], int]:
        beside = [path for path in sorted(listed(self.path)) if path.name != FORMAT]
        others = [path for path in beside if path.name.startswith(FORMATS) and path.is_dir()]
        ours = {BLOCKS_NAME, ASIDE_NAME, LOCK_NAME}
        inside = [
            path
            for path in sorted(listed(self.path / FORMAT))
            if path.name not in ours and not path.name.startswith((INDEX_NAME, PREFIX))
        ]
        return others, len(beside) - len(others) + len(inside)


def check_is_ours(path: Path) -> None:
    """Raise SettingError if `path` is not a folder of the cold tier."""
    if not path.is_dir():
        raise SettingError(f"--ssd-cache-dir {path}: the folder does not exist")
    if not (path / FORMAT).is_dir():  # created first, so its contents may be missing
        raise SettingError(f"--ssd-cache-dir {path}: this is not a folder of penstock's blocks")


def shown(fingerprint: str, length: int = SHOWN_CHARACTERS) -> str:
    """Return the beginning of a fingerprint, which comes from files, made safe to print.

    >>> shown("0123456789abcdef"), shown("a" + chr(27) + "[2J")
    ('0123456789ab', 'a?[2J')
    """
    return "".join(char if char.isprintable() else "?" for char in fingerprint[:length])


def _models(entries: list[Entry]) -> tuple[ModelUsage, ...]:
    followed = {entry.parent for entry in entries}
    by_model: dict[str, list[Entry]] = {}
    for entry in entries:
        by_model.setdefault(entry.fingerprint, []).append(entry)
    models = [
        ModelUsage(
            fingerprint=fingerprint,
            blocks=len(model_entries),
            nbytes=sum(entry.nbytes for entry in model_entries),
            chains=sum(entry.key not in followed for entry in model_entries),
            hits=sum(entry.hits for entry in model_entries),
            writing_blocks=sum(entry.owner is not None for entry in model_entries),
        )
        for fingerprint, model_entries in by_model.items()
    ]
    return tuple(sorted(models, key=lambda model: (-model.nbytes, model.fingerprint)))


def _is_there(entry: Entry) -> bool:
    return entry.owner is None


def _sizes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += path.lstat().st_size if path.is_file() else 0
    return total
