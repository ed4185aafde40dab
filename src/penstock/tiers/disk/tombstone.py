"""Pending deletions, recorded across restarts of the process.

A small file records whether to remove one model's blocks or all. It is in the folder of the blocks,
or next to it if the folder is not writable. A tier that finds it first clears the folder.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from penstock.tiers.record import FORMAT

PREFIX = "cleared-"
"""Prefix of the file names."""
ALL, OWN = "all models", "one model"


class Tombstone:
    """Record of a pending deletion of one model's blocks. Thread-safe."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        name = PREFIX + hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self.places = (folder / FORMAT / name, folder.with_name(f".{folder.name}-{name}"))

    def place(self, *, all_models: bool) -> None:
        """Record a deletion; raises OSError if neither path is writable."""
        inside, beside = self.places
        words = ALL if all_models else OWN
        try:
            inside.write_text(words)
        except OSError:
            beside.write_text(words)

    def read(self) -> bool | None:
        """Return True to remove all models' blocks, False for only this model's, None for none."""
        words = []
        for path in self.places:
            with suppress(OSError, UnicodeDecodeError):
                words.append(path.read_text())
        return any(word == ALL for word in words) if words else None

    def remove(self) -> None:
        for path in self.places:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
