"""The user's cache folder, for files that penstock can recreate or download again."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

MOST_FILES = 200
"""Maximum number of files that `write_private` keeps in a folder; the oldest are removed."""


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/penstock`, by default `~/.cache/penstock`, which may not exist.

    Raises RuntimeError if the variable is not set and there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def is_private(folder: Path) -> bool:
    """Return whether a folder belongs to this user and no other user can write to it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & 0o022


def write_private(file: Path, content: bytes) -> None:
    """Atomically write a file readable only by its owner; do nothing unless the folder is private.

    Threads and processes may write the same file concurrently; one of the contents remains.
    """
    folder = file.parent
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            return
        part = folder / f"{os.urandom(8).hex()}.part"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o600), "wb") as stream:
                stream.write(content)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)
