"""A reopened engine reserves the same bytes as the first."""

from __future__ import annotations

import gc
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from core_parts import fixed_bytes_of
from tiny_families import build, uncompiled

from penstock.attention import devices
from penstock.engine.core import Core
from penstock.engine.model import step_peaks, step_trials
from penstock.engine.model.remembered_file import RememberedPeaks
from penstock.engine.model.runner import Runner
from penstock.engine.model.step_peaks import StepPeaks
from penstock.engine.model.step_trials import MeasuredStep, StepTrials
from penstock.engine.run import measured_steps
from penstock.engine.run.measured_steps import no_bound, no_reservation
from penstock.errors import NeverFits
from penstock.user_cache import MOST_FILES

LIMITS: dict[str, Any] = {"max_kv_size": 512, "prefill_chunk": 128, "max_batch_size": 4}
FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mamba2", "falcon_h1", "qwen3_next"]


def asked(model: Any, limit_bytes: int | str = "400MB", **settings: Any) -> int:
    """Return the bytes that an engine reserves at its start, or those that it lacks."""
    try:
        core = Core(model, memory_limit=limit_bytes, **{**LIMITS, **settings})
    except NeverFits as error:
        return error.needed_bytes
    try:
        return fixed_bytes_of(core)
    finally:
        core.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_second_engine_reuses_measured_peaks(family: str) -> None:
    with uncompiled():
        model = build(family)
        first = asked(model)
        assert [asked(model) for _ in range(3)] == [first] * 3
        # Of a smaller limit the index takes less.
        little = asked(model, first) // 2
        lacking = [asked(model, little) for _ in range(3)]
        assert lacking == [lacking[0]] * 3
        assert lacking[0] > little


def test_peaks_are_measured_per_limits_and_weights() -> None:
    model = build("llama")
    step_peaks._measured.clear()
    first = asked(model)
    assert asked(model, prefill_chunk=256) > first
    asked(model, max_batch_size=8)
    assert len(step_peaks._measured) == 3
    model.set_dtype(mx.float16)
    assert asked(model) != first
    assert len(step_peaks._measured) == 4
    asked(build("gemma2"))
    assert len(step_peaks._measured) == 5


def test_peaks_are_measured_per_number_of_lanes() -> None:
    """Another process may run on fewer cores."""
    device: Any = devices.current()
    if not hasattr(device, "lanes"):
        pytest.skip("this device has no lanes")
    model = build("llama")
    step_peaks._measured.clear()
    for lanes in (1, 2, 1):
        with devices.using(replace(device, lanes=lanes)):
            asked(model)
    assert len(step_peaks._measured) == 2


RECURRENT = [
    *("mamba", "mamba2", "falcon_h1", "qwen3_next", "jamba", "rwkv7", "lfm2", "nemotron_h"),
    *("kimi_linear", "recurrent_gemma", "bailing_moe_linear", "baichuan_m1", "granitemoehybrid"),
]


WHOLE_ROUNDS = 3
"""Measurements of all steps: on a busy machine lagging threads of MLX add some percent to one."""


