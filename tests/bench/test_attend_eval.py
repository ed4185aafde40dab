"""`penstock eval --attend`: the cost of selection by budget and by layer."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from penstock.cli import main
from penstock.errors import SettingError
from penstock.models.layer_seams import attach
from penstock.models.loading import load
from penstock.models.mlx_lm import plain_caches
from penstock.recall import MODEL_PATH
from penstock_bench import attend_eval, attend_tasks, attend_text, eval_texts
from penstock_bench.attend_text import AttendText
from penstock_bench.eval_load import EvalLoad
from penstock_bench.forcing import log_probabilities
from support.worst_blocks import choose_worst_blocks

LOAD = EvalLoad(text_tokens=900, piece_tokens=900)


def test_larger_token_budget_lowers_kl_and_sufficient_one_is_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = attend_eval.measure(LOAD, (128, 512, 128), by_layer=True)
    kl = report.penstock["kl"]
    assert list(kl) == ["128", "512"]
    assert kl["128"] > kl["512"] >= 0
    assert set(report.raw["kl_of_one_layer"]) == {"0", "1"}
    assert report.met is (report.penstock["proposed"] != "")
    choose_worst_blocks(monkeypatch)
    worst = attend_eval.measure(LOAD, (128,)).penstock["kl"]["128"]
    assert worst > 2 * kl["128"], "negative control: the worst blocks"


def test_window_of_equal_bytes_has_higher_perplexity() -> None:
    report = attend_eval.measure(LOAD, (128,))
    figures = report.penstock["figures"]["128"]
    assert figures["kl"]["mean"] < figures["kl_over_window"]["mean"] < 1
    own, theirs = figures["kl"]["mean"], figures["window_kl"]["mean"]
    assert figures["kl_over_window"]["mean"] == pytest.approx(own / theirs)
    assert report.rival_figures["tokens"] == {"128": 128 + report.raw["pieces"][0] * 18 // 512}
    assert report.raw["kl_of_one_layer"] == {}, "no layer alone unless asked"


def test_window_of_all_tokens_matches_full_attention() -> None:
    model, tokenizer = load(MODEL_PATH)
    attach(model)
    read = AttendText(model, eval_texts.pieces(tokenizer, LOAD))
    (loss,) = read.window(900).losses
    assert loss == pytest.approx(read.whole.losses[0], abs=1e-4)
    assert len(loss) == attend_text.STEP_TOKENS
    assert attend_text.mean(read.window(200).kl) > 1e-3, "negative control: a window of fewer"


def test_perplexity_matches_single_pass() -> None:
    """Compared with one pass over the whole text with mlx-lm's caches."""
    model, tokenizer = load(MODEL_PATH)
    (piece,) = eval_texts.pieces(tokenizer, LOAD)
    logs = log_probabilities(model(mx.array([piece.tokens]), cache=plain_caches(model))[0])
    steps = range(len(piece.tokens) - attend_text.STEP_TOKENS, len(piece.tokens))
    wanted = [-float(logs[n - 1, piece.tokens[n]]) for n in steps]
    attach(model)
    (losses,) = AttendText(model, [piece]).whole.losses
    assert losses == pytest.approx(wanted, abs=1e-3)


def test_ratios_and_differences_are_paired_by_token() -> None:
    ratio = attend_eval.over([[1.0, 2.0], [3.0]], [[2.0, 4.0], [6.0]])
    assert (ratio.n, ratio.mean, ratio.standard_error) == (3, 0.5, 0.0)
    assert attend_eval.over([[1.0, 2.0]], [[4.0, 2.0]]).standard_error > 0.1
    change = attend_eval.change([[1.01, 5.01]], [[1.0, 5.0]])
    assert change.mean == pytest.approx(100 * math.expm1(0.01))
    assert change.standard_error == pytest.approx(0.0, abs=1e-9)


def test_selection_answers_questions_that_window_loses() -> None:
    load_ = EvalLoad(lengths=(900,), questions=14)
    report = attend_tasks.measure(load_, (128,))
    assert report.met
    assert report.penstock["choice"]["128"]["900"]["mean"] > 0.9
    assert report.rival_figures["right"]["128"]["900"]["mean"] < 0.5, "a window has lost most"
    assert attend_tasks.fewer([[1.0, 1.0]], [[1.0, 0.0]]).mean == 0.5


def test_eval_command_runs_requested_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    sizes = ["--length", "400", "--questions", "1", "--memory-limit", "200MB"]
    given = ["--attend", "128", "--task", "needle", "--text", argparse.__file__, *sizes, "--json"]
    code = main(["eval", str(folder), *given])
    printed = json.loads(capsys.readouterr().out)
    assert code == (0 if printed["met"] else 1)
    assert list(printed["penstock"]["choice"]["128"]) == ["needle 400"]


class Layered:
    """A text for which some layers need full attention."""

    def kl(self, tokens: int, whole: Any = ()) -> float:
        return (1.0 if tokens < 256 else 0.5) * (3 not in whole) + 0.3 * (tokens < 256)


def test_worst_layers_are_skipped_before_budget_grows() -> None:
    alone = dict.fromkeys(range(8), 0.001) | {3: 0.4}
    read: Any = Layered()
    assert attend_eval.proposal(read, {128: 1.3, 256: 0.5}, alone) == (256, (3,), 0.0)
    assert attend_eval.proposal(read, {128: 1.3}, alone) is None
    assert attend_eval.proposal(read, {512: 0.01}, alone) == (512, (), 0.01)


def test_too_short_text_is_refused() -> None:
    with pytest.raises(SettingError, match=r"894 tokens.*1,090 tokens at least"):
        attend_eval.measure(LOAD, (1_024,))


def test_eval_command_prints_proposed_flags(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--text-tokens", "700", "--piece", "700"]
    code = main(["eval", str(MODEL_PATH), "--attend", "512", *sizes, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == (0 if printed["met"] else 1)
    assert printed["penstock"]["proposed"].startswith("--attend-tokens 512") is printed["met"]
