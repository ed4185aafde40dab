"""MLX arrays whose values are also in NumPy arrays."""

from __future__ import annotations

import mlx.core as mx

from penstock.kv.numpy_arrays import Floats


class ReadableArray(mx.array):
    """Evaluated float32 array that code on the host can read without calling MLX."""

    def __init__(self, values: Floats) -> None:
        super().__init__(values)
        self.host = values
