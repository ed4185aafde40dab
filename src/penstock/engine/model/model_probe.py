"""The trial of a model before it is trusted: its tokens, its tolerances, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

Way = Literal["shared", "joined"]
PROBE = (3, 1, 4, 1, 5, 2)
"""Tokens that a model reads both ways before it is trusted; every vocabulary has them."""
TOLERANCE = {mx.float32: 1e-3}
"""Largest difference of two logits by dtype, as a share of the largest logit."""
HALF_TOLERANCE = 6e-2
"""Largest difference for all other dtypes, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """The way in which a model reads KV that lies in parts, and the reason."""

    way: Way
    """Way to read: `shared`, part by part in place; `joined`, layer by layer, copied together."""
    why: str
    modules: tuple[str, ...]
    """Modules of mlx-lm in which the seam was put."""
    whole: bool = False
    """Whether its results depend on the cuts in a prompt. Such a prompt is cut as mlx-lm cuts it,
    and nothing of it is shared."""


def differs(logits: mx.array, expected: mx.array, dtype: mx.Dtype) -> str:
    """Return by how much float32 logits differ, in words; empty if it is little for a dtype."""
    # Some models give tokens that do not exist an infinite logit.
    difference = float(mx.where(logits == expected, 0.0, mx.abs(logits - expected)).max())
    largest = float(mx.where(mx.isfinite(expected), mx.abs(expected), 0.0).max())
    off = difference / max(1e-6, largest)
    return "" if off <= TOLERANCE.get(dtype, HALF_TOLERANCE) else f"{off:.1%}"
