"""Start progress: silent for a second, then lines, without other log levels."""

from __future__ import annotations

import io
import logging
import time

import pytest
from rich.console import Console

from penstock.cli import start_progress
from penstock.cli.start_progress import LOGGER, StartProgress

PLAIN = Console(file=io.StringIO(), force_terminal=False)


def wait_for(text: str, shown: io.StringIO) -> None:
    until = time.monotonic() + 30
    while text not in shown.getvalue():
        assert time.monotonic() < until, shown.getvalue()
        time.sleep(0.005)


def test_quick_start_prints_nothing() -> None:
    shown = io.StringIO()
    with StartProgress(PLAIN, "loading a", clock=lambda: 0.0, stream=shown):
        LOGGER.info("measuring")
    assert shown.getvalue() == ""
    assert not LOGGER.handlers


def test_slow_start_prints_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_progress, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(start_progress, "REPEAT_SECONDS", 0.01)
    shown, now = io.StringIO(), [0.0]
    with StartProgress(PLAIN, "loading a", clock=lambda: now[0], stream=shown):
        wait_for("penstock: loading a (0 s)\n", shown)
        now[0] = 12.0
        logging.getLogger("penstock.engine.model.step_trials").info("measuring %d steps", 2)
        wait_for("penstock: measuring 2 steps (12 s)\n", shown)
        now[0] = 22.0
        wait_for("penstock: measuring 2 steps (22 s)\n", shown)
        LOGGER.warning("another handler's")
    assert "another" not in shown.getvalue()


def test_terminal_shows_spinner() -> None:
    screen, lines = io.StringIO(), io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with StartProgress(terminal, "loading a", stream=lines):
        wait_for("loading a", screen)


def test_dumb_terminal_shows_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "QUIET_SECONDS", 0.01)
    screen, lines = io.StringIO(), io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "dumb"})
    with StartProgress(terminal, "loading a", stream=lines):
        wait_for("penstock: loading a (0 s)\n", lines)
    assert screen.getvalue() == ""
