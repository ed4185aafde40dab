"""Wrapping on terminals of 60 and 80 columns: no figure, name or path is broken."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_folders import chain, fill
from rich.console import Console

from penstock import Engine
from penstock.cli import main
from penstock.cli.banner import LABEL_CELLS, TRY, banner
from penstock.cli.doctor import DoctorProblem, _show, examine
from penstock.cli.fitness import try_model
from penstock.cli.whole_words import broken, print_line
from penstock.config import ServerSettings
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

WIDE = 1_000
FIGURE = re.compile(r"\d[\d.,:]*")
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
PLACE = "/home/someone/with-a-long-name/models/of-many-parts/llama-3.2-1b-instruct-4bit"


def words(text: str) -> list[str]:
    """Return the words of a text, with `#` for numbers, which differ from run to run."""
    return [FIGURE.sub("#", word) for word in ESCAPE.sub("", text).split()]


def check(shown: Callable[[int], str], columns: int) -> None:
    narrow, wide = shown(columns), shown(WIDE)
    assert words(narrow) == words(wide)
    for line in ESCAPE.sub("", narrow).splitlines():
        assert len(line) <= columns or " " not in line.strip(), line
    assert "…" not in narrow


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def resize(columns: int) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return resize


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", ["ls", "stats", "verify"])
def test_cache_output_wraps_between_words(
    command: str,
    columns: int,
    terminal: Callable[[int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(tmp_path / "cache", chain(3))

    def shown(size: int) -> str:
        terminal(size)
        assert main(["cache", command, "--ssd-cache-dir", str(tmp_path / "cache")]) == 0
        return capsys.readouterr().out

    check(shown, columns)


@pytest.mark.parametrize("columns", [60, 80])
def test_plan_output_wraps_between_words(
    columns: int, terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Narrow tables have fewer columns, but every figure is whole."""

    def shown(size: int) -> str:
        terminal(size)
        assert main(["plan", str(MODEL_PATH), "--memory-limit", "4GB"]) == 0
        return ESCAPE.sub("", capsys.readouterr().out)

    figures = {size: set(FIGURE.findall(shown(size))) for size in (columns, WIDE)}
    assert figures[columns] <= figures[WIDE] and "32,768" in figures[columns]
    lines = shown(columns).splitlines()
    assert max(map(len, lines)) <= columns and "…" not in "".join(lines)


@pytest.mark.parametrize("columns", [60, 80])
def test_banner_wraps_between_words(columns: int) -> None:
    loaded = load_all(MODEL_PATH)
    with Engine(loaded.model, loaded.tokenizer, memory_limit="200MB") as engine:
        lines = banner(engine, "recall", ServerSettings(port=8_000), 8_000)

    def shown(size: int) -> str:
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, width=size, highlight=False)
        for line in lines:
            if not line.startswith(TRY):
                print_line(console, line, indent=LABEL_CELLS)
        return output.getvalue()

    check(shown, columns)


@pytest.mark.parametrize("columns", [60, 80])
def test_doctor_output_wraps_between_words(
    columns: int, terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = examine()
    fit = try_model(PLACE, load_all(MODEL_PATH))
    problem = DoctorProblem(f"the folder {PLACE} has 1,234,567 bytes", f"move {PLACE} elsewhere")

    def shown(size: int) -> str:
        terminal(size)
        _show(machine, fit, None, [problem])
        return capsys.readouterr().out

    check(shown, columns)
    assert PLACE in shown(columns)


def test_piped_line_is_not_wrapped() -> None:
    output = io.StringIO()
    print_line(Console(file=output, width=20), "word " * 100)
    assert output.getvalue().count("\n") == 1


def test_word_longer_than_line_is_not_broken() -> None:
    assert broken(f"at {PLACE} 1,234,567.8 bytes", 20).split("\n")[1] == PLACE
