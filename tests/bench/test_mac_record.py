"""`penstock bench mac`: one file with the machine and each bench's records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_all_benches import SMALL, commands, split

from penstock.cli import main
from penstock_bench.cli import mac_command
from penstock_bench.cli.mac_command import RECORDED


@pytest.mark.parametrize("command", RECORDED, ids=" ".join)
def test_flags_of_recorded_benches_exist(command: tuple[str, ...]) -> None:
    words, flags = split(command)
    commands()[words].make_context(words, flags)


def test_record_is_one_file_and_failed_bench_exits_with_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ("bench", "growth", "--window", "1")
    single = ("bench", "single", "--prompt", "64", "--rounds", "1", "--longest", "0")
    monkeypatch.setattr(mac_command, "RECORDED", (SMALL, wrong, (*single, "--model", "embedded")))
    out = tmp_path / "record.json"
    assert main(["bench", "mac", "--out", str(out)]) == 2
    record = json.loads(out.read_text())
    assert record["machine"]["back_end"]
    assert [len(bench["records"]) for bench in record["benches"]] == [1, 0, 1]
    assert "1 x 64" in json.dumps(record["benches"][2]["records"])
    shown = capfd.readouterr().out
    assert f"failed: penstock {' '.join(wrong)}" in shown and str(out) in shown


def test_missed_goals_do_not_fail_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_command, "RECORDED", (SMALL,))
    assert main(["bench", "mac", "--out", str(tmp_path / "record.json")]) == 0
