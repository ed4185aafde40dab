"""Measured step peaks in the user's cache folder, reused at the next start."""

from __future__ import annotations

from dataclasses import asdict

from penstock.engine.model.remembered_file import RememberedFile
from penstock.engine.model.step_peaks import StepPeaks

MOST_FILE_BYTES = 10_000


class RememberedPeaks(RememberedFile):
    """File with the step peaks of a model.

    Args:
        identity: everything that they depend on besides machine and code, as text.
    """

    def __init__(self, identity: str) -> None:
        super().__init__("steps", identity, MOST_FILE_BYTES)

    def read(self) -> StepPeaks | None:
        """Return the peaks of an earlier process; None without a valid file."""
        values = self.read_values()
        return None if values is None else StepPeaks(**values)

    def write(self, peaks: StepPeaks) -> None:
        """Write a file that only its owner can read; do nothing without a writable folder."""
        self.write_values(asdict(peaks))
