"""An unfinished deletion, remembered across restarts of the process.

A small file says whose blocks to remove. It lies in the folder of the blocks, or beside that folder
where it cannot be written to. A tier that finds one clears the folder first.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from penstock.tiers.record import FORMAT

PREFIX = "cleared-"
"""Prefix of the files' names."""
ALL, OWN = "all models", "one model"


class Tombstone:
    """The file of a pending deletion of one model's blocks. Any thread may call it."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        name = PREFIX + hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self.places = (folder / FORMAT / name, folder.with_name(f".{folder.name}-{name}"))
        """Paths of the file: in the folder, and beside it."""

    def place(self, *, all_models: bool) -> None:
        """Remember a deletion; raises OSError if neither place can be written to."""
        inside, beside = self.places
        words = ALL if all_models else OWN
        try:
            inside.write_text(words)
        except OSError:
            beside.write_text(words)

    def read(self) -> bool | None:
        """Return whether to remove all models' blocks, or this one's; None is nothing."""
        words = []
        for path in self.places:
            with suppress(OSError, UnicodeDecodeError):
                words.append(path.read_text())
        return any(word == ALL for word in words) if words else None

    def remove(self) -> None:
        """Forget a completed deletion; raises OSError if a file cannot be removed."""
        for path in self.places:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
