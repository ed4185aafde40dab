"""RoPE for compiled layers, without calling MLX at each position.

Angles are taken from MLX by applying the model's module to ones and zeros, once per position.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.kv.numpy_arrays import Floats, Integers

ROTATING = frozenset(
    {
        "mlx.nn.layers.positional_encoding.RoPE",
        "mlx_lm.models.rope_utils.Llama3RoPE",
        "mlx_lm.models.rope_utils.SuScaledRoPE",
        "mlx_lm.models.rope_utils.YarnRoPE",
    }
)
"""Classes of RoPE whose angles depend only on the position."""
LEAVING = "mlx_lm.models.smollm3.NoPE"
"""Class that does not rotate, for layers without RoPE."""
BLOCK = 256
"""Number of positions whose angles are computed together."""
MOST_BLOCKS = 64
"""Maximum number of cached blocks of angles: 8 MB with a head size of 256."""


COMPARED_BLOCK = 4
"""Index of the block of positions that is compared besides the first."""


class RotaryPositions:
    """Cosines and sines of a RoPE module of mlx-lm, cached in blocks of positions."""

    def __init__(self, rope: nn.Module, pairs: int, *, neighbors: bool) -> None:
        """Initialize without computing any angles.

        Args:
            rope: module that defines the angles.
            pairs: number of rotated pairs per head; 0 for none.
            neighbors: whether the values of a pair are adjacent, instead of half a row apart.
        """
        self._rope = rope
        self.pairs = pairs
        """Number of rotated pairs per head."""
        self.neighbors = neighbors
        """Whether the values of a pair are adjacent."""
        self._blocks: OrderedDict[int, Floats] = OrderedDict()

    @classmethod
    def of(cls, rope: nn.Module) -> RotaryPositions | None:
        """Return the angles of a RoPE module; None if its class is unknown."""
        name = f"{type(rope).__module__}.{type(rope).__name__}"
        if name == LEAVING:
            return cls(rope, 0, neighbors=False)
        if name not in ROTATING:
            return None
        dims = getattr(rope, "dims", None) or rope.dim
        return cls(rope, dims // 2, neighbors=bool(getattr(rope, "traditional", False)))

    def angles(self, positions: Integers) -> Floats:
        """Return the cosines and sines, (2, n, 1, pairs), of positions (n,)."""
        blocks = positions // BLOCK
        if blocks[0] == blocks[-1] and (blocks == blocks[0]).all():
            return np.ascontiguousarray(self._block(int(blocks[0]))[:, positions % BLOCK])
        angles = np.empty((2, len(positions), 1, self.pairs), np.float32)
        for block in np.unique(blocks):
            inside = blocks == block
            angles[:, inside] = self._block(int(block))[:, positions[inside] % BLOCK]
        return angles

    def equals(self, other: RotaryPositions) -> bool:
        """Return whether another rotation has the same angles, comparing two blocks."""
        if (self.pairs, self.neighbors) != (other.pairs, other.neighbors):
            return False
        if not self.pairs:
            return True
        blocks = (0, COMPARED_BLOCK)
        return all(np.array_equal(self._block(i), other._block(i)) for i in blocks)

    def _parts(self) -> tuple[slice, slice]:
        """Return the slices of the first and the second values of all pairs."""
        pairs = self.pairs
        if self.neighbors:
            return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        return slice(0, pairs), slice(pairs, 2 * pairs)

    def _block(self, number: int) -> Floats:
        """Return cosines and sines of a block of positions, (2, BLOCK, 1, pairs)."""
        kept = self._blocks.get(number)
        if kept is None:
            rows = np.zeros((1, 1, BLOCK, 2 * self.pairs), np.float32)
            rows[..., self._parts()[0]] = 1
            turned: Any = np.asarray(self._rope(mx.array(rows), offset=number * BLOCK))
            both = [turned[0, 0, :, part] for part in self._parts()]
            kept = self._blocks[number] = np.ascontiguousarray(np.stack(both)[:, :, None])
            if len(self._blocks) > MOST_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return kept
