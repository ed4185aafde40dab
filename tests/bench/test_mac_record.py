"""`penstock bench mac`: one file with the machine and each bench's records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_all_benches import SMALL, BenchEnd, commands, split

from penstock.cli import main
from penstock.recall import MODEL_PATH
from penstock_bench.cli import mac_command
from penstock_bench.cli.mac_command import RECORDED, merged


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


def test_slow_machine_records_what_it_has_time_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = ("bench", "single", "--prompt", "32768", "--rounds", "20", "--longest", "0")
    monkeypatch.setattr(mac_command, "RECORDED", (SMALL, slow, SMALL))
    out = tmp_path / "record.json"
    assert main(["bench", "mac", "--minutes", "0.5", "--out", str(out)]) == 0
    benches = json.loads(out.read_text())["benches"]
    assert [bench["status"] is None for bench in benches] == [False, True, True]
    assert [len(bench["records"]) for bench in benches] == [1, 0, 0]
    assert 1 < benches[1]["seconds"] < 31 and benches[2]["seconds"] == 0
    shown = capfd.readouterr().out
    assert f"no time: penstock {' '.join(slow)}" in shown and "[3 of 3]" not in shown
    assert "the time of 0.5 minutes was over; --minutes 2 records more" in shown


def test_record_without_finished_bench_exits_with_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [BenchEnd(SMALL, None, ())]
    monkeypatch.setattr(mac_command, "run_all", lambda *_, **__: late)
    out = tmp_path / "record.json"
    assert main(["bench", "mac", "--minutes", "1", "--out", str(out)]) == 2
    shown = capfd.readouterr()
    assert "To send it" not in shown.out
    reason = "nothing was measured: no bench ended within 1 minute; try --minutes 4"
    assert shown.err.endswith(f"{reason}\n") and not out.exists()


def test_missing_model_is_refused_before_benches(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mac", "--model", "no/such/folder"]) == 2
    assert "there is no folder no/such/folder, and no model of that name" in capfd.readouterr().err


def test_file_that_cannot_be_written_is_refused_before_benches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mac_command, "RECORDED", ())
    out = tmp_path / "nope" / "record.json"
    assert main(["bench", "mac", "--out", str(out)]) == 2
    printed = capfd.readouterr()
    reason = "cannot be written (No such file or directory); choose another file"
    assert f"--out {out} {reason}" in printed.err and printed.out == ""
    assert printed.err.count("\n") == 1


def test_check_of_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for out in (old, new):
        assert main(["bench", "mac", "--model", "no/such/folder", "--out", str(out)]) == 2
    assert old.read_text() == "kept" and not new.exists()


def test_machine_of_record_has_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/Ann Lee")
    library = "/Users/Ann Lee/Library/blas/libopenblas-0.3.so"
    slow = f"PENSTOCK_BLAS={library} is not used: {library}: it has no cblas_sgemm"
    report = {
        "device": "MLX cannot be imported: dlopen('/opt/env/lib/libmlx.so')",
        "blas": {"is_fast": True, "name": library, "why": "in ~/lib/a.so, ./b/c.so or d/e.so"},
        "memory": {"total_bytes": 8},
        "problems": [{"what": slow, "remedy": "pip uninstall mlx-cpu"}],
    }
    name = "libopenblas-0.3.so"
    assert merged(json.dumps(report), [])["machine"] == {
        "device": "MLX cannot be imported: dlopen('libmlx.so')",
        "blas": {"is_fast": True, "name": name, "why": "in a.so, c.so or e.so"},
        "memory": {"total_bytes": 8},
        "problems": [
            {
                "what": f"PENSTOCK_BLAS={name} is not used: {name}: it has no cblas_sgemm",
                "remedy": "pip uninstall mlx-cpu",
            }
        ],
    }
    assert merged("", [])["machine"] is None


def test_record_on_own_model_has_its_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "private" / "mine"
    shutil.copytree(MODEL_PATH, folder)
    single = ("bench", "single", "--prompt", "64", "--rounds", "1", "--longest", "0")
    hit = ("bench", "hit", "--tokens", "256", "--rounds", "1")
    shared = ("bench", "shared-prefix", "--prefix", "64", "--rounds", "1", "--cold-rounds", "0")
    shared += ("--conversations", "2")
    monkeypatch.setattr(mac_command, "RECORDED", (single, hit, shared))
    out = tmp_path / "record.json"
    assert main(["bench", "mac", "--model", str(folder), "--out", str(out)]) == 0
    record = json.loads(out.read_text())["benches"]
    assert [bench["command"].endswith("--model mine") for bench in record] == [True] * 3
    models = [bench["records"][0]["raw"]["model"] for bench in record]
    assert [model["name"] for model in models] == ["mine"] * 3
    assert {model["kv_bytes_per_token"] for model in models} == {2_048}
    assert "private" not in out.read_text()


def test_missed_goals_do_not_fail_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_command, "RECORDED", (SMALL,))
    assert main(["bench", "mac", "--out", str(tmp_path / "record.json")]) == 0
