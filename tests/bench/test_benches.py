"""Growth, recall and remember benches on small sizes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import RotatingKVCache as TheirRotatingKVCache

from penstock import caches
from penstock_bench import growth, remember
from penstock_bench import window_recall as recall
from penstock_bench.report import publish

KEYS = {"claim", "penstock", "mlx-lm", "ratio", "goal", "met", "environment"}
SMALL = growth.GrowthShape(layers=2, window_tokens=512, read_tokens=700, chunk_tokens=64, rounds=1)


@pytest.fixture(scope="module")
def grown() -> Any:
    return growth.measure(SMALL)


def test_growth_bench_reports_reallocation_by_rival_only(grown: Any) -> None:
    for load in ("decode", "prefill"):
        assert grown.penstock[load]["growths_per_layer"] == 0
        assert grown.penstock[load]["moves_per_layer"] == 0
        assert grown.rival_figures[load]["growths_per_layer"] > 0
        assert grown.rival_figures[load]["moves_per_layer"] > 0
        assert 1 <= grown.penstock[load]["peak_over_window"] < 2


def test_growth_bench_counts_copies_without_reallocation() -> None:
    """Negative control: a cache that copies its buffers each step but never grows."""

    class Copies(caches.RotatingKVCache):
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            # A second owner of the buffers makes every write a copy.
            self._held_before = copy.deepcopy((self.keys, self.values))
            return super().update_and_fetch(keys, values)

    run = growth.run_once(lambda: Copies(512), SMALL, 1)
    assert run.growths_per_layer == 0
    assert run.moves_per_layer > 0
    assert run.peak_over_window > 1.9


def test_reallocating_cache_misses_growth_goal() -> None:
    run = growth.run_once(lambda: TheirRotatingKVCache(512), SMALL, 1)
    runs = {load: {"penstock": [run], growth.RIVAL: [run]} for load in ("decode", "prefill")}
    assert not growth.report(SMALL, runs).met


def test_json_output_has_all_keys_and_record_every_step(
    grown: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    publish(grown, as_json=True, save=tmp_path)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == KEYS
    (file,) = tmp_path.glob("growth-*.json")
    stored = json.loads(file.read_text())
    assert len(stored["raw"]["runs"]["decode"]["penstock"][0]["step_ms"]) == SMALL.read_tokens


def test_table_marks_missed_goals(grown: Any, capsys: pytest.CaptureFixture[str]) -> None:
    publish(grown, as_json=False, save=None)
    printed = capsys.readouterr().out
    assert printed.count("NOT MET") == sum(line.met is False for line in grown.lines)


def test_facts_are_classified_by_window_position() -> None:
    setting = recall.RecallWindow(100, 20)
    read = 1_000
    assert recall.place_of(0, 20, read, setting) == "keep"
    assert recall.place_of(10, 21, read, setting) is None
    assert recall.place_of(20, 40, read, setting) == "between"
    assert recall.place_of(900, 920, read, setting) == "between"
    assert recall.place_of(910, 921, read, setting) is None
    assert recall.place_of(920, 940, read, setting) == "window"
    assert recall.place_of(30, 50, 100, setting) == "window"


@pytest.fixture(scope="module")
def asked() -> Any:
    settings = (recall.RecallWindow(256, 128), recall.RecallWindow(4_096, 512))
    return recall.measure(recall.RecallLoad(dialogues=1, tokens=600, facts=12, settings=settings))


def test_recall_bench_finds_only_facts_inside_window(asked: Any) -> None:
    assert asked.met, [line for line in asked.lines if not line.met]
    asked_in = {place: n["asked"] for place, n in asked.penstock["256 tokens, keep 128"].items()}
    assert asked_in["between"] > 0
    assert asked_in["window"] > 0


def test_recall_bench_writes_page(asked: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recall.write_page(asked, tmp_path)
    assert (tmp_path / "recall.png").stat().st_size > 1_000
    assert "256 tokens, keep 128" in (tmp_path / "recall.md").read_text()


@pytest.fixture(scope="module")
def remembered() -> Any:
    load = remember.RememberLoad(dialogues=1, facts=6, lengths=(1_200,), attend=(128,))
    return remember.measure(load)


def test_selection_recalls_more_than_window_of_equal_bytes(remembered: Any) -> None:
    shares = {outcome["side"]: sum(outcome["known"]) for outcome in remembered.raw["outcomes"]}
    assert shares["all"] == shares["index"] == 6
    assert shares["window"] <= 2
    read = {outcome["side"]: outcome["step_bytes"] for outcome in remembered.raw["outcomes"]}
    assert 0.98 * read["index"] < read["window"] <= read["index"] < read["all"] / 5
    assert 0.9 * read["index"] < read["quest"] < 1.1 * read["index"]


def test_remember_bench_draws_plot(remembered: Any, tmp_path: Path) -> None:
    remember.draw(remembered, tmp_path / "remember.png")
    assert (tmp_path / "remember.png").stat().st_size > 1_000


@pytest.mark.parametrize(("at_128", "at_512", "met"), [(3, 6, True), (6, 5, False)])
def test_remember_bench_has_goal_for_512_tokens_but_not_128(
    at_128: int, at_512: int, met: bool
) -> None:
    load = remember.RememberLoad(dialogues=1, facts=6, lengths=(1_200,), attend=(128, 512))

    def outcome(side: str, attend: int, known: int) -> remember.RecallOutcome:
        return remember.RecallOutcome(side, attend, 0, 1_200, [n < known for n in range(6)], 1)

    outcomes = [outcome("all", 0, 6)]
    for attend, known in ((128, at_128), (512, at_512)):
        outcomes += [outcome("index", attend, known)]
        outcomes += [outcome(side, attend, 0) for side in ("quest", "window")]
    report = remember.report(load, outcomes)
    assert report.met is met
    judged = {line.figure: line.met for line in report.lines if "Quest" not in line.figure}
    assert judged == {"1,200 tokens, 128 read": None, "1,200 tokens, 512 read": met}
