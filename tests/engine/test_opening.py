"""Opening an engine stays within its limit, near the least possible limit."""

from __future__ import annotations

import functools
import gc
import random
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from core_parts import fixed_bytes_of
from small_models import BASE
from small_models import build as small_model

from penstock.engine import fixed_memory
from penstock.engine.core import Core
from penstock.engine.model import step_peaks, step_trials
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.model.runner import Runner
from penstock.engine.run import measured_steps
from penstock.errors import NeverFits, StepTooLarge
from penstock.kv.segment import Segment
from penstock.ledger import Ledger

SMALL: dict[str, Any] = {"max_batch_size": 1, "max_kv_size": 512, "kernels": "off"}
SHORT: dict[str, Any] = {"prefill_chunk": 8, "block_size": 8}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("wide", {**SHORT, "attend_tokens": 128}),
    ("wide", {**SHORT, "kv_cache_quantization": "turbo4"}),
    ("wide", {**SHORT, "attend_tokens": 128, "kv_cache_quantization": "turbo8"}),
    ("wide", {"prefill_chunk": 128, "attend_tokens": 128, "attend_rest": True}),
    ("wide", {**SHORT, "speculative_tokens": 2, "draft": True}),
    ("wide", {**SHORT, "max_batch_size": 8, "kv_cache_quantization": "8"}),
    ("gpt_oss", {**SHORT, "attend_tokens": 128}),
    ("falcon_h1", {**SHORT, "attend_tokens": 128}),
    ("qwen3_next", {**SHORT, "kv_cache_quantization": "turbo4"}),
    ("deepseek_v41", SHORT),
    ("gemma2", SHORT),
]
CALIBRATED = CASES[:2]
"""A chunk of a wide model takes many times the bytes of the weights of its attention."""


@functools.cache
def model_of(family: str) -> Any:
    """Return a tiny model of a family, or a llama whose layers compute many numbers of a token."""
    if family != "wide":
        return tiny_families.build(family)
    mx.random.seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    size = {"hidden_size": 32, "intermediate_size": 32_768, "num_hidden_layers": 2}
    config = {
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": tiny_families.VOCABULARY_TOKENS,
    }
    model = small_model({**BASE, **config, **heads, **size})
    mx.eval(model.parameters())
    return model


class Peak:
    """The peak of MLX's bytes since construction, even if others reset MLX's peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reset, self._most = mx.reset_peak_memory, 0
        self.reset()
        monkeypatch.setattr(mx, "reset_peak_memory", self._note)

    def _note(self) -> None:
        self._most = self.nbytes
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes, those included that were there before."""
        return max(self._most, mx.get_peak_memory())


def opened(family: str, limit_bytes: int, *, draft: bool = False, **settings: Any) -> Core:
    """Open an engine that measures its steps as the first in its process does."""
    model = model_of(family)
    step_peaks._measured.clear()
    draft_model = (model_of("llama"), None) if draft else None
    limits = {**SMALL, **settings}
    return Core(model, None, memory_limit=limit_bytes, draft_model=draft_model, **limits)


def least_limit(family: str, settings: dict[str, Any]) -> int:
    """Return approximately the least limit at which an engine opens."""
    limit = 1_000_000_000
    for _ in range(2):  # of a smaller limit the index takes less
        core = opened(family, limit, **settings)
        limit = fixed_bytes_of(core)
        core.close()
    return limit


