"""Calibration of an engine at startup: forward passes over random tokens, in reserved memory.

Each run is split into prefill chunks of the engine's size, so it needs only the buffers of a step
and memory for its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import mlx.core as mx
import numpy as np

from penstock.attention.selection.key_centers import (
    RUN_TOKENS,
    KeyCenters,
    centers_of,
    run_of_tokens,
)
from penstock.attention.selection.selection import Selection
from penstock.config import EngineSettings
from penstock.engine.model.remembered_file import remembered_centers, remembered_scales
from penstock.engine.model.runner import SCALES_CHUNK, Runner
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.kv.codecs.coded import Scales
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats
from penstock.ledger import Kind, Ledger
from penstock.models.fingerprint import fingerprint

KEY_BYTES = 4
"""Bytes per element of the keys of all layers while centers are computed (float32)."""
LAYER_BYTES = 4 * 8 + 2 * 4
"""Extra bytes per element in the layer whose center is computed: four float64 arrays and copies."""
SQUARES_BYTES = 2 * 4
"""Bytes per element of keys and queries while squared: the element and its square, in float32."""

T = TypeVar("T")


class Calibration:
    """Measurements of the model that an engine makes once, before it accepts requests.

    Args:
        estimator: estimates the bytes of a step; those of the largest step are reserved.
    """

    def __init__(
        self, runner: Runner, estimator: MemoryEstimator, limits: EngineSettings, ledger: Ledger
    ) -> None:
        self._runner = runner
        self._estimator = estimator
        self._limits = limits
        self._ledger = ledger
        self._fingerprint = ""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights; the first use hashes them, about a second per 5 GB."""
        self._fingerprint = self._fingerprint or fingerprint(self._runner.model)
        return self._fingerprint

    def centered(self, selection: Selection) -> Selection:
        """Return a selection whose index subtracts each layer's mean keys; raises LedgerFull."""
        if not selection.layers:
            return selection
        shapes = self._runner.shapes
        dims = [(shape.kv_heads, selection.index.dims(shape)[0]) for shape in shapes]
        numbers = [RUN_TOKENS * heads * dim for heads, dim in dims]
        beside = KEY_BYTES * sum(numbers) + LAYER_BYTES * max(numbers, default=0)
        with self._ledger.reserve(Kind.BUFFERS, self._estimator.run_bytes(RUN_TOKENS) + beside):
            centers = self._remembered(
                remembered_centers, partial(self._centers, latents=selection.index.latents)
            )
            return replace(selection, index=replace(selection.index, centers=centers))

    def key_scales(self) -> tuple[Scales, ...]:
        """Measure the scale of each layer's key channels; raises LedgerFull."""
        runner, chunk = self._runner, min(SCALES_CHUNK, self._limits.step_tokens)
        numbers = (SCALES_CHUNK * (s.kv_heads + runner.heads) * s.key_dim for s in runner.shapes)
        beside = SQUARES_BYTES * max(numbers, default=0)
        with self._ledger.reserve(Kind.BUFFERS, self._estimator.run_bytes(SCALES_CHUNK) + beside):
            return self._remembered(remembered_scales, lambda: runner.key_scales(chunk))

    def _remembered(
        self, remembered: Callable[[str, Callable[[], T]], T], measure: Callable[[], T]
    ) -> T:
        runner, limits = self._runner, self._limits
        if runner.ranks > 1:  # ranks must run together, but only some may have the file
            return measure()
        run_as = (limits.step_tokens, limits.max_kv_size, limits.keep_tokens, repr(runner.device))
        return remembered(f"{self.fingerprint} {run_as}", measure)

    def _centers(self, *, latents: bool) -> dict[int, KeyCenters]:
        runner = self._runner
        tokens = run_of_tokens(runner.vocabulary_size)
        run = runner.read_run(tokens, 0, self._limits.step_tokens)
        keys: list[Floats | None] = []
        for layer in zip(*(segment.layers for segment in run), strict=True):
            runs = [_floats(of_run if latents else of_run[:1]) for of_run in layer]
            sides = [side for side in runs if side is not None]
            keys.append(np.concatenate(sides, axis=1) if sides else None)
        still = [shape.key_dim for shape in runner.shapes] if latents else ()
        return centers_of(runner.model, keys, still)


def _floats(sides: Sequence[Side]) -> Floats | None:
    """Return a layer's sides together, (kv_heads, n, dim); None if one is encoded."""
    raw = [side for side in sides if isinstance(side, mx.array)]
    if len(raw) < len(sides):
        return None
    floats = [np.array(side.astype(mx.float32))[0] for side in raw]
    return floats[0] if len(floats) == 1 else np.concatenate(floats, axis=-1)
