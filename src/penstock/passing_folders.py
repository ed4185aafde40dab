"""Temporary folders that later processes remove if their own process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

PREFIX = "penstock-"
LOCK = ".lock"
"""File that is locked while the folder is in use; the system unlocks it if the process dies."""


@contextmanager
def passing_folder() -> Iterator[Path]:
    """Yield an empty folder that only this user can read, and remove it on exit.

    Folders of killed processes are removed first.
    """
    sweep(Path(gettempdir()))
    folder = Path(mkdtemp(prefix=PREFIX))
    held = os.open(folder / f"{LOCK}-new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / f"{LOCK}-new").rename(folder / LOCK)  # never visible unlocked
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def sweep(place: Path) -> None:
    """Remove this user's folders that ended processes left behind."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and _is_left(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(lock: Path) -> bool:
    held = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(held)
    return True
