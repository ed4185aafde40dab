"""Key centers and scales are measured once per set of weights, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_faults import model_of

from penstock.attention.selection.key_centers import RUN_TOKENS
from penstock.engine.core import Core
from penstock.engine.model import remembered_file
from penstock.engine.model.runner import SCALES_CHUNK, Runner

SETTINGS: dict[str, Any] = {
    "memory_limit": "200MB",
    "block_size": 16,
    "max_kv_size": 1_024,
    "attend_tokens": 512,
    "kv_cache_quantization": "turbo4",
    "kernels": "off",
}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's cache folder, in which all measurements are saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remembered_file, "REMEMBERED_SECONDS", 0.0)
    return tmp_path / "penstock"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the measuring runs."""
    lengths: list[int] = []
    read_run = Runner.read_run

    def noting(runner: Runner, tokens: Any, *given: Any) -> Any:
        lengths.append(len(tokens))
        return read_run(runner, tokens, *given)

    monkeypatch.setattr(Runner, "read_run", noting)
    return lengths


def measured(model: Any) -> tuple[dict[int, Any], str]:
    """Open an engine; return its key centers as tables, and its fingerprint."""
    core = Core(model, **SETTINGS)
    try:
        centers = core.runner.selection.index.centers
        tables = {layer: center.table for layer, center in centers.items()}
        return tables, core.view.fingerprint
    finally:
        core.close()


def test_second_start_reuses_measured_key_statistics(cached: Path, runs: list[int]) -> None:
    model = model_of("llama")
    tables, name = measured(model)
    assert RUN_TOKENS in runs and SCALES_CHUNK in runs
    runs.clear()
    again, same_name = measured(model)
    assert runs == []
    assert name == same_name
    assert tables.keys() == again.keys()
    assert all(np.array_equal(table, again[layer]) for layer, table in tables.items())


def test_changed_weights_are_measured_again(cached: Path, runs: list[int]) -> None:
    model = model_of("llama")
    measured(model)
    runs.clear()
    weights = model.model.layers[0].self_attn.k_proj
    before = weights.weight
    weights.weight = before * 2.0
    try:
        measured(model)
    finally:
        weights.weight = before
    assert runs
    runs.clear()
    measured(model)
    assert runs == []


def test_damaged_file_is_measured_again(cached: Path, runs: list[int]) -> None:
    model = model_of("llama")
    tables, name = measured(model)
    for folder in ("centers", "scales"):
        (file,) = (cached / folder).iterdir()
        file.write_text(file.read_text()[:-1])
    runs.clear()
    again, same_name = measured(model)
    assert RUN_TOKENS in runs and SCALES_CHUNK in runs
    assert name == same_name and tables.keys() == again.keys()


def test_short_measurement_is_not_saved(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_file, "REMEMBERED_SECONDS", 1e9)
    measured(model_of("llama"))
    assert not (cached / "centers").exists() and not (cached / "scales").exists()
