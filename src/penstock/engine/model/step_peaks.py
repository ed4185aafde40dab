"""Bytes of the largest steps of a model, measured once in the life of a process.

The lag of MLX's threads behind their caller differs from run to run, and the peak of one and the
same step with it, by some percent. So measurements are kept: an engine that is opened again asks
for the same bytes as the first, on the same model and on one that was loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from mlx.utils import tree_flatten

MOST_FORMS = 1_000
"""Most peaks that are kept; of more, those measured first go."""

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


def measured_once(model: Any, run_as: Hashable, measure: Callable[[], StepPeaks]) -> StepPeaks:
    """Return the peaks measured before of a model of this form that ran in the same way.

    Measure them otherwise.

    Args:
        model: mlx-lm's. Other settings, or weights of other shapes or dtypes make another form.
        run_as: everything else on which a step's peak depends.
        measure: runs the steps.
    """
    key = (_form(model), run_as)
    if key not in _measured:
        _measured[key] = measure()
        if len(_measured) > MOST_FORMS:
            del _measured[next(iter(_measured))]
    return _measured[key]


def _form(model: Any) -> tuple[type, bytes]:
    """Return a model's class, and a digest of its settings and of the forms of its weights."""
    weights: Any = tree_flatten(model.parameters())
    forms = [(name, weight.shape, str(weight.dtype)) for name, weight in weights]
    return type(model), sha256(repr((getattr(model, "args", None), forms)).encode()).digest()
