"""The user's cache folder, for files that penstock can recreate or download again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/penstock`, by default `~/.cache/penstock`, which may not exist.

    Raises RuntimeError if the variable is not set and there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
