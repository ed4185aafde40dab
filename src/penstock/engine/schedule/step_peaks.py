"""What the largest steps of a model take, measured once for as long as the model is there.

How far MLX's threads are behind their caller differs from run to run, and the peak of one and the
same step with it, by some percent. So what was measured is kept: an engine that is opened again on
a model asks for the bytes that it asked for at first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from mlx.utils import tree_flatten

_measured: dict[int, dict[Hashable, StepPeaks]] = {}
"""Of each model that is there, by its id: what was measured of it, and how it was run then."""


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Bytes that steps take at most beside weights and tails, and what a prompt takes of time."""

    prefill: int
    decode: int
    sample: int
    far: int
    """Of a chunk far into a prompt; 0 where it takes no more than the first."""
    prefill_seconds: float


def measured_once(model: Any, run_as: Hashable, measure: Callable[[], StepPeaks]) -> StepPeaks:
    """Return what was measured of a model before, if it was run in the same way; else measure it.

    Args:
        model: mlx-lm's. Weights of other shapes or dtypes make it another one.
        run_as: all else that a step's peak depends on.
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
