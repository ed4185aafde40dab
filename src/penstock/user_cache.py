"""The user's cache folder, for files that penstock can recreate or download again."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/penstock`, by default `~/.cache/penstock`, which may not exist.

    Raises RuntimeError if the variable is not set and there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def is_private(folder: Path) -> bool:
    """Return whether no other user can write to a folder from which code is loaded."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & 0o022
