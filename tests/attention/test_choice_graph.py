"""A decode step with block selection is one lazy graph with few operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine_faults import model_of

from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.devices import using
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.selection import block_choice
from penstock.engine.core import Core
from penstock.engine.request import Request
from penstock.errors import StepFailed
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock_bench.step_operations import layer_operations

SETTINGS: dict[str, Any] = {
    "memory_limit": "120MB",
    "block_size": 16,
    "prefill_chunk": 128,
    "max_batch_size": 3,
    "max_kv_size": 1_024,
    "attend_tokens": 128,
}
PROMPTS = [tuple(1 + (7 * n * n + seed) % 500 for n in range(tokens)) for seed, tokens in
           ((0, 260), (1, 300), (2, 40))]  # fmt: skip


def compiles() -> bool:
    """Return whether MLX compiles functions on this machine."""
    calls = []
    function = mx.compile(lambda x: calls.append(x) or x + 1)
    for _ in range(2):
        function(mx.ones(1))
    return len(calls) == 1


needs_traces = pytest.mark.skipif(
    not compiles(), reason="without a C++ compiler MLX compiles nothing, and so traces nothing"
)


class _Traced(Exception):
    """Raised to end a trace before MLX compiles it."""


class TracedModel:
    """A model whose decode steps are traced before they run: an evaluation raises ValueError."""

    def __init__(self, core: Core) -> None:
        self.model, self.tails = core.runner.model, core.tails
        self.traced = 0

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        if tokens.shape[1] == 1:
            self._trace(tokens, cache)
        logits: mx.array = self.model(tokens, cache=cache)
        return logits

    def _trace(self, tokens: mx.array, cache: Any) -> None:
        def body(tokens: mx.array) -> mx.array:
            self.model(tokens, cache=cache)
            raise _Traced

        sides = self.tails._keys, self.tails._values
        before = [[side.reshape(side.shape) for side in one] for one in sides]  # written in place
        try:
            mx.compile(body)(tokens)
        except _Traced:
            self.traced += 1
        finally:
            self.tails._keys, self.tails._values = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@contextmanager
def running(device: AttentionBackend, **settings: Any) -> Iterator[Core]:
    with using(device):
        core = Core(model_of("llama"), **{**SETTINGS, **settings})
        try:
            yield core
        finally:
            core.close()


def answers(core: Core) -> list[list[int]]:
    handles = [core.submit(Request(prompt=p, max_tokens=12, ignore_eos=True)) for p in PROMPTS]
    while core.step():
        core.view.check()
    return [list(choice.tokens) for handle in handles for choice in handle.result(0.0)]


CODES = {
    "kv_cache_quantization": "turbo8",
    "kv_cache_quantize_when": "active",
    "kv_cache_min_quantize_tokens": 0,
}


@needs_traces
@pytest.mark.parametrize("more", [{}, {"attend_rest": True}, CODES, {"block_size": 24}])
def test_arrays_are_not_evaluated_during_step(more: dict[str, Any]) -> None:
    with running(GPUBackend(), **more) as core:
        expected = answers(core)
    with running(GPUBackend(), **more) as core:
        model = core.runner.model = TracedModel(core)  # type: ignore[assignment]
        assert answers(core) == expected
        assert model.traced > 10
        core.runner.model = model.model


@needs_traces
@pytest.mark.parametrize("reads", [np.asarray, mx.eval, mx.array.tolist])
def test_check_detects_host_reads(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a choice that is looked at."""
    choice = block_choice.best_blocks

    def looked_at(*arguments: Any) -> list[mx.array]:
        blocks = choice(*arguments)
        reads(blocks[0])
        return blocks

    monkeypatch.setattr(block_choice, "best_blocks", looked_at)
    with running(GPUBackend()) as core:
        check_trace_fails(core)


@needs_traces
def test_check_detects_compiled_loops() -> None:
    """Negative control: a CPU begins to compute in each layer, and its loops wait for queries."""
    pytest.importorskip("numba")
    with running(CPUBackend()) as core:
        check_trace_fails(core)


def check_trace_fails(core: Core) -> None:
    plain = core.runner.model
    core.runner.model = TracedModel(core)  # type: ignore[assignment]
    handle = core.submit(Request(prompt=PROMPTS[0], max_tokens=12, ignore_eos=True))
    while core.step():
        pass
    with pytest.raises(StepFailed, match=r"\[(async_)?eval\] .*transform"):
        handle.result(0.0)
    core.runner.model = plain


def test_operations_per_layer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = layer_operations()
    assert counts.met
    more = 0 if compiles() else 2
    assert counts.own == 17 + more and counts.whole <= 19 + more
    assert counts.choice <= 40 + more and counts.further <= 11
    lacks = block_choice._lacks
    monkeypatch.setattr(block_choice, "_lacks", lambda scores: mx.exp(lacks(scores)))
    worse = layer_operations()
    assert worse.choice == counts.choice + 1 and not worse.met, "negative control"
