"""`penstock bench switch` in a short form."""

from __future__ import annotations

import pytest

from penstock.recall import MODEL_PATH
from penstock_bench.engine_sides import OURS, RIVAL
from penstock_bench.serve_process import ServerFailed
from penstock_bench.switch import STORED, SwitchLoad, measure


def load(limit: int) -> SwitchLoad:
    return SwitchLoad(str(MODEL_PATH), prompt_tokens=300, memory_limit=limit, rounds=1)


def test_model_switch_is_measured_on_every_server() -> None:
    sides: list[str] = []
    report = measure(load(60_000_000), lambda side, *_: sides.append(side))
    assert sides == [OURS, STORED, RIVAL]
    assert report.penstock["return_cached_tokens"] == 0
    stored = report.penstock["with_disk"]  # a quick model may compute what a busy disk has
    assert stored["return_prompt_tokens"] == report.penstock["return_prompt_tokens"] > 300
    assert min(report.penstock["switch"], stored["switch"], report.rival_figures["switch"]) > 0


def test_limit_that_fits_both_models_is_refused() -> None:
    with pytest.raises(ServerFailed, match="does not hold one model alone"):
        measure(load(400_000_000), lambda *_: None)
