"""Mean key of each head before RoPE, subtracted from the keys before they are indexed.

Before RoPE, the keys of a head are close to their mean, which accounts for most of their norm. An
index of the differences has a third of the noise at the same number of bits. The mean is computed
on a fixed sequence of tokens, and rotated by the mean rotation of each block of positions. Scores
are right even where the mean fits badly, because its product with the query is added to them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.rotations import CenterLoop, Rotation, rotations
from penstock.kv.numpy_arrays import Floats

RUN_TOKENS = 256
"""Number of tokens from which the centers are computed. This leaves 0.333 of the squared norm of
SmolLM2's keys; 96 tokens leave 0.341."""
RUN_SEED = "penstock centers"
LEFT_OUT = BLOCK_TOKENS
"""Number of leading tokens to skip, whose keys differ from all others."""


def run_of_tokens(vocabulary_size: int) -> list[int]:
    """Return fixed pseudo-random token ids, as no text suits every vocabulary."""
    draw = random.Random(RUN_SEED)
    return [draw.randrange(vocabulary_size) for _ in range(RUN_TOKENS)]


def centers_of(
    model: Any, keys: Sequence[Floats | None], still: Sequence[int] = ()
) -> dict[int, KeyCenters]:
    """Return the key centers by layer; layers with non-finite keys have none.

    Args:
        model: the model, whose RoPE modules are inspected.
        keys: keys of the tokens by layer, (kv_heads, RUN_TOKENS, dim) each; None for a layer
            without an index.
        still: number of first channels of each layer's keys that RoPE leaves out; none by default.
    """
    still = still or [0] * len(keys)
    dims = [0 if run is None else run.shape[-1] - n for run, n in zip(keys, still, strict=True)]
    turning = [
        rotation.behind(n) if n else rotation
        for rotation, n in zip(rotations(model, dims), still, strict=True)
    ]
    return {
        number: KeyCenters.of(run, rotation)
        for number, (run, rotation) in enumerate(zip(keys, turning, strict=True))
        if run is not None and np.isfinite(run[:, LEFT_OUT:]).all()
    }


@dataclass(frozen=True, slots=True)
class KeyCenters:
    """Mean key of each head of one layer, and the rotation of its keys by position."""

    vectors: Floats
    """Array (kv_heads, dim), not rotated."""
    rotation: Rotation
    _factors: list[mx.array] = field(default_factory=list, init=False, compare=False, repr=False)

    def __deepcopy__(self, memo: object) -> KeyCenters:
        """Return self, which is immutable."""
        return self

    @property
    def table(self) -> Floats:
        """Vectors, angles and partners in one array, (kv_heads + 2, dim)."""
        rotation = self.rotation
        table: Floats = np.vstack([self.vectors, rotation.angles, rotation.partners])
        return table.astype(np.float32)

    @classmethod
    def of_table(cls, table: Floats) -> KeyCenters:
        """Return the centers with this `table`."""
        *vectors, angles, partners = table
        rotation = Rotation.shared(angles.astype(np.float64), partners.astype(np.int64))
        return cls(np.stack(vectors), rotation)

    @classmethod
    def of(cls, keys: Floats, rotation: Rotation) -> KeyCenters:
        """Compute the centers of keys (kv_heads, n, dim) at positions 0 to n - 1."""
        positions = np.arange(LEFT_OUT, keys.shape[1])
        double_keys = keys[:, LEFT_OUT:].astype(np.float64)
        tried = []
        for candidate in (rotation, Rotation.none(keys.shape[-1])):
            unturned = candidate.turned(double_keys, -positions)
            center = unturned.mean(axis=1, keepdims=True)
            left = float(np.square(unturned - center).sum())
            tried.append((left, cls(center[:, 0].astype(np.float32), candidate)))
        return min(tried, key=lambda pair: pair[0])[1]

    @classmethod
    def joined(cls, centers: Sequence[KeyCenters]) -> KeyCenters:
        """Return the centers of layers with the same rotation as those of one layer."""
        return cls(np.concatenate([of_layer.vectors for of_layer in centers]), centers[0].rotation)

    def between(self, start: int, stop: int) -> Floats:
        """Return the centers at positions `start..stop - 1`, (kv_heads, tokens, dim)."""
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        partners = self.vectors[:, None, self.rotation.partners]
        cosines, sines = self.rotation.of_blocks(first, last)
        by_block = self.vectors[:, None] * cosines + partners * sines
        by_token: Floats = by_block.repeat(BLOCK_TOKENS, axis=1)
        return by_token[:, start - first * BLOCK_TOKENS : stop - first * BLOCK_TOKENS]

    @property
    def factors(self) -> mx.array:
        """Result of `Rotation.factors` for the vectors, computed once."""
        if not self._factors:
            self._factors.append(mx.array(self.rotation.factors(self.vectors)))
        return self._factors[0]

    def scores(
        self,
        queries: Floats,
        heads: slice,
        first: int,
        stop: int,
        *,
        loop: CenterLoop | None = None,
    ) -> Floats:
        """Return the products of queries with the centers of the blocks `first..stop - 1`.

        Args:
            queries: queries of some KV heads, (heads, m, dim).
            heads: indices of these heads.
            first: index of the first block.
            stop: index after the last block.
            loop: compiled loop, see `Rotation.sums`.

        Returns:
            Array (heads, m, blocks).
        """
        return self.rotation.sums(queries, self.vectors[heads], first, stop, loop=loop)
