"""Mixture-of-experts layers with packed weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.plugins.cpu.packed_products import (
    Floats,
    PackedMatrix,
    PackedModule,
    Product,
    can_multiply,
    packed_matrix,
    padded_bias,
)

EXPERTS = "mlx_lm.models.switch_layers.QuantizedSwitchLinear"
"""Qualified name of mlx-lm's class for the linear layers of all experts."""
MOST_EXPERTS = 8
"""Assumed maximum number of experts per token."""


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is the linear layers of experts and can be packed."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    return name == EXPERTS and can_multiply(module, dimensions=3)


def packed_experts(module: nn.Module, *, exact: bool) -> PackedExperts:
    """Return a packed replacement of a module for which `are_experts` is true."""
    experts = range(len(module.weight))
    matrices = [packed_matrix(module, expert) for expert in experts]
    biases = [padded_bias(module.bias[x]) if "bias" in module else None for x in experts]
    return PackedExperts(matrices, biases, exact=exact)


class PackedExperts(PackedModule):
    """Linear layers of experts with packed weights, computed immediately."""

    def __init__(
        self, matrices: list[PackedMatrix], biases: list[Floats | None], *, exact: bool
    ) -> None:
        vectors = {f"bias {expert}": bias for expert, bias in enumerate(biases)}
        super().__init__(matrices, exact=exact, vectors=vectors)
        self._products = [
            Product(matrix, bias, exact=exact)
            for matrix, bias in zip(matrices, biases, strict=True)
        ]
        used = min(len(matrices), MOST_EXPERTS)
        self.packed_row_bytes //= len(matrices)
        self.packed_row_bytes = used * (self.packed_row_bytes + self._products[0].row_bytes)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Multiply rows by the weights of their experts.

        Args:
            x: (..., rows, n), whose leading axes are broadcast to those of `indices`.
            indices: index of the expert for each element of the leading axes, (...).
            sorted_indices: ignored; for compatibility with mlx-lm's class.
        """
        experts = np.asarray(indices)
        rows: Floats = np.asarray(x.astype(mx.float32))
        by_expert = np.broadcast_to(rows, (*experts.shape, *rows.shape[-2:]))
        result = np.empty((*by_expert.shape[:-1], self.packed_width), np.float32)
        for expert in np.unique(experts):
            places = np.nonzero(experts == expert)
            chosen = np.ascontiguousarray(by_expert[places])
            products = self._products[int(expert)](chosen.reshape(-1, rows.shape[-1]))
            result[places] = products.reshape(*chosen.shape[:-1], self.packed_width)
        return mx.array(result)
