"""Models with one latent KV head, keys and values of two sizes, in codecs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tiny_families
from core_parts import cached_nodes, layer_shapes, retention_of
from tiny_families import prompt_of

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request, Sampling
from penstock.engine.retention.requantize import Requantizer
from penstock.errors import SettingError
from penstock.kv.codecs.coded import Coded

STEADY = ["deepseek_v2", "deepseek_v3", "kimi_linear"]
PICKING = ["deepseek_v32"]
"""They pick tokens, or experts, by what is held: a small difference may pick another one."""
if "PENSTOCK_WHOLE_MATRIX" in os.environ:
    STEADY += ["bailing_hybrid", "bailing_moe_v3", "glm4_moe_lite", "kimi_k25"]
    STEADY += ["kimi_vl", "minicpm3", "mistral4", "youtu_llm"]
    PICKING += ["glm_moe_dsa", "kimi_k3", "longcat_flash", "longcat_flash_ngram"]
BLOCK = 64
SMALL: dict[str, Any] = {
    "memory_limit": "400MB",
    "block_size": BLOCK,
    "prefill_chunk": BLOCK,
    "max_batch_size": 4,
    "kv_cache_min_quantize_tokens": BLOCK,
    "kv_cache_quantize_when": "active",
}
PROMPT = prompt_of(300, seed=1)


@functools.cache
def model(family: str) -> Any:
    return tiny_families.build(family)


@contextmanager
def engine(made: Any, codec: str | None) -> Iterator[Core]:
    with tiny_families.uncompiled():
        core = Core(made, **SMALL, kv_cache_quantization=codec)
        try:
            yield core
            core.view.check()
        finally:
            core.close()


def submit(core: Core, prompt: Sequence[int], **more: Any) -> Handle:
    return core.submit(Request(prompt=tuple(prompt), **{"max_tokens": 12, **more}))


def drain(core: Core) -> None:
    while core.step():
        core.view.check()
        assert core.ledger.used_bytes <= core.ledger.limit_bytes


def tokens(handle: Handle) -> list[int]:
    return handle.result(timeout_seconds=0)[0].tokens


def likely(core: Core) -> dict[int, float]:
    """Return the log-probabilities of the next token after a cached prompt."""
    for _ in range(2):
        sampling = Sampling(logprobs=True, top_logprobs=20)
        handle = submit(core, PROMPT, max_tokens=1, sampling=sampling)
        drain(core)
    assert core.view.stats().hit_tokens == 4 * BLOCK
    return dict(handle.result(timeout_seconds=0)[0].logprobs[0].top)


def apart(made: Any, *codecs: str) -> list[float]:
    """Return how much each codec changes the log-probabilities."""
    with engine(made, None) as core:
        expected = likely(core)
    found = []
    for codec in codecs:
        with engine(made, codec) as core:
            other = likely(core)
        both = expected.keys() & other.keys()
        assert len(both) >= 8
        found.append(max(abs(expected[token] - other[token]) for token in both))
    return found


def coded(core: Core) -> int:
    """Return the number of tokens that are quantized on both sides of all layers."""
    found = 0
    for node in cached_nodes(core):
        kinds = {isinstance(side, Coded) for layer in node.segment.layers for side in layer}
        assert len(kinds) == 1
        found += node.segment.tokens if kinds == {True} else 0
    return found


@pytest.mark.parametrize("codec", ["turbo4", "turbo8"])
@pytest.mark.parametrize("family", [*STEADY, *PICKING])
def test_text_is_equal_cold_warm_and_batched(family: str, codec: str) -> None:
    with engine(model(family), codec) as core:
        first = submit(core, PROMPT)
        drain(core)
        assert coded(core) == 3 * BLOCK
        handles = [submit(core, PROMPT), submit(core, PROMPT[:200]), submit(core, PROMPT)]
        drain(core)
        assert tokens(handles[0]) == tokens(handles[2]) == tokens(first)
        assert core.view.stats().hit_tokens >= 3 * 3 * BLOCK


@pytest.mark.parametrize("family", STEADY)
def test_eight_bits_are_near_full_precision(family: str) -> None:
    """Two bits are not, so the codes are read."""
    eight, two = apart(model(family), "turbo8", "turbo2")
    assert eight < 0.35 < two


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v32"])
def test_indivisible_head_sizes_are_refused_with_reason(family: str) -> None:
    with pytest.raises(SettingError, match="layer 0: affine8 uses groups of 64 values"):
        Core(model(family), **SMALL, kv_cache_quantization="8")
    if family != "deepseek_v2":  # the latent, but not the positions beside it
        with pytest.raises(SettingError, match="which do not divide a head of 8; no group does"):
            Core(model(family), **SMALL, kv_cache_quantization="8g32")


@pytest.mark.parametrize("codec", ["8", "k8v4", "turbo4"])
def test_quantized_latent_of_realistic_size_keeps_text(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A multiple of 64, as DeepSeek's 512, with 64 position dimensions."""
    for name, size in (("kv_lora_rank", 128), ("qk_rope_head_dim", 64)):
        monkeypatch.setitem(tiny_families.EXCEPTIONS, ("deepseek_v3", name), size)
    made = tiny_families.build("deepseek_v3")
    with engine(made, codec) as core:
        shapes = {(each.kv_heads, each.key_dim, each.value_dim) for each in layer_shapes(core)}
        assert shapes == {(1, 128, 64)}
        first = submit(core, PROMPT)
        drain(core)
        again = submit(core, PROMPT)
        drain(core)
        assert tokens(first) == tokens(again)
        assert coded(core) == 3 * BLOCK
        requantizer = retention_of(core, Requantizer)
        assert requantizer is not None
        nodes = [n for n in cached_nodes(core) if isinstance(n.segment.layers[0][0], Coded)]
        held = sum(node.segment.nbytes for node in nodes)
        assert held == pytest.approx(3 * BLOCK * requantizer.token_bytes)
