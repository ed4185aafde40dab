"""Measurements in the user's cache folder, reused at the next start with the same model.

A file has one measurement, valid for a model, this machine and the installed code. If it is damaged
or of another version, the measurement is repeated.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from penstock.attention import devices
from penstock.attention.selection.key_centers import KeyCenters
from penstock.blas import load_blas
from penstock.engine.model.step_peaks import REMEMBERED_SECONDS, StepPeaks
from penstock.kv.codecs.coded import Scales
from penstock.kv.numpy_arrays import Floats
from penstock.regular_files import read_text
from penstock.user_cache import user_cache, write_private

logger = logging.getLogger(__name__)

VERSION = 1
LIBRARIES = ("mlx", "mlx-lm", "numpy")
MOST_PEAK_BYTES = 10_000
MOST_KEY_BYTES = 20_000_000


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

    def values(self, measure: Callable[[], Any]) -> Any:
        """Return the values of an earlier process, or measure them.

        Measured values are written if measuring took `REMEMBERED_SECONDS` or longer.
        """
        values = self.read_values()
        if values is None:
            began = perf_counter()
            values = measure()
            if perf_counter() - began >= REMEMBERED_SECONDS:
                self.write_values(values)
        return values

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


class RememberedPeaks(RememberedFile):
    """File with the step peaks of a model.

    Args:
        identity: everything that they depend on besides machine and code, as text.
    """

    def __init__(self, identity: str) -> None:
        super().__init__("steps", identity, MOST_PEAK_BYTES)

    def read(self) -> StepPeaks | None:
        """Return the peaks of an earlier process; None without a valid file."""
        values = self.read_values()
        return None if values is None else StepPeaks(**values)

    def write(self, peaks: StepPeaks) -> None:
        """Write a file that only its owner can read; do nothing without a writable folder."""
        self.write_values(asdict(peaks))


def remembered_scales(
    identity: str, measure: Callable[[], tuple[Scales, ...]]
) -> tuple[Scales, ...]:
    """Read the scales of each layer's key channels from the user's cache folder, or measure them.

    Args:
        identity: everything that they depend on besides machine and code, as text.
        measure: computes the scales; called only without a valid file.
    """
    values = RememberedFile("scales", identity, MOST_KEY_BYTES).values(
        lambda: [[b64encode(head).decode() for head in layer] for layer in measure()]
    )
    return tuple(tuple(map(b64decode, layer)) for layer in values)


def remembered_centers(
    identity: str, measure: Callable[[], Mapping[int, KeyCenters]]
) -> dict[int, KeyCenters]:
    """Read the key centers from the user's cache folder, or measure them.

    Args:
        identity: everything that they depend on besides machine and code, as text.
        measure: computes the centers; called only without a valid file.

    Returns:
        The centers of each layer that has them, by layer index.
    """
    values = RememberedFile("centers", identity, MOST_KEY_BYTES).values(
        lambda: {str(layer): _text(center.table) for layer, center in measure().items()}
    )
    return {int(layer): KeyCenters.of_table(_array(*table)) for layer, table in values.items()}


def _text(table: Floats) -> tuple[tuple[int, ...], str]:
    return table.shape, b64encode(table.tobytes()).decode()


def _array(shape: Sequence[int], text: str) -> Floats:
    return np.frombuffer(b64decode(text), np.float32).reshape(shape)
