"""Texts with native and with float32 weights: what differs, and by how much."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.models.loading import load_all
from penstock_bench import weights_text
from support.gguf_files import small_file

LOGITS = np.array([[0.0, 8.0, 7.5], [4.0, 1.0, 3.9], [2.0, 5.0, 1.0]], np.float32)
"""Behind each of three tokens, of a vocabulary of three."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return small_file(tmp_path)


def test_lead_is_logit_margin_over_other_sides_token() -> None:
    other = LOGITS.copy()
    other[1] = [3.0, 1.0, 3.1]
    run = weights_text.compare_logits([0, 1, 0, 1], 2, LOGITS, other)
    assert run.same == [True, False, True]
    assert run.leads == pytest.approx([0, 0.1, 0], abs=1e-5)
    assert run.logits == [8, 4, 5]
    assert run.difference == 1, "the second token is the last of the prompt: an answer's first"
    assert run.share(1) == pytest.approx(0.1 / 4, abs=1e-5)
    assert run.noise == pytest.approx(np.sqrt((1 + 0.8**2) / 9), abs=1e-5)


def test_mismatch_inside_prompt_is_not_text_mismatch() -> None:
    other = LOGITS.copy()
    other[0] = [0.0, 7.0, 7.5]
    run = weights_text.compare_logits([0, 1, 0, 1], 2, LOGITS, other)
    assert run.same == [False, True, True] and run.difference is None
    assert weights_text.figures([run])["same_texts"] == 1
    assert all(line.met is not False for line in weights_text.lines([run]))


@pytest.mark.parametrize(("lead", "met"), [(0.03, True), (0.05, False)])
def test_lead_beyond_rounding_misses_goal(lead: float, met: bool) -> None:
    wide = np.array([[4.0, 4.0 - lead]], np.float32)
    run = weights_text.compare_logits([0, 0], 1, wide, wide[:, ::-1])
    (line,) = [line for line in weights_text.lines([run]) if line.goal]
    assert (line.figure, line.met) == ("lead where it differs first", met)
    assert weights_text.figures([run])["same_texts"] == 0


def test_text_prefixes_are_distinct_with_requested_length(file: Path) -> None:
    tokenizer = load_all(file).tokenizer
    begun = weights_text.beginnings(tokenizer, 50, 6)
    assert {len(tokens) for tokens in begun} == {6}
    assert len({tuple(tokens) for tokens in begun}) == 50


def test_weights_bench_compares_greedy_texts(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(file), "--tokens", "3", "--rounds", "1", "--texts", "4"]
    assert main(["bench", "weights", *given, "--json", "--save", str(tmp_path)]) in (0, 1)
    shown = json.loads(capsys.readouterr().out)["penstock"]["texts"]
    (record,) = tmp_path.glob("weights-*.json")
    raw = json.loads(record.read_text())["raw"]["texts"]
    assert shown["texts"] == len(raw) == 4
    assert shown["tokens"] == 4 * (3 + weights_text.ANSWER_TOKENS - 1)
    wide = load_all(file, weights_dtype="float32").model
    for run in raw:
        assert run["tokens"] == weights_text.greedy(wide, run["tokens"][:3])


def test_too_many_texts_is_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(file), "--rounds", "1", "--texts", "99999"]
    assert main(["bench", "weights", *given]) == 2
    assert "--texts 99999: only" in capsys.readouterr().err
