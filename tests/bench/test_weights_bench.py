"""`penstock bench weights` times the same weights in both formats against the goals."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from penstock.cli import main
from penstock.models.loading import load_all
from penstock_bench.weights_speed import (
    FILE,
    FOLDER,
    FormRuns,
    WeightsLoad,
    WeightsRun,
    model_forms,
    report,
)
from support.gguf_files import small_file

TOKENS = mx.array([[5, 9, 40, 3]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return small_file(tmp_path)


def test_gguf_file_and_folder_are_timed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(file), "--tokens", "3", "--steps", "4", "--rounds", "2"]
    assert main(["bench", "weights", *given, "--json", "--save", str(tmp_path / "records")]) in (
        0,
        1,
    )
    shown = json.loads(capsys.readouterr().out)
    (record,) = (tmp_path / "records").glob("weights-*.json")
    runs = json.loads(record.read_text())["raw"]["runs"]
    assert set(shown["penstock"]) == set(runs) == {FILE, FOLDER}
    for timed in runs.values():
        assert [len(run["step_seconds"]) for run in timed["auto"]] == [4, 4]
        assert [len(run["step_seconds"]) for run in timed["native"]] == [4]
        assert len(timed["first_token_seconds"]) == 2 and timed["question_tokens"] > 20


def test_converted_folder_keeps_codes_and_float16_norms(file: Path) -> None:
    with model_forms(str(file)) as forms:
        loaded = {
            name: load_all(path, weights_dtype="native").model for name, path in forms.items()
        }
        logits = {name: model(TOKENS) for name, model in loaded.items()}
        wide = load_all(forms[FOLDER], weights_dtype="float32").model
    norm, projection = loaded[FOLDER].model.norm, loaded[FOLDER].model.layers[0].self_attn.q_proj
    assert norm.weight.dtype == projection.scales.dtype == mx.float16
    assert projection.bits == 4
    assert mx.array_equal(logits[FILE], logits[FOLDER])
    assert wide.model.norm.weight.dtype == mx.float32


def runs(times: float) -> FormRuns:
    """Return runs in which float32 is this many times as fast, with one outlier."""
    quick, slow = WeightsRun(1.0, [0.5, 0.5]), WeightsRun(9.0, [9.0, 9.0])
    native = WeightsRun(times, [times / 2, times / 2])
    return FormRuns([quick, quick, slow], [native], 51, [1.5, 1.5, 9.0])


def test_goals_apply_to_every_weight_form_and_metric() -> None:
    load = WeightsLoad()
    good = report(load, {FILE: runs(60), FOLDER: runs(51)})
    assert good.met
    assert (good.ratio["prefill_speed"], good.ratio["decode_speed"]) == (51, 51)
    assert good.penstock[FILE]["prefill_tokens_per_second"] == load.prompt_tokens
    assert not report(load, {FILE: runs(60), FOLDER: runs(49)}).met
    late = runs(60)
    late.first_token_seconds[:] = [2.5, 2.5, 0.1]
    shown = report(load, {FILE: late, FOLDER: runs(60)})
    assert [line.figure for line in shown.lines if not line.met] == [
        "GGUF file: first token of 51 tokens"
    ]
