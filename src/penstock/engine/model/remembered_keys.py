"""Key centers and scales in the user's cache folder, reused at the next start."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import numpy as np

from penstock.attention.selection.key_centers import KeyCenters
from penstock.engine.model.remembered_file import RememberedFile
from penstock.engine.model.step_peaks import REMEMBERED_SECONDS
from penstock.kv.codecs.coded import Scales
from penstock.kv.numpy_arrays import Floats

MOST_FILE_BYTES = 20_000_000


def remembered_scales(
    identity: str, measure: Callable[[], tuple[Scales, ...]]
) -> tuple[Scales, ...]:
    """Read the scales of each layer's key channels from the user's cache folder, or measure them.

    Measured scales are written there if measuring took `REMEMBERED_SECONDS` or longer.

    Args:
        identity: everything that they depend on besides machine and code, as text.
        measure: computes the scales; called only without a valid file.
    """
    file = RememberedFile("scales", identity, MOST_FILE_BYTES)
    values = file.read_values()
    if values is not None:
        return tuple(tuple(map(b64decode, layer)) for layer in values)
    began = perf_counter()
    scales = measure()
    if perf_counter() - began >= REMEMBERED_SECONDS:
        file.write_values([[b64encode(head).decode() for head in layer] for layer in scales])
    return scales


def remembered_centers(
    identity: str, measure: Callable[[], Mapping[int, KeyCenters]]
) -> dict[int, KeyCenters]:
    """Read the key centers from the user's cache folder, or measure them.

    Measured centers are written there if measuring took `REMEMBERED_SECONDS` or longer.

    Args:
        identity: everything that they depend on besides machine and code, as text.
        measure: computes the centers; called only without a valid file.

    Returns:
        The centers of each layer that has them, by layer index.
    """
    file = RememberedFile("centers", identity, MOST_FILE_BYTES)
    values = file.read_values()
    if values is not None:
        return {int(layer): KeyCenters.of_table(_array(*table)) for layer, table in values.items()}
    began = perf_counter()
    centers = dict(measure())
    if perf_counter() - began >= REMEMBERED_SECONDS:
        file.write_values({str(layer): _text(center.table) for layer, center in centers.items()})
    return centers


def _text(table: Floats) -> tuple[tuple[int, ...], str]:
    return table.shape, b64encode(table.tobytes()).decode()


def _array(shape: Sequence[int], text: str) -> Floats:
    return np.frombuffer(b64decode(text), np.float32).reshape(shape)
