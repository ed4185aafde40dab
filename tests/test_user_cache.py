"""Files of the user's cache: written atomically, private, and limited in number."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.user_cache import MOST_FILES, write_private


def test_concurrent_writes_leave_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "loops" / "one"
    contents = [bytes([number]) * (1 + 9_973 * number) for number in range(8)]
    write_private(file, contents[0])

    def write_and_read(content: bytes) -> bool:
        results = []
        for _ in range(30):
            write_private(file, content)
            results.append(file.read_bytes() in contents)
        return all(results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, contents))
    assert list(file.parent.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o600


def test_partial_file_of_killed_process_is_overwritten(tmp_path: Path) -> None:
    """A process that was killed leaves its part, and another one may get its number."""
    file = tmp_path / "one.json"
    tmp_path.chmod(0o700)
    rest = file.with_suffix(f".{os.getpid()}.part")
    rest.write_bytes(b"rest" * 1000)
    write_private(file, b"new")
    assert file.read_bytes() == b"new"


def test_oldest_files_are_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for number in range(MOST_FILES):
        old = tmp_path / f"{number}"
        old.touch()
        os.utime(old, (number, number))
    write_private(tmp_path / "new", b"")
    assert {file.name for file in tmp_path.iterdir()} == {
        "new",
        *(f"{number}" for number in range(1, MOST_FILES)),
    }


@pytest.mark.skipif(os.getuid() == 0, reason="root writes to any folder")
def test_read_only_cache_folder_is_not_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    write_private(tmp_path / "new", b"")
    assert not list(tmp_path.iterdir())
