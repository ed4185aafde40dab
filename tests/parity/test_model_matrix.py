"""Every architecture of the installed mlx-lm runs on the engine, or is listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_families
from combinations import SOAK, pairs
from model_matrix import BLOCK, MLX_LM, Differs, examine, examine_window

from penstock.engine.model.runner import PrefillOutput, Runner

FAMILIES = tiny_families.families()


@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_plain_loop(family: str) -> None:
    """Cold, warm, next turn and batched; restart and window for one of each kind."""
    whole = SOAK or family in MLX_LM.representatives()
    row = examine(family, whole=whole)
    assert MLX_LM.documented().get(family) == row.line(), "run python tools/write_models_docs.py"


WINDOWED = ("llama4", "gemma3", "gpt_oss", "gear", "cohere2")
"""A family for each way of reading windows: chunks of attention, read in place, and joined."""


@pytest.mark.parametrize(
    ("family", "window", "places"),
    pairs(WINDOWED, (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1), (1, 4)),
)
def test_windows_around_tail_length_match_plain(family: str, window: int, places: int) -> None:
    """Shorter than a tail, equal, and longer."""
    examine_window(family, window, places)


def test_at_least_95_percent_of_families_reuse_prefixes() -> None:
    assert set(FAMILIES) == set(MLX_LM.documented())
    assert len(FAMILIES) > 100
    assert MLX_LM.reuse_share() >= 0.95


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "deepseek_v41", "mamba2"])
def test_check_detects_uncomputed_kv(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a hundredth more of the first chunk is kept than was computed."""
    real = Runner.prefill

    def louder(
        self: Runner, tokens: Any, parts: Any, position: int, *more: Any, **named: Any
    ) -> PrefillOutput:
        chunk = real(self, tokens, parts, position, *more, **named)
        if position:
            return chunk
        layers = tuple((keys * 1.01, values * 1.01) for keys, values in chunk.segment.layers)
        states = tuple(
            tuple(None if array is None else array * 1.01 for array in state)
            for state in chunk.states
        )
        return PrefillOutput(replace(chunk.segment, layers=layers), states)

    monkeypatch.setattr(Runner, "prefill", louder)
    with pytest.raises(Differs):
        examine(family)
