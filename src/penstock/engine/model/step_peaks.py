"""Peak memory of a model's largest steps, measured once per process.

The peak of the same step varies between runs with the lag of MLX's threads, which MLX bounds: in 60
runs of a small model's chunk, it was between 0.99 and 1.28 MB, on an idle and on a busy machine
alike. A real step may reach the maximum, so the largest of several runs counts, and a smaller later
measurement does not replace it. Measurements are cached: a second engine reserves the same bytes as
the first, for the same model or one loaded again.
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
"""Minimum duration of a measurement that is saved for later processes, in seconds."""

_measured: dict[Hashable, StepPeaks] = {}
"""Measurements by shapes of the model and run settings."""


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Peak bytes of steps, excluding weights and tails, and the prefill time."""

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
        """Return the saved peaks; None if there are none."""

    def write(self, peaks: StepPeaks) -> None: ...


def measured_once(
    model: Any,
    run_as: Hashable,
    measure: Callable[[], StepPeaks],
    open_file: Callable[[str], PeaksFile] | None = None,
) -> StepPeaks:
    """Return the cached peaks of an equal model with equal settings, or measure them.

    Models are equal if their settings and the shapes and dtypes of their weights are.

    Args:
        model: mlx-lm model.
        run_as: everything else on which the peaks depend.
        measure: runs the steps.
        open_file: opens the file of peaks with a given identity; None to use no files.
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


def _form(model: Any) -> tuple[str, bytes]:
    """Return a name of a model's class, and a digest of its settings, modules, and weights' shapes.

    Not the class itself, which may be one of this model alone, and would never be freed.
    """
    weights: Any = tree_flatten(model.parameters())
    forms = [(name, weight.shape, str(weight.dtype)) for name, weight in weights]
    # The repr of modules identifies weights that are not MLX arrays.
    words = repr((getattr(model, "args", None), forms, model))
    kind = type(model)
    return f"{kind.__module__}.{kind.__qualname__}", sha256(words.encode()).digest()
