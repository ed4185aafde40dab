"""Rotary embeddings in NumPy against mlx-lm's modules."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE
from mlx_lm.models.smollm3 import NoPE

from penstock.plugins.cpu.layer_loops import rotate_loop
from penstock.plugins.cpu.packed_rope import BLOCK, MOST_BLOCKS, RotaryPositions

HEADS, DIM = 3, 32
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODULES: dict[str, Any] = {
    "halves": nn.RoPE(DIM),
    "neighbors": nn.RoPE(DIM, traditional=True, base=1e5),
    "partial": nn.RoPE(DIM // 2, scale=0.5),
    "llama3": Llama3RoPE(DIM, scaling_config=LLAMA3),
    "yarn": YarnRoPE(DIM, scaling_factor=4.0, traditional=True),
    "longrope": SuScaledRoPE(DIM // 2, long_factor=2.0),
    "none": NoPE(),
}


def rotated(rotation: RotaryPositions, x: Any, positions: Any) -> Any:
    """Return rows (n, heads, dim), rotated by the compiled loop."""
    result = x.copy()
    if rotation.pairs:
        cosines, sines = rotation.angles(positions)[:, :, 0]
        for row in range(len(x)):
            for head in range(x.shape[1]):
                rotate_loop()(result[row, head], cosines[row], sines[row], rotation.neighbors)
    return result


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((count, HEADS, DIM), np.float32)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("first", [0, 5, BLOCK - 3, 5000])
def test_rotation_matches_module(name: str, first: int) -> None:
    rotation = RotaryPositions.of(MODULES[name])
    assert rotation is not None
    x = rows(7)
    found = rotated(rotation, x, np.arange(first, first + 7))
    expected = MODULES[name](mx.array(x).swapaxes(0, 1)[None], offset=first)
    assert np.abs(found - np.array(expected[0].swapaxes(0, 1))).max() < 1e-5


def test_rows_are_bit_identical_at_any_positions() -> None:
    rotation = RotaryPositions.of(MODULES["yarn"])
    assert rotation is not None
    x, positions = rows(5), np.array([BLOCK + 1, 7, 3 * BLOCK, 7, BLOCK - 1])
    together = rotated(rotation, x, positions)
    for row, position in enumerate(positions):
        other = RotaryPositions.of(MODULES["yarn"])
        assert other is not None
        alone = rotated(other, x[row : row + 1], np.array([position]))
        assert np.array_equal(alone, together[row : row + 1])


def test_angle_cache_is_bounded() -> None:
    rotation = RotaryPositions.of(MODULES["halves"])
    assert rotation is not None
    for block in range(MOST_BLOCKS + 9):
        rotation.angles(np.array([block * BLOCK]))
    assert len(rotation._blocks) == MOST_BLOCKS


def test_unknown_rope_modules_are_unchanged() -> None:
    assert RotaryPositions.of(ProportionalRoPE(DIM, DIM // 2)) is None
