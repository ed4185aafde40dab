"""How the layers of a model turn keys by their position, found by turning unit vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from penstock.kv.choosing_loops import BLOCK_TOKENS
from penstock.kv.sign_products import Floats

TABLE_BLOCKS = 1_024
"""Blocks of one table of turns."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How keys are rotated by their position: number i of a key turns with one other.

    k'[i] = k[i] * cos(p * angles[i]) + k[partners[i]] * sin(p * angles[i]) at the position p.
    """

    angles: npt.NDArray[np.float64]
    partners: npt.NDArray[np.int64]
    _tables: list[tuple[Floats, Floats]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def none(cls, dim: int) -> Rotation:
        """Return the rotation of keys that do not turn."""
        return cls(np.zeros(dim), np.arange(dim))

    @classmethod
    def of(cls, matrix: Floats) -> Rotation:
        """Find it in the matrix that turns (n, dim) keys by one position, keys @ matrix."""
        others = np.abs(matrix) * (1 - np.eye(len(matrix)))
        partners = others.argmax(axis=0)
        sines = matrix[partners, np.arange(len(matrix))]
        angles = np.arctan2(sines, matrix.diagonal()).astype(np.float32)  # as files hold them
        return cls(angles.astype(np.float64), partners)

    def turned(
        self, keys: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return keys (kv_heads, n, dim) turned by positions (n,)."""
        turns = np.outer(positions, self.angles)
        turned: npt.NDArray[np.float64] = keys * np.cos(turns)
        turned += keys[..., self.partners] * np.sin(turns)
        return turned

    def same(self, other: Rotation) -> bool:
        """Tell whether keys turn alike."""
        return np.array_equal(self.angles, other.angles) and np.array_equal(
            self.partners, other.partners
        )

    def of_blocks(self, first: int, stop: int) -> Iterator[tuple[int, Floats, Floats]]:
        """Yield runs of blocks: the first, and mean cosines and sines of the positions inside.

        The means are (blocks, dim) each. They are kept in tables for all blocks up to there.
        """
        while len(self._tables) * TABLE_BLOCKS < stop:
            self._tables.append(self._table(len(self._tables) * TABLE_BLOCKS))
        while first < stop:
            number, start = divmod(first, TABLE_BLOCKS)
            last = min(TABLE_BLOCKS, start + stop - first)
            cosines, sines = self._tables[number]
            yield first, cosines[start:last], sines[start:last]
            first += last - start

    def _table(self, first: int) -> tuple[Floats, Floats]:
        around = np.arange(BLOCK_TOKENS) - (BLOCK_TOKENS - 1) / 2
        middles = np.arange(first, first + TABLE_BLOCKS) * BLOCK_TOKENS - around[0]
        turns = np.outer(middles, self.angles)
        mean = np.cos(np.outer(self.angles, around)).mean(axis=1)
        cosines, sines = ((part(turns) * mean).astype(np.float32) for part in (np.cos, np.sin))
        return cosines, sines

    def table_bytes(self, tokens: int) -> int:
        """Return the most bytes of the tables for so many tokens, while the last is made, too."""
        tables = -(-tokens // (BLOCK_TOKENS * TABLE_BLOCKS))
        return (8 * tables + 3 * 8) * TABLE_BLOCKS * len(self.angles)


def rotations(model: Any, dims: Sequence[int]) -> list[Rotation]:
    """Return how each layer turns keys of these sizes; layers that turn them alike share one.

    A layer of which that is not found has keys that do not turn. That costs an index some
    precision, and nothing else.
    """
    turning = list(_turning(model))
    if len(turning) != len(dims):
        return [Rotation.none(dim) for dim in dims]
    held: list[Rotation] = []
    for rope, dim in zip(turning, dims, strict=True):
        one = rotation_of(rope, dim)
        held.append(next((other for other in held if other.same(one)), one))
    return held


def rotation_of(rope: Any, dim: int) -> Rotation:
    """Return how a module of a model turns keys of a size."""
    try:
        turned = rope(mx.eye(dim)[None, :, None], offset=1)
        matrix = np.array(turned.astype(mx.float32))[0, :, 0]
    except (TypeError, ValueError, RuntimeError):  # it turns something of another size
        return Rotation.none(dim)
    return Rotation.of(matrix)


def _turning(model: Any) -> Iterator[Any]:
    """Yield what turns keys in each layer that has something of the kind."""
    for layer in getattr(model, "layers", ()):
        modules: list[Any] = layer.modules() if isinstance(layer, nn.Module) else []  # type: ignore[no-untyped-call]
        ropes = (module.get("rope") for module in modules)
        rope = next(filter(callable, ropes), None)
        if rope is not None:
            yield rope
