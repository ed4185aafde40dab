"""`penstock eval --attend`: what a choice costs, by its size and by layer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import SettingError
from penstock.kv import selection
from penstock.recall import MODEL_PATH
from penstock_bench import attend_eval
from penstock_bench.eval_load import EvalLoad

LOAD = EvalLoad(text_tokens=900, piece_tokens=900)


def test_more_tokens_cost_less_and_what_fits_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = attend_eval.measure(LOAD, (128, 512, 128))
    kl = report.penstock["kl"]
    assert list(kl) == ["128", "512"]
    assert kl["128"] > kl["512"] >= 0
    assert set(report.raw["kl_of_one_layer"]) == {"0", "1"}
    assert report.met is (report.penstock["proposed"] != "")
    wanted = selection._wanted
    monkeypatch.setattr(selection, "_wanted", lambda scores: -wanted(scores))
    worst = attend_eval.measure(LOAD, (128,)).penstock["kl"]["128"]
    assert worst > 2 * kl["128"], "negative control: the worst blocks"


class Layered:
    """A text of which some layers must be left whole."""

    def kl(self, tokens: int, whole: Any = ()) -> float:
        return (1.0 if tokens < 256 else 0.5) * (3 not in whole) + 0.3 * (tokens < 256)


def test_the_worst_layers_are_left_whole_before_more_is_read() -> None:
    alone = dict.fromkeys(range(8), 0.001) | {3: 0.4}
    read: Any = Layered()
    assert attend_eval.proposal(read, {128: 1.3, 256: 0.5}, alone) == (256, (3,), 0.0)
    assert attend_eval.proposal(read, {128: 1.3}, alone) is None
    assert attend_eval.proposal(read, {512: 0.01}, alone) == (512, (), 0.01)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(SettingError, match=r"894 tokens.*1,057 tokens at least"):
        attend_eval.measure(LOAD, (1_024,))


def test_the_command_prints_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--text-tokens", "700", "--piece", "700"]
    code = main(["eval", str(MODEL_PATH), "--attend", "512", *sizes, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == (0 if printed["met"] else 1)
    assert printed["penstock"]["proposed"].startswith("--attend-tokens 512") is printed["met"]
