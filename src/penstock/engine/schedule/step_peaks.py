"""Bytes of the largest steps of a model, measured once in the model's life.

The lag of MLX's threads behind their caller differs from run to run, and the peak of one and the
same step with it, by some percent. So measurements are kept: an engine that is opened again on a
model asks for the same bytes as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from mlx.utils import tree_flatten

_measured: dict[int, dict[Hashable, StepPeaks]] = {}
"""Peaks of each living model, by its id, then by the way in which it was run."""


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Most bytes of steps beside weights and tails, and the seconds of a prefill."""

    prefill: int
    """Bytes of a chunk at the start of a prompt."""
    decode: int
    """Bytes of a decode step."""
    sample: int
    """Bytes of choosing a token for each sequence."""
    far: int
    """Bytes of a chunk far into a prompt; 0 where it takes no more than the first."""
    prefill_seconds: float
    """Seconds of a chunk at the start of a prompt."""


def measured_once(model: Any, run_as: Hashable, measure: Callable[[], StepPeaks]) -> StepPeaks:
    """Return the peaks measured before of a model that ran in the same way; else measure them.

    Args:
        model: mlx-lm's. Weights of other shapes or dtypes make it another one.
        run_as: everything else on which a step's peak depends.
        measure: runs the steps.
    """
    if id(model) not in _measured:
        finalize(model, _measured.pop, id(model), None)
    peaks = _measured.setdefault(id(model), {})
    key = (run_as, _form_of_weights(model))
    if key not in peaks:
        peaks[key] = measure()
    return peaks[key]


def _form_of_weights(model: Any) -> Hashable:
    """Return names, shapes and dtypes of all weights."""
    weights: Any = tree_flatten(model.parameters())
    return tuple((name, weight.shape, str(weight.dtype)) for name, weight in weights)
