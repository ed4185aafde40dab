"""Measurements in the user's cache folder, reused at the next start with the same model.

A file has one measurement, valid for a model, this machine and the installed code. If it is damaged
or of another version, the measurement is repeated.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.attention import devices
from penstock.blas import load_blas
from penstock.regular_files import read_text
from penstock.user_cache import user_cache, write_private

logger = logging.getLogger(__name__)

VERSION = 1
LIBRARIES = ("mlx", "mlx-lm", "numpy")


class RememberedFile:
    """File with one measurement.

    Args:
        folder: folder within the user's cache.
        identity: everything that the measurement depends on besides machine and code, as text.
        most_bytes: maximum size of a valid file.
    """

    def __init__(self, folder: str, identity: str, most_bytes: int) -> None:
        self._folder = folder
        self._digest = sha256(f"{VERSION} {_code()} {identity}".encode()).hexdigest()
        self._most_bytes = most_bytes

    def read_values(self) -> Any:
        """Return the values of an earlier process; None without a valid file."""
        try:
            content = json.loads(read_text(self._file, self._most_bytes))
            if content["checksum"] != self._checksum(content["values"]):
                raise ValueError("its checksum is wrong")
            return content["values"]
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.debug(
                "cannot read the measurement in %s/%s.json (%s: %s); measuring again",
                self._folder,
                self._digest,
                type(error).__name__,
                error,
            )
            return None

    def write_values(self, values: Any) -> None:
        """Write a file that only its owner can read; do nothing without a writable folder.

        Args:
            values: JSON-serializable values.
        """
        content = {"values": values, "checksum": self._checksum(values)}
        with suppress(RuntimeError):  # no home folder
            write_private(self._file, json.dumps(content).encode())

    @property
    def _file(self) -> Path:
        """Path of the file. Raises RuntimeError without a home folder."""
        return user_cache() / self._folder / f"{self._digest}.json"

    def _checksum(self, values: Any) -> str:
        return sha256(f"{self._digest} {json.dumps(values, sort_keys=True)}".encode()).hexdigest()


@cache
def _code() -> str:
    """Return text that identifies the machine, the libraries, and penstock's source files."""
    root = Path(__file__).parents[2]
    files = [(file, file.stat()) for file in sorted(root.rglob("*.py"))]
    ours = [
        f"{file.relative_to(root)} {about.st_size} {about.st_mtime_ns}" for file, about in files
    ]
    blas = load_blas()
    machine = [platform.node(), devices.device_name(), str(os.cpu_count()), str(blas and blas.name)]
    return "\n".join([*machine, *map(version, LIBRARIES), *ours])
