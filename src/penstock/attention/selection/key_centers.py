"""What the keys of a layer have in common, by head and position: their index leaves it out.

Before they are turned by their position, the keys of a head lie around one vector, which has most
of their length. An index of what is left has a third of the noise, in as many bits. The vector is
found in a fixed run of tokens. It is turned to the middle of each block of tokens, as the mean of
the turns inside. Nothing rests on how well that fits: it is taken off the keys, and its product
with a query is added to their scores.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.rotations import CenterLoop, Rotation, rotations
from penstock.kv.numpy_arrays import Floats

RUN_TOKENS = 256
"""Tokens of the run in which centers are found."""
RUN_SEED = "penstock centers"
LEFT_OUT = BLOCK_TOKENS
"""First tokens of the run, whose keys are unlike all others."""


def run_of_tokens(vocabulary_size: int) -> list[int]:
    """Return the tokens of the run, drawn at random: no text is known of any model."""
    draw = random.Random(RUN_SEED)
    return [draw.randrange(vocabulary_size) for _ in range(RUN_TOKENS)]


def centers_of(model: Any, keys: Sequence[Floats | None]) -> dict[int, KeyCenters]:
    """Return the centers of a model's layers, by their numbers.

    Args:
        model: which turns its keys in some way.
        keys: of the run, layer by layer, (kv_heads, RUN_TOKENS, dim) each; None for a layer that is
            not indexed.
    """
    turning = rotations(model, [0 if run is None else run.shape[-1] for run in keys])
    return {
        number: KeyCenters.of(run, rotation)
        for number, (run, rotation) in enumerate(zip(keys, turning, strict=True))
        if run is not None and np.isfinite(run[:, LEFT_OUT:]).all()
    }


@dataclass(frozen=True, slots=True)
class KeyCenters:
    """The vector of each head of one layer, and how it turns."""

    vectors: Floats
    """(kv_heads, dim), not turned."""
    rotation: Rotation

    def __deepcopy__(self, memo: object) -> KeyCenters:
        """Return itself: it never changes."""
        return self

    @property
    def table(self) -> Floats:
        """Vectors, angles and partners as one array, (kv_heads + 2, dim)."""
        rotation = self.rotation
        table: Floats = np.vstack([self.vectors, rotation.angles, rotation.partners])
        return table.astype(np.float32)

    @classmethod
    def of_table(cls, table: Floats) -> KeyCenters:
        """Return the centers that have this `table`."""
        *vectors, angles, partners = table
        rotation = Rotation.shared(angles.astype(np.float64), partners.astype(np.int64))
        return cls(np.stack(vectors), rotation)

    @classmethod
    def of(cls, keys: Floats, rotation: Rotation) -> KeyCenters:
        """Compute the centers of a run of keys (kv_heads, n, dim), the first at position 0."""
        positions = np.arange(LEFT_OUT, keys.shape[1])
        held = keys[:, LEFT_OUT:].astype(np.float64)
        tried = []
        for one in (rotation, Rotation.none(keys.shape[-1])):
            unturned = one.turned(held, -positions)
            center = unturned.mean(axis=1, keepdims=True)
            left = float(np.square(unturned - center).sum())
            tried.append((left, cls(center[:, 0].astype(np.float32), one)))
        return min(tried, key=lambda pair: pair[0])[1]

    def at(self, start: int, stop: int) -> Floats:
        """Return the centers at positions start..stop-1, (kv_heads, tokens, dim)."""
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        partners = self.vectors[:, None, self.rotation.partners]
        cosines, sines = self.rotation.of_blocks(first, last)
        by_block = self.vectors[:, None] * cosines + partners * sines
        by_token: Floats = by_block.repeat(BLOCK_TOKENS, axis=1)
        return by_token[:, start - first * BLOCK_TOKENS : stop - first * BLOCK_TOKENS]

    def scores(
        self,
        queries: Floats,
        heads: slice,
        first: int,
        stop: int,
        *,
        loop: CenterLoop | None = None,
    ) -> Floats:
        """Return the products of queries with the centers in the blocks first..stop-1.

        Args:
            queries: of some key heads, (heads, m, dim).
            heads: numbers of these.
            first: number of the first block.
            stop: number of the block behind the last.
            loop: see `Rotation.sums`.

        Returns:
            (heads, m, blocks).
        """
        return self.rotation.sums(queries, self.vectors[heads], first, stop, loop=loop)
