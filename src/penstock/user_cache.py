"""The user's folder for files that penstock can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/penstock`, by default `~/.cache/penstock`; it may not exist yet.

    Raises RuntimeError if the variable is not set and there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
