"""Bytes of the largest steps of a model, measured once in the life of a process.

The lag of MLX's threads behind their caller differs from run to run, and the peak of one and the
same step with it, by some percent. So measurements are kept: an engine that is opened again asks
for the same bytes as the first, on the same model and on one that was loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any, Protocol

from mlx.utils import tree_flatten

MOST_FORMS = 1_000
"""Most peaks that are kept; of more, those measured first go."""

REMEMBERED_SECONDS = 0.5
"""Seconds of measuring from which the peaks are written for the next process."""

_measured: dict[Hashable, StepPeaks] = {}
"""Peaks by the form of a model and the way in which it was run."""


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
    far_tokens: int
    """Tokens of the prompt in front of that chunk."""
    token_seconds: float
    """Seconds per token of a chunk at the start of a prompt."""
    measured_tokens: int
    """Tokens of the chunk that was measured; `prefill` is that of a whole one."""


class PeaksFile(Protocol):
    """A file of peaks; see `RememberedPeaks`."""

    def read(self) -> StepPeaks | None:
        """Return the peaks in it; None if there are none."""

    def write(self, peaks: StepPeaks) -> None:
        """Write peaks into it."""


def measured_once(
    model: Any,
    run_as: Hashable,
    measure: Callable[[], StepPeaks],
    open_file: Callable[[str], PeaksFile] | None = None,
) -> StepPeaks:
    """Return the peaks measured before of a model of this form that ran in the same way.

    Measure them otherwise.

    Args:
        model: mlx-lm's. Other settings, or weights of other shapes or dtypes make another form.
        run_as: everything else on which a step's peak depends.
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
