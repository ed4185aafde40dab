"""Measured step peaks in the user's cache folder, for the next start with the same model.

A file has the peaks of one model's form, settings, machine, and installed code. A file that is
damaged, or of another version, is a miss: the steps are measured again.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from penstock.attention import devices
from penstock.blas import load_blas
from penstock.engine.model.step_peaks import StepPeaks
from penstock.regular_files import read_text
from penstock.user_cache import user_cache, write_private

logger = logging.getLogger(__name__)

VERSION = 1
MOST_FILE_BYTES = 10_000
LIBRARIES = ("mlx", "mlx-lm", "numpy")


class RememberedPeaks:
    """The file of a model's peaks."""

    def __init__(self, identity: str) -> None:
        self._digest = sha256(f"{VERSION} {_code()} {identity}".encode()).hexdigest()

    def read(self) -> StepPeaks | None:
        try:
            content = json.loads(read_text(self._file, MOST_FILE_BYTES))
            values = {field.name: content["peaks"][field.name] for field in fields(StepPeaks)}
            if content["checksum"] != self._checksum(values):
                raise ValueError("its checksum is wrong")
            return StepPeaks(**values)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.debug(
                "cannot use the step measurements in %s.json (%s: %s); measuring again",
                self._digest,
                type(error).__name__,
                error,
            )
            return None

    def write(self, peaks: StepPeaks) -> None:
        """Write a file that only its owner can read; without a writable folder, do nothing."""
        values = asdict(peaks)
        content = {"peaks": values, "checksum": self._checksum(values)}
        with suppress(RuntimeError):  # no home folder
            write_private(self._file, json.dumps(content).encode())

    @property
    def _file(self) -> Path:
        """Path of the file. Raises RuntimeError without a home folder."""
        return user_cache() / "steps" / f"{self._digest}.json"

    def _checksum(self, values: dict[str, float]) -> str:
        return sha256(f"{self._digest} {json.dumps(values, sort_keys=True)}".encode()).hexdigest()


@cache
def _code() -> str:
    """Return the identity of the machine, the libraries, and penstock's own files."""
    root = Path(__file__).parents[2]
    files = [(file, file.stat()) for file in sorted(root.rglob("*.py"))]
    ours = [
        f"{file.relative_to(root)} {about.st_size} {about.st_mtime_ns}" for file, about in files
    ]
    blas = load_blas()
    machine = [platform.node(), devices.device_name(), str(os.cpu_count()), str(blas and blas.name)]
    return "\n".join([*machine, *map(version, LIBRARIES), *ours])
