"""Commands that packages add by entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.cli.help_groups import BENCH_COMMANDS, ENTRY_POINTS, GROUP_OF, GROUPS

GREETING = """
import typer
app = typer.Typer()

@app.command()
def greet() -> None:
    "Say hello."
    print("hello")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of all installed packages except the benches."""
    folder = tmp_path_factory.mktemp("packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("penstock_bench", "penstock_mlx_bench")):
            (folder / package.name).symlink_to(package)
    return folder


def run(*arguments: str, packages: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run penstock with only these package folders (-S)."""
    source = Path(penstock.__file__).parent.parent
    path = os.pathsep.join(map(str, [source, *packages]))
    return subprocess.run(
        [sys.executable, "-S", "-m", "penstock", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def listed(printed: str) -> set[str]:
    """Return the names of the commands in a help text."""
    _, _, commands = printed.partition("Commands:\n")
    names = (re.match(r"  (\S+)", line) for line in commands.splitlines())  # a summary has lines
    return {name[1] for name in names if name}


@pytest.mark.parametrize("command", BENCH_COMMANDS)
def test_missing_package_gives_one_line_install_hint(bare: Path, command: str) -> None:
    for arguments in ([command], [command, "--help"]):
        done = run(*arguments, packages=[bare])
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line == (
            f"penstock: penstock {command} is in a separate package: in a checkout of penstock "
            "run pip install ./benchmarks"
        )


def test_other_commands_work_without_bench_package(bare: Path) -> None:
    done = run("--help", packages=[bare])
    assert done.returncode == 0
    assert {"serve", "generate", "cache"} <= listed(done.stdout)
    assert not set(BENCH_COMMANDS) & listed(done.stdout)
    assert run("generate", "--help", packages=[bare]).returncode == 0


@pytest.mark.parametrize("command", ["agents", "verify"])
def test_removed_command_error_names_replacement(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "--json"]) == 2
    line = f"penstock: penstock {command} was removed: run penstock bench {command}\n"
    assert capsys.readouterr().err == line


def test_bench_package_provides_all_listed_commands() -> None:
    assert {entry.name for entry in entry_points(group=ENTRY_POINTS)} >= set(BENCH_COMMANDS)


def test_entry_points_can_add_but_not_replace_commands(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text(GREETING)
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\ngreet = greeting:app\ndoctor = greeting:app\n"
    )
    packages = [bare, tmp_path]
    assert run("greet", packages=packages).stdout == "hello\n"
    shown = run("--help", packages=packages).stdout
    assert "greet " in shown
    assert shown.count("doctor") == 1
    assert "hello" not in run("doctor", "--help", packages=packages).stdout


def test_bench_without_arguments_lists_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    printed = capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines()]
    assert set(names) == listed(shown)
    assert len(names) == len(set(names)) >= 14
    assert "..." not in printed + shown.partition("Commands:")[2]  # none is cut off


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["serv"], "serve"),
        (["serve", "--memry-limit", "3GB"], "--memory-limit"),
        (["serve", "--kv-cache-quantisation", "8"], "--kv-cache-quantization"),
        (["--verison"], "--version"),
        (["cache", "stat"], "stats"),
    ],
)
def test_unknown_command_suggests_nearest(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"Did you mean '{nearest}'?")


def test_serve_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    shown = capsys.readouterr().out
    heads = [line.rstrip(":") for line in shown.splitlines() if line and line[0] != " "]
    assert heads[1:] == ["Arguments", *GROUPS, "Other"]
    for flag, group in GROUP_OF.items():
        if f"\n  {flag} " in shown:
            assert shown.index(f"\n{group}:") < shown.index(f"\n  {flag} ")
    other = shown.partition("\nOther:")[2].strip().splitlines()
    assert [line.split()[0] for line in other] == ["-h,"], "each flag has a group"
