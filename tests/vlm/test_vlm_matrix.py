"""Every language model of the installed mlx-vlm runs on the engine, or is listed."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from combinations import SOAK
from model_matrix import examine
from tiny_vlm_families import EXCEPTIONS, MLX_VLM, OTHERS, families

FAMILIES = families()
NEW = (
    *("qwen4_exp", "glm5_next", "hy_v4", "deepseek_v4", "mimo_v2", "minimax_m3", "kimi_k3"),
    *("step3p7", "inkling"),
)
"""Families that people ask for, and most of which mlx-lm lacks."""


@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_plain_loop(family: str) -> None:
    """Cold, warm, next turn and batched; restart and window for new ones and one of each kind."""
    whole = SOAK or family in NEW or family in MLX_VLM.representatives()
    row = examine(family, MLX_VLM, whole=whole)
    listed = MLX_VLM.documented().get(family)
    assert listed == row.line(), "run python tools/write_models_docs.py mlx-vlm"


def test_at_least_95_percent_of_families_reuse_prefixes() -> None:
    assert set(FAMILIES) == set(MLX_VLM.documented())
    assert len(FAMILIES) > 150
    assert MLX_VLM.reuse_share() >= 0.95


@pytest.mark.parametrize("family", NEW)
def test_new_families_reuse_prefixes(family: str) -> None:
    reuse = MLX_VLM.documented()[family].split("|")[4].strip()
    assert reuse in ("yes", "walk-back")


def test_exceptions_refer_to_existing_families() -> None:
    assert not set(OTHERS) & set(FAMILIES)
    own = {place.removesuffix(".config") for place, _ in EXCEPTIONS if place.endswith(".config")}
    assert own <= set(FAMILIES), own - set(FAMILIES)
