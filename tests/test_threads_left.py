"""A run ends and fails if a test left endless threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import SOON

SUPPORT = Path(__file__).parent / "support"
STARTS = """
import sys, threading, time
import pytest
import threads_left

threads_left.GRACE_SECONDS = 1.0
"""
WAITS = """
def test_waits():
    threading.Thread(target=threading.Event().wait, name="waiting").start()
"""
ENGINE = """
def test_engine():
    from penstock import Engine, load
    from penstock.recall import MODEL_PATH
    Engine(*load(MODEL_PATH), memory_limit="100MB")
    raise AssertionError("before it is closed")
"""
STUCK = """
def test_stuck():
    from penstock import Engine, load
    from penstock.recall import MODEL_PATH
    engine = Engine(*load(MODEL_PATH), memory_limit="100MB")
    engine.ask(lambda view: threading.Event().wait())
"""
GOOD = """
def test_good():
    from penstock import Engine, load
    from penstock.recall import MODEL_PATH
    with Engine(*load(MODEL_PATH), memory_limit="100MB"):
        thread = threading.Thread(target=print)
        thread.start()
"""
AFTER = """
def test_after():
    until = time.monotonic() + 10  # a thread that was told to end may need a moment
    while left := [of for of in threading.enumerate() if of.name.startswith("penstock-")]:
        assert time.monotonic() < until, left
        time.sleep(0.01)
"""


def run(folder: Path, *sources: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run test files, one per source, in a separate pytest."""
    for number, source in enumerate(sources):
        (folder / f"test_{number}.py").write_text(STARTS + source)
    plain = ["-q", "-p", "threads_left", "-p", "no:cacheprovider", "-c", os.devnull]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "--rootdir", str(folder), *options, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_run_ends_despite_endless_thread(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, text = run(tmp_path, WAITS, options=options)
    assert status == 1
    assert "threads that this file left running:\nwaiting\n" in text
    assert "1 passed, 1 error" in text
    assert options or "these threads would not end:\nwaiting\n" in text


def test_engine_left_open_by_failed_test_is_closed(tmp_path: Path) -> None:
    status, text = run(tmp_path, ENGINE, AFTER)
    assert status == 1
    assert "left running:\npenstock-engine (daemon)\n" in text
    assert "1 failed, 1 passed, 1 error" in text
    assert "would not end" not in text


def test_run_ends_despite_hung_engine(tmp_path: Path) -> None:
    status, text = run(tmp_path, STUCK)
    assert status == 1
    assert "these threads would not end:\npenstock-engine (daemon)\n" in text


def test_clean_run_passes(tmp_path: Path) -> None:
    status, text = run(tmp_path, GOOD, AFTER)
    assert (status, "2 passed" in text) == (0, True), text


HANGS = """
import threading

def test_hangs():
    threading.Event().wait()
"""


def test_hanging_test_ends_process_with_stacks(tmp_path: Path) -> None:
    """With the project's settings but a shorter timeout."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    settings = Path(__file__).parent.parent / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
    sooner = ["-o", "faulthandler_timeout=1", f"--rootdir={tmp_path}", str(tmp_path)]
    ran = subprocess.run([*command, *sooner], capture_output=True, text=True, timeout=SOON)
    assert ran.returncode == 1
    assert "Timeout (0:00:01)!" in ran.stderr and "in test_hangs" in ran.stderr
