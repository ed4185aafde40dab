"""Decode steps of mlx-lm's MiniMax M3 read the blocks that its own index chooses, in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_families
from core_parts import way_of, why_of
from model_matrix import Differs, examine
from step_copies import step_bytes

from penstock.attention import chosen_tokens
from penstock.engine.core import Core

FAMILY = "minimax_m3_vl"


def test_text_matches_own_code() -> None:
    """Cold, warm, in the next turn, in a batch, and restored from disk."""
    assert examine(FAMILY).way == "indexed"


def test_text_depends_on_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the worst blocks are chosen."""
    best = chosen_tokens._best
    monkeypatch.setattr(
        chosen_tokens, "_best", lambda scores, *rest, **named: best(-scores, *rest, **named)
    )
    with pytest.raises(Differs):
        examine(FAMILY, whole=False)


def test_decode_step_copies_no_kv() -> None:
    settings: dict[str, Any] = {"memory_limit": "400MB", "block_size": 64, "prefill_chunk": 256}
    core = Core(tiny_families.build(FAMILY), **settings)
    try:
        assert way_of(core) == "indexed", why_of(core)
        assert step_bytes(core, 2_048) < 0.12
        # Negative control: contiguous keys and values.
        core.runner.fitness = replace(core.runner.fitness, way="joined")
        assert step_bytes(core, 2_048) > 0.2
    finally:
        core.close()
