"""Products that make keys and values of latents (MLA), left out in decode steps of the engine.

A model multiplies the queries of one new token; for several new tokens it expands all latents. The
engine multiplies the queries in both cases: stand-ins for cached latents are not expanded.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.latent_reads import ExpandedRows, LatentRows

CLASSES = {
    (f"{library}.models.mla", name)
    for library in ("mlx_lm", "mlx_vlm")
    for name in ("MultiLinear", "QuantizedMultiLinear")
}
"""Classes of these products, by their module and name."""


@functools.cache
def absorber(kind: Any) -> type[nn.Module] | None:
    """Return a subclass of a product that does not expand `LatentRows`; None for other classes."""
    if (kind.__module__, kind.__name__) not in CLASSES:
        return None

    class Absorber(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, transpose: bool = True) -> Any:
            multiply = super().__call__
            if not isinstance(x, LatentRows):
                return multiply(x, transpose=transpose)
            absorb = partial(multiply, transpose=not transpose)
            return ExpandedRows(x, absorb, partial(multiply, transpose=transpose))

    return Absorber
