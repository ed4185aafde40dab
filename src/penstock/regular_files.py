"""Reads of untrusted files: only regular files, of a bounded size.

Reading a pipe would block, and a device such as `/dev/zero` would fill the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from penstock.plurals import counted

TEXT_BYTES = 16 << 20
"""Maximum size of a settings or config file in bytes."""


def check_regular(file: Path, most_bytes: int | None = None) -> None:
    """Raise OSError unless `file` is a regular file of at most `most_bytes`."""
    _check(file, file.stat(), most_bytes)


def open_regular(file: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading; OSError if not a regular file or larger than `most_bytes`."""
    stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check(file, os.fstat(stream.fileno()), most_bytes)
    except BaseException:
        stream.close()
        raise
    return stream


def read_text(file: Path, most_bytes: int = TEXT_BYTES) -> str:
    """Read a text file in UTF-8. Raises like `open_regular`, or UnicodeDecodeError."""
    with open_regular(file, most_bytes) as stream:
        return stream.read().decode("utf-8")


def _check(file: Path, about: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    if most_bytes is not None and about.st_size > most_bytes:
        size = f"it has {counted(about.st_size, 'byte')}, more than {most_bytes:,}"
        raise OSError(errno.EFBIG, size, str(file))
