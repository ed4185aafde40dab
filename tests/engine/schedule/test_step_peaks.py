"""An engine that is opened again on a model asks for what it asked for at first, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from tiny_families import build, uncompiled

from penstock.engine.core import Core
from penstock.engine.schedule import step_peaks
from penstock.errors import NeverFits

LIMITS: dict[str, Any] = {"max_kv_size": 512, "prefill_chunk": 128, "max_batch_size": 4}
FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mamba2", "falcon_h1", "qwen3_next"]


def asked(model: Any, limit_bytes: int | str = "400MB", **settings: Any) -> int:
    """Return the bytes that an engine sets aside at its start, or those that it lacks room for."""
    try:
        core = Core(model, memory_limit=limit_bytes, **{**LIMITS, **settings})
    except NeverFits as error:
        return error.needed_bytes
    try:
        return core.budget.fixed_bytes
    finally:
        core.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_engine_asks_for_what_the_first_did(family: str) -> None:
    with uncompiled():
        model = build(family)
        first = asked(model)
        assert [asked(model) for _ in range(3)] == [first] * 3
        # Of a smaller limit the index takes less.
        little = asked(model, first) // 2
        lacking = [asked(model, little) for _ in range(3)]
        assert lacking == [lacking[0]] * 3
        assert lacking[0] > little


def test_other_limits_and_other_weights_are_measured_by_themselves() -> None:
    model = build("llama")
    first = asked(model)
    assert asked(model, prefill_chunk=256) > first
    asked(model, max_batch_size=8)
    assert len(step_peaks._measured[id(model)]) == 3
    model.set_dtype(mx.float16)
    assert asked(model) != first
    assert len(step_peaks._measured[id(model)]) == 4


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    model = build("llama")
    asked(model)
    known = id(model)
    assert known in step_peaks._measured
    del model
    gc.collect()
    assert known not in step_peaks._measured