def extrapolated(
    family: str, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[int, int, int]:
    """Return fixed bytes with all steps measured, and extrapolated from short ones.

    Also return the tokens of the longest step of the second engine.
    """
    longest: list[int] = []
    with uncompiled(), monkeypatch.context() as patch:
        model = build(family)
        patch.setattr(step_trials, "LEAST_SECONDS", step_trials.MOST_SECONDS)
        measured: list[int] = []
        with patch.context() as plain:
            plain.setattr(step_trials, "UNREPEATED", 1.0)
            for _ in range(WHOLE_ROUNDS):
                measured.append(asked(model, **settings))
                step_peaks._measured.clear()
        whole = min(measured)
        patch.setattr(step_trials, "MOST_SECONDS", 0.0)
        prefill = Runner.prefill

        def noting(runner: Runner, tokens: Sequence[int], *given: Any, **more: Any) -> Any:
            longest.append(len(tokens))
            return prefill(runner, tokens, *given, **more)

        patch.setattr(Runner, "prefill", noting)
        reckoned = asked(model, **settings)
        step_peaks._measured.clear()
    return whole, reckoned, max(longest)


@pytest.mark.parametrize(
    ("family", "chunk"),
    [
        *((family, 128) for family in ("llama", "gemma2", "gpt_oss", "mamba2", "deepseek_v41")),
        *((family, 512) for family in RECURRENT),
    ],
)
def test_extrapolated_peak_of_slow_model_is_upper_bound(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, reckoned, longest = extrapolated(family, monkeypatch, prefill_chunk=chunk)
    recurrent = family in RECURRENT
    assert longest == (measured_steps.SCAN_TRIAL_TOKENS if recurrent else step_trials.TRIAL_TOKENS)
    assert reckoned >= 0.99 * whole
    assert reckoned <= whole + (20_000_000 if chunk == 128 else 60_000_000)


def test_check_detects_missing_scan_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(measured_steps, "scan_bytes", lambda *given: 0)
    whole, reckoned, _ = extrapolated("mamba2", monkeypatch, prefill_chunk=256)
    assert reckoned < 0.99 * whole


def test_step_is_measured_with_little_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extrapolated step that does not fit is no reason to refuse a model that fits."""
    whole, reckoned, _ = extrapolated("rwkv7", monkeypatch, prefill_chunk=256)
    assert reckoned > 1.5 * whole
    monkeypatch.setattr(step_trials, "MOST_SECONDS", 0.0)
    with uncompiled():
        assert asked(build("rwkv7"), int(1.3 * whole), prefill_chunk=256) < reckoned
    step_peaks._measured.clear()


def test_extrapolation_counts_constant_bytes_once() -> None:
    """A step of 1,000 bytes and 10 per token, measured up to 64 tokens."""
    step = MeasuredStep(64, 1_640, 0.1, 4, 1_040)
    assert 6_120 <= step.scaled(512) <= 10_600
    assert MeasuredStep(64, 1_640, 0.1).scaled(512) == 13_120


def test_measured_steps_share_one_time_limit() -> None:
    """What the first kind of step has used up is missing to the others."""
    ran = 0.0

    def run(count: int) -> None:
        nonlocal ran
        ran += 0.001 * count
        time.sleep(0.001 * count)

    trials = StepTrials(no_reservation, no_bound, alone=True, seconds=0.1, clock=lambda: ran)
    reached = [trials.measure(run, 512, 1).size for _ in range(3)]
    assert reached == [64, step_trials.TRIAL_TOKENS, step_trials.TRIAL_TOKENS]


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_reloaded_model_reuses_measured_peaks(family: str) -> None:
    step_peaks._measured.clear()
    with uncompiled():
        first = asked(build(family))
        measured = dict(step_peaks._measured)
        gc.collect()
        assert asked(build(family)) == first
    assert step_peaks._measured == measured


def test_number_of_cached_measurements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_peaks, "MOST_FORMS", 2)
    step_peaks._measured.clear()
    model = build("llama")
    for tokens in (64, 128, 256):
        asked(model, prefill_chunk=tokens)
    kept = list(step_peaks._measured)
    assert len(kept) == 2
    asked(model, prefill_chunk=64)
    assert kept[1] in step_peaks._measured and kept[0] not in step_peaks._measured


PEAKS = StepPeaks(7, 5, 3, 0, 4096, 0.25, 512)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of saved peaks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "steps"


def test_peaks_are_saved_for_next_process(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_peaks, "REMEMBERED_SECONDS", 0.0)
    monkeypatch.setattr(step_trials, "LEAST_SECONDS", step_trials.MOST_SECONDS)
    steps: list[int] = []
    prefill = Runner.prefill

    def noting(runner: Runner, tokens: Sequence[int], *given: Any, **more: Any) -> Any:
        steps.append(len(tokens))
        return prefill(runner, tokens, *given, **more)

    with uncompiled():
        model = build("falcon_h1")
        step_peaks._measured.clear()
        first = asked(model)
        monkeypatch.setattr(Runner, "prefill", noting)
        step_peaks._measured.clear()  # as in another process
        assert asked(model) == first
        assert steps == []
        assert asked(model, prefill_chunk=64) < first  # other settings are measured by themselves
        assert max(steps) == 64
    (file, _) = cached.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(cached.stat().st_mode) == 0o700


def test_short_measurement_is_not_saved(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_peaks, "REMEMBERED_SECONDS", 60.0)
    step_peaks._measured.clear()
    asked(build("llama"))
    assert not cached.exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "list", "pipe", "folder", "long"])
def test_damaged_file_is_measured_again(damage: str, cached: Path) -> None:
    RememberedPeaks("a").write(PEAKS)
    assert RememberedPeaks("a").read() == PEAKS
    (file,) = cached.iterdir()
    text = file.read_text()
    file.unlink()
    content = json.loads(text)
    if damage == "pipe":
        os.mkfifo(file)
    elif damage == "folder":
        file.mkdir()
    elif damage == "other":  # the file of another model, under this one's name
        RememberedPeaks("b").write(PEAKS)
        next(cached.iterdir()).rename(file)
    else:
        content["values"]["prefill"] -= 1
        texts = {"cut": text[:-9], "changed": json.dumps(content), "list": "[" * 9_000}
        file.write_text(texts.get(damage, text + " " * 10_000))
    assert RememberedPeaks("a").read() is None


def test_number_of_files_is_bounded(cached: Path) -> None:
    for number in range(MOST_FILES + 3):
        RememberedPeaks(str(number)).write(PEAKS)
    assert len(list(cached.iterdir())) == MOST_FILES
    assert RememberedPeaks(str(MOST_FILES + 2)).read() == PEAKS


def test_unwritable_cache_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    RememberedPeaks("a").write(PEAKS)
    assert RememberedPeaks("a").read() is None
