"""`penstock bench all`: covers all benches; one failure does not stop the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from penstock.cli import main
from penstock_bench.cli import all_command, bench_commands, kv_cache_command
from penstock_bench.cli.all_command import (
    BENCHES,
    LEFT_OUT,
    PAGES,
    PICTURES,
    BenchEnd,
    drawing,
    run_all,
)
from penstock_bench.report import keep

KERNELS = ("bench", "kernels", "--heads", "4", "--head-size", "64", "--kv-heads", "2")
SMALL = (*KERNELS, "--tokens", "128", "--rows", "2")


def commands() -> dict[str, Any]:
    """Return the commands by the words that call them."""
    group = get_command(bench_commands.app)
    assert isinstance(group, TyperGroup)
    benches = {f"bench {name}": command for name, command in group.commands.items()}
    return {**benches, "bench-kv-cache": get_command(kv_cache_command.app)}


def split(command: tuple[str, ...]) -> tuple[str, list[str]]:
    """Split a command line into the command's words and its flags."""
    words = 2 if command[0] == "bench" else 1
    return " ".join(command[:words]), list(command[words:])


def test_every_bench_is_run_or_excluded_with_reason() -> None:
    run = {split(command)[0] for command in BENCHES}
    left_out = {f"bench {name}" for name in LEFT_OUT}
    assert run | left_out | {"bench all"} == set(commands())
    assert not run & left_out and all(LEFT_OUT.values())
    assert {f"bench {name}" for name in (*PAGES, *PICTURES)} <= run


@pytest.mark.parametrize("command", BENCHES, ids=" ".join)
def test_flags_of_listed_benches_exist(command: tuple[str, ...], tmp_path: Path) -> None:
    words, flags = split(command)
    more = ["--save", str(tmp_path), *drawing(command, tmp_path)]
    parsed = commands()[words].make_context(words, [*flags, *more])
    assert parsed.params["save"] == tmp_path
    with pytest.raises(Exception, match="No such option"):  # the list's flags are looked at
        commands()[words].make_context(words, ["--nosuch"])


def test_failed_bench_does_not_stop_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bench, one with refused settings, and another bench."""
    wrong = ("bench", "growth", "--window", "1")
    ends = run_all((SMALL, wrong, SMALL), tmp_path / "records")
    assert [len(end.records) for end in ends] == [1, 0, 1]
    assert ends[0].status in (0, 1) and ends[1].status == 2
    for end in (ends[0], ends[2]):
        (path,) = end.records
        assert Path(path).parent == tmp_path / "records"
        assert json.loads(Path(path).read_text())["environment"]
        assert path in str(end) and "goal" in str(end)
    assert "error (exit status 2)\n    no record" in str(ends[1])
    shown = capfd.readouterr().out
    assert all(f"[{number} of 3]" in shown for number in (1, 2, 3))


def test_records_of_same_second_have_unique_names(tmp_path: Path) -> None:
    environment = {"date": "2026-11-28T04:05:06+00:00"}
    for value in range(3):
        keep("kernels", {"value": value, "environment": environment}, tmp_path)
    values = {path.name: json.loads(path.read_text())["value"] for path in tmp_path.iterdir()}
    stem = "kernels-2026-11-28T040506Z"
    assert values == {f"{stem}.json": 0, f"{stem}-2.json": 1, f"{stem}-3.json": 2}


def test_bench_all_downloads_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_OFFLINE", raising=False)
    (end,) = run_all([("bench", "speculate", "--model", "smollm2")], tmp_path / "records")
    assert end.status == 2 and not end.records
    assert "PENSTOCK_OFFLINE forbids downloads" in capfd.readouterr().err


def test_summary_lists_records_and_target_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_command, "BENCHES", (SMALL,))
    assert main(["bench", "all", "--save", str(tmp_path / "records")]) in (0, 1)
    (record,) = (tmp_path / "records").iterdir()
    lines = capfd.readouterr().out.splitlines()
    assert f"    {record}" in lines and "benchmarks/results/" in lines[-1]


def test_exit_code_of_failure_outranks_missed_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = iter((0, 1, 0, -9, 1))
    monkeypatch.setattr(
        all_command, "_run", lambda command, *_: BenchEnd(command, next(statuses), ())
    )
    for commands, status in ((1, 0), (1, 1), (3, 2)):
        monkeypatch.setattr(all_command, "BENCHES", (SMALL,) * commands)
        assert main(["bench", "all", "--save", str(tmp_path)]) == status


def test_save_folder_is_required_and_checked_first(tmp_path: Path) -> None:
    assert main(["bench", "all"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["bench", "all", "--save", str(tmp_path / "file" / "below")]) == 2
