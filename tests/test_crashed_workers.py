"""A run with pytest-xdist ends, and has all results, if a worker crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"
PASSES = "def test_passes(): pass\n"
CRASHES = "def test_crashes():\n    import os\n    os._exit(7)\n"
BETWEEN = PASSES + CRASHES + PASSES.replace("passes", "passes_after")
LAST = PASSES + CRASHES
FILES = 4


def run(folder: Path, source: str, *plugins: str, workers: int, seconds: float) -> str:
    """Run files of one passing test each, and then one with another source; return the output."""
    for number in range(FILES):
        (folder / f"test_{number}.py").write_text(PASSES)
    (folder / f"test_{FILES}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    dealt = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    loaded = [part for plugin in plugins for part in ("-p", plugin)]
    ran = subprocess.run(
        [*command, *dealt, *loaded, "--rootdir", str(folder), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 1
    return ran.stdout


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("source", "others"), [(BETWEEN, 2), (LAST, 1)], ids=["between", "last"])
def test_run_ends_if_worker_crashes(tmp_path: Path, source: str, others: int, workers: int) -> None:
    text = run(tmp_path, source, "crashed_workers", workers=workers, seconds=120)
    assert f"1 failed, {FILES + others} passed" in text
    assert f"crashed while running 'test_{FILES}.py::test_crashes'" in text


def test_check_detects_run_that_waits(tmp_path: Path) -> None:
    """Negative control; when it fails, `crashed_workers` is no longer needed."""
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, BETWEEN, workers=1, seconds=15)
