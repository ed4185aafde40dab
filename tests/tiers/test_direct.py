"""Direct writes past the page cache give the right files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.tiers.disk import block_files
from penstock.tiers.disk.block_files import ALIGNED_BYTES, Writer

SIZES = [0, 1, ALIGNED_BYTES - 1, ALIGNED_BYTES, ALIGNED_BYTES + 1, 3 * ALIGNED_BYTES + 17, 5 << 20]


def numbers(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("is_direct", [True, False])
def test_written_file_has_bytes_and_private_mode(
    nbytes: int, is_direct: bool, tmp_path: Path
) -> None:
    writer, path = Writer(), tmp_path / "file"
    writer._direct = writer._direct and is_direct
    writer.write(path, numbers(nbytes))
    assert path.read_bytes() == numbers(nbytes)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_writer_can_be_reused_for_files_of_all_sizes(tmp_path: Path) -> None:
    """Its buffer holds earlier contents."""
    writer = Writer()
    for number, nbytes in enumerate([*reversed(SIZES), *SIZES]):
        path = tmp_path / str(number)
        writer.write(path, numbers(nbytes, number))
        assert path.read_bytes() == numbers(nbytes, number)


@pytest.mark.parametrize("is_direct", [True, False])
def test_file_has_final_size_when_synced(
    is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(block_files.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    writer = Writer()
    writer._direct = writer._direct and is_direct
    writer.write(tmp_path / "file", numbers(17))
    assert synced == [17]


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        Writer().write(path, numbers(ALIGNED_BYTES))
    assert path.read_bytes() == b"mine"


@pytest.mark.skipif(not block_files.DIRECT, reason="the system keeps all files in its pages")
@pytest.mark.parametrize("refuses", ["open", "write"])
def test_buffered_writes_are_used_if_direct_io_is_unsupported(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in some memory and network file systems, on open or on write."""
    asked: list[str] = []
    true = {"open": os.open, "write": os.write}

    def refusing(name: str) -> Any:
        def call(first: Any, second: Any, *rest: Any) -> Any:
            wants = second & block_files.DIRECT if name == "open" else name == refuses
            if wants and not asked and name == refuses:
                asked.append(name)
                raise OSError(errno.EINVAL, "not here")
            return true[name](first, second, *rest)

        return call

    for name in true:
        monkeypatch.setattr(block_files.os, name, refusing(name))
    writer = Writer()
    for number in range(2):
        writer.write(tmp_path / str(number), numbers(ALIGNED_BYTES + 1, number))
        assert (tmp_path / str(number)).read_bytes() == numbers(ALIGNED_BYTES + 1, number)
    assert asked == [refuses], "asked once, not for each file"
    assert not writer._direct


def test_disk_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(block_files.os, "fsync", fails)
    with pytest.raises(OSError, match="broken"):
        Writer().write(tmp_path / "file", numbers(10))
