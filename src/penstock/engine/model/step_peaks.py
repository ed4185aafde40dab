"""Peak memory of a model's largest steps, measured once per process.

The peak of the same step varies from run to run with the lag of MLX's threads, which MLX bounds: of
60 runs of a small model's chunk the least took 0.99 MB and the largest 1.28, on an idle and on a
busy machine alike. A real step reaches that, so the largest of several runs counts, and a smaller
one that is measured later does not replace it. Measurements are cached: a second engine reserves
the same bytes as the first, on the same model or on one loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any, Protocol

from mlx.utils import tree_flatten

SLACK = 1.10
"""Ratio of reserved to measured bytes of a step."""

MOST_FORMS = 1_000
"""Maximum number of cached measurements; the oldest are dropped."""

REMEMBERED_SECONDS = 0.1
"""Seconds of measuring from which the peaks are written for the next process."""

_measured: dict[Hashable, StepPeaks] = {}
"""Measurements by form of the model and run settings."""


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Peak bytes of steps, without weights and tails, and the prefill time."""

    prefill: int
    """Bytes of the first chunk of a prompt."""
    decode: int
    sample: int
    far: int
    """Bytes of a chunk far into a prompt; 0 if it needs no more than the first."""
    far_tokens: int
    """Context length of that chunk in tokens."""
    token_seconds: float
    """Seconds per token of the first chunk of a prompt."""
    measured_tokens: int


class PeaksFile(Protocol):
    def read(self) -> StepPeaks | None:
        """Return the peaks in it; None if there are none."""

    def write(self, peaks: StepPeaks) -> None: ...


def measured_once(
    model: Any,
    run_as: Hashable,
    measure: Callable[[], StepPeaks],
    open_file: Callable[[str], PeaksFile] | None = None,
) -> StepPeaks:
    """Return the peaks measured before of a model of this form that ran in the same way.

    Measure them otherwise.

    Args:
        model: mlx-lm model; its form is its settings and the shapes and dtypes of its weights.
        run_as: everything else on which the peaks depend.
        measure: runs the steps.
        open_file: opens the file of other processes' peaks by their identity; None without one.
    """
    key = (_form(model), run_as)
    if key not in _measured:
        file = None if open_file is None else open_file(repr(key))
        _measured[key] = _peaks_of(file, measure)
        if len(_measured) > MOST_FORMS:
            del _measured[next(iter(_measured))]
    return _measured[key]


def _peaks_of(file: PeaksFile | None, measure: Callable[[], StepPeaks]) -> StepPeaks:
    remembered = None if file is None else file.read()
    if remembered is not None:
        return remembered
    began = perf_counter()
    peaks = measure()
    if file is not None and perf_counter() - began >= REMEMBERED_SECONDS:
        file.write(peaks)
    return peaks


def _form(model: Any) -> tuple[type, bytes]:
    """Return a model's class, and a digest of its settings, modules and forms of weights."""
    weights: Any = tree_flatten(model.parameters())
    forms = [(name, weight.shape, str(weight.dtype)) for name, weight in weights]
    # Modules tell by their words how they multiply by weights that are outside of MLX's arrays.
    words = repr((getattr(model, "args", None), forms, model))
    return type(model), sha256(words.encode()).digest()
