"""Measured step peaks in the user's cache folder, for the next start with the same model."""

from __future__ import annotations

from dataclasses import asdict

from penstock.engine.model.remembered_file import RememberedFile
from penstock.engine.model.step_peaks import StepPeaks

MOST_FILE_BYTES = 10_000


class RememberedPeaks(RememberedFile):
    """The file of a model's peaks.

    Args:
        identity: text of all that the peaks depend on, besides the machine and the code.
    """

    def __init__(self, identity: str) -> None:
        super().__init__("steps", identity, MOST_FILE_BYTES)

    def read(self) -> StepPeaks | None:
        """Return the peaks measured before; None without a valid file."""
        values = self.read_values()
        return None if values is None else StepPeaks(**values)

    def write(self, peaks: StepPeaks) -> None:
        """Write a file that only its owner can read; without a writable folder, do nothing."""
        self.write_values(asdict(peaks))