def peak_bytes(family: str, settings: dict[str, Any], limit: int, patch: pytest.MonkeyPatch) -> int:
    """Return the most bytes while an engine is opened, the weights included."""
    gc.collect()
    models = [model_of(family)] + ([model_of("llama")] if settings.get("draft") else [])
    others = mx.get_active_memory() - sum(map(weight_bytes, models))
    peak = Peak(patch)
    opened(family, limit, **settings).close()
    return peak.nbytes - others


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_engine_construction_stays_within_limit(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = least_limit(family, settings)
    limit += limit // 16  # measured steps differ by some percent
    assert peak_bytes(family, settings, limit, monkeypatch) <= limit


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """Draw a family and settings independently."""
    draw = random.Random(seed)
    family = draw.choice(["wide", "gpt_oss", "falcon_h1", "qwen3_next", "deepseek_v41", "gemma2"])
    settings: dict[str, Any] = {
        "prefill_chunk": draw.choice([8, 32, 128, 512]),
        "block_size": draw.choice([8, 16, 32, 64]),
        "max_batch_size": draw.choice([1, 2, 8]),
    }
    kinds: list[dict[str, Any]] = [{}, {"speculative_tokens": 2}]
    if family in ("wide", "gpt_oss", "falcon_h1"):
        kinds.append({"attend_tokens": 128})
    if family == "wide":
        kinds += [{"kv_cache_quantization": codec} for codec in ("turbo4", "8")]
    return family, {**settings, **draw.choice(kinds)}


def worst(family: str, settings: dict[str, Any], patch: pytest.MonkeyPatch) -> float:
    """Return the largest excess over limits around the least one, opened or refused."""
    for bound in ("MOST_SECONDS", "LEAST_SECONDS"):  # on a busy machine, too
        patch.setattr(step_trials, bound, float("inf"))
    core = opened(family, 1_000_000_000, **settings)
    least, shares = fixed_bytes_of(core), []
    core.close()
    for part in (1.1, 1.0, 0.9, 0.7, 0.5):
        limit = int(part * least)
        if limit <= 1.05 * weight_bytes(model_of(family)):
            continue
        gc.collect()
        others = mx.get_active_memory() - weight_bytes(model_of(family))
        peak = Peak(patch)
        try:
            opened(family, limit, **settings).close()
        except NeverFits:
            assert part < 1.1
        shares.append((peak.nbytes - others) / limit)
        patch.setattr(mx, "reset_peak_memory", peak.reset)
    return max(shares)


@pytest.mark.parametrize("seed", range(10))
def test_engine_construction_stays_within_limit_for_random_settings(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is refused: each step is reserved before it runs."""
    assert worst(*drawn(seed), monkeypatch) <= 1.0


def test_check_detects_unreserved_trial_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    settings = {"prefill_chunk": 512, "block_size": 32, "max_batch_size": 8}
    with pytest.MonkeyPatch.context() as unreserved:
        unreserved.setattr(fixed_memory, "partial", lambda *given: measured_steps.no_reservation)
        unreserved.setattr(Ledger, "free_bytes", property(lambda ledger: 10**12))
        assert worst("wide", settings, monkeypatch) > 1.1
    assert worst("wide", settings, monkeypatch) <= 1.0


def test_oversized_step_is_refused_within_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A usual chunk takes 280 MB, but only 100 MB are free beside the weights."""
    weights = weight_bytes(model_of("wide"))
    gc.collect()
    others = mx.get_active_memory() - weights
    peak = Peak(monkeypatch)
    with pytest.raises(StepTooLarge):
        opened("wide", weights + 100_000_000, prefill_chunk=4_096)
    assert peak.nbytes - others <= weights + 100_000_000


@pytest.mark.parametrize(("family", "settings"), CALIBRATED, ids=str)
def test_check_detects_unchunked_calibration_run(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    read_run = Runner.read_run

    def at_once(
        runner: Runner, tokens: Any, position: int, piece: int, *more: Any
    ) -> list[Segment]:
        return read_run(runner, tokens, position, len(tokens), *more)

    limit = least_limit(family, settings)
    limit += limit // 16
    monkeypatch.setattr(Runner, "read_run", at_once)
    assert peak_bytes(family, settings, limit, monkeypatch) > limit


@pytest.mark.parametrize(("family", "settings"), CALIBRATED, ids=str)
def test_limit_too_small_for_calibration_run_is_refused(
    family: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(NeverFits, match=r"need [\d.,]+ .B and more; the limit is"):
        opened(family, int(0.98 * least_limit(family, settings)) - 200_000, **settings)
