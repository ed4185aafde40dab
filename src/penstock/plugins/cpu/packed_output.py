"""Final norm and output layer of a packed model.

In a decode step, the job of the layers computes them, too, and the modules return its results. All
passes run the same compiled code, so that logits do not depend on the kind of pass.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.kv.numpy_arrays import Floats, Integers
from penstock.kv.readable_arrays import ReadableArray
from penstock.models.layer_seams import skips_logits
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.layer_loops import PART_WORDS, PartTable, norm_job
from penstock.plugins.cpu.packed_products import NormedOutput, Product, rows_of


class PassOutput(mx.array):
    """Output of the last layer, with the results of the modules that follow.

    Args:
        values: output of the layer.
        output: the modules that follow.
        normed: result of the norm, (rows, width).
        logits: result of the output layer, (rows, vocabulary).
    """

    def __init__(self, values: Floats, output: OutputParts, normed: Floats, logits: Floats) -> None:
        super().__init__(values)
        self.output = output
        self.normed = normed
        self.logits = logits


class OutputParts:
    """The final norm and the product of the output layer.

    Args:
        norm: RMSNorm of MLX or of mlx-lm's Gemma.
        from_one: whether the norm multiplies by 1 + weight.
        product: product of the output layer.
    """

    def __init__(self, norm: Any, product: Product, *, from_one: bool) -> None:
        self.product = product
        weights = np.asarray(norm.weight.astype(mx.float32)) + np.float32(from_one)
        self._weights: Floats = np.ascontiguousarray(weights)
        self._constants = np.array([norm.eps, 0, 1], np.float32)
        self._table = np.zeros(PART_WORDS, np.int64)
        self._table[PartTable.WIDTH] = len(self._weights)
        self._table[PartTable.NORM] = self._weights.ctypes.data
        self._table[PartTable.CONSTANTS] = self._constants.ctypes.data

    def norm_table(self, rows: int, x: int, result: int) -> Integers:
        """Return the table of `norm_job` for rows at an address."""
        table = self._table.copy()
        table[PartTable.ROWS] = rows
        table[PartTable.X], table[PartTable.RESULT] = x, result
        return table

    def normalize(self, x: Floats) -> Floats:
        """Normalize rows (n, width)."""
        result = np.empty_like(x)
        table = self.norm_table(len(x), x.ctypes.data, result.ctypes.data)
        team().run(norm_job(), table)
        return result


class PackedNorm(nn.Module):
    """Final norm of a model whose output layer is packed, computed immediately."""

    def __init__(self, norm: Any, output: OutputParts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = norm.weight
        self.eps = norm.eps
        self.output = output

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize (..., width); return `x` if no logits are read."""
        if isinstance(x, PassOutput) and x.output is self.output:
            return NormedOutput(x.normed.reshape(x.shape), self.output.product, x.logits)
        if skips_logits():
            return x
        return ReadableArray(self.output.normalize(rows_of(x)).reshape(x.shape))
