"""Temporary folders are removed at exit, or by the next process after a kill."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.passing_folders import passing_folder

HOLD = """
import sys, time
from penstock.passing_folders import passing_folder
with passing_folder() as folder:
    (folder / "weights").write_text("half")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def held() -> Iterator[Path]:
    """Yield the folder of another process, which is killed on exit."""
    with subprocess.Popen((sys.executable, "-c", HOLD), stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            yield Path(other.stdout.readline().strip())
        finally:
            other.kill()


def test_temporary_folder_is_private_and_removed_at_exit(place: Path) -> None:
    with pytest.raises(KeyError), passing_folder() as folder:
        assert folder.parent == place and folder.stat().st_mode & 0o077 == 0
        (folder / "inner").mkdir()
        raise KeyError
    assert not list(place.iterdir())


def test_folder_of_killed_process_is_removed_by_next(place: Path) -> None:
    with held() as kept:
        with held() as left:
            pass
        assert (left / "weights").exists()
        other = place / "penstock-of-something-else"
        other.mkdir()
        with passing_folder():
            assert not left.exists()
            assert (kept / "weights").exists() and other.exists()
