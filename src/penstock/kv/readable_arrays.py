"""MLX arrays that code on the host can read at once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from penstock.kv.numpy_arrays import Floats


class ReadableArray(mx.array):
    """Evaluated float32 array in the memory of the host."""

    @property
    def host(self) -> Floats:
        """The values, not copied."""
        values: Floats = np.asarray(self)
        return values
