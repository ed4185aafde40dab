"""Selective attention in MLX operations works with the features that compiled loops support."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_faults import model_of
from spilled_engine import running as spilled
from spilled_engine import spilling_of
from tiny_families import build

from penstock.attention.devices import using
from penstock.attention.mlx_backend import GPUBackend
from penstock.engine.core import Core
from penstock.engine.request import Request

SETTINGS: dict[str, Any] = {
    "memory_limit": "200MB",
    "block_size": 16,
    "prefill_chunk": 64,
    "max_batch_size": 3,
    "max_kv_size": 1_024,
    "attend_tokens": 128,
}
CODES: dict[str, Any] = {
    "kv_cache_quantization": "turbo8",
    "kv_cache_min_quantize_tokens": 0,
}
TOKENS = 16


def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 90) for _ in range(tokens))


LONG, OTHER = prompt(260, 0), prompt(200, 1)


@contextmanager
def running(family: str, **settings: Any) -> Iterator[Core]:
    model = build(family) if family == "cohere2" else model_of(family)
    with using(GPUBackend()):
        core = Core(model, **{**SETTINGS, **settings})
        try:
            yield core
            core.view.check()
        finally:
            core.close()


def answers(core: Core, *prompts: Sequence[int], **more: Any) -> list[list[int]]:
    asked = [Request(prompt=tuple(p), max_tokens=TOKENS, ignore_eos=True, **more) for p in prompts]
    handles = [core.submit(request) for request in asked]
    while core.step():
        pass
    return [list(choice.tokens) for handle in handles for choice in handle.result(0.0)]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attend_rest": True, "block_size": 24}),
        ("llama", {**CODES, "kv_cache_quantize_when": "active"}),
        ("llama", CODES),
        ("falcon_h1", {}),
        ("cohere2", {}),
    ],
)
def test_batched_cached_and_speculative_text_matches_single_requests(
    family: str, more: dict[str, Any]
) -> None:
    """In batches, cached, for n choices, and with proposals."""
    # A codec at rest changes what a cached prompt is read as: its cold text is another.
    warms = more is CODES
    with running(family, **more) as core:
        cold = [answers(core, one)[0] for one in (LONG, OTHER)]
        expected = [answers(core, one)[0] for one in (LONG, OTHER)] if warms else cold
        assert answers(core, LONG, OTHER) == expected
        assert answers(core, LONG, n=2) == [expected[0]] * 2
    with running(family, **more, attend_tokens=512) as core:
        assert answers(core, LONG) != expected[:1], "negative control: it reads a part"
    if family == "cohere2":
        return
    with running(family, **more, speculative_tokens=4) as core:
        asked = {"prediction": tuple(expected[0])}
        assert not warms or answers(core, LONG) == cold[:1]
        assert answers(core, LONG, **asked) == expected[:1]
        assert core.counters.accepted_tokens > 3


def test_prompt_logprobs_use_full_attention() -> None:
    told = []
    for tokens in (128, 512):
        with running("llama", attend_tokens=tokens) as core:
            handle = core.submit(Request(prompt=LONG, max_tokens=2, prompt_logprobs=2))
            while core.step():
                pass
            assert handle.prompt_logprobs is not None and handle.prompt_logprobs.done
            told.append(list(handle.prompt_logprobs))
    assert told[0] == told[1] and len(told[0]) == len(LONG)


@pytest.mark.parametrize("more", [{}, {"attend_rest": True}])
def test_spilled_text_matches_text_from_memory(tmp_path: Path, more: dict[str, Any]) -> None:
    asked = prompt(700, 2)
    with using(GPUBackend()):
        with spilled(tmp_path / "whole", active_kv_size=None, **more) as core:
            expected = answers(core, asked)
        with spilled(tmp_path / "spilled", **more) as core:
            assert answers(core, asked) == expected
            assert spilling_of(core).spilled_tokens >= 128
