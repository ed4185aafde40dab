"""Read damaged headers of a GGUF file until the time is over: each is read, or refused in a line.

    python tools/fuzz_gguf.py FILE [--seconds 60] [--seed 0]

A copy of the file's metadata is changed at random: bytes, lengths and counts become others, runs of
bytes come twice or are left out. One file of five is cut off. All that reads headers runs on it:
the header, the config, the tokenizer. An error that is no ModelError is a fault. So is a message of
more than one line, or memory beyond 2 GiB. The first faulty file is kept, and named. A small file
gives some hundred tries a second.
"""

from __future__ import annotations

import argparse
import os
import resource
import struct
import sys
import time
import traceback
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from penstock.errors import ModelError
from penstock.plugins.gguf import architectures
from penstock.plugins.gguf.header import read_header
from penstock.plugins.gguf.loaded_bytes import native_bytes, wide_bytes
from penstock.plugins.gguf.tokenizer import write_tokenizer

HEAD_BYTES = 4_096
"""First bytes of a file, in which half of the changes are made: counts and the first keys."""
EXTREMES = (0, 1, 0xFF, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1)
SPARE_BYTES = 2 << 30
"""Address space beyond the process's own when it begins."""
MOST_CHANGES = 6
LONGEST_MESSAGE = 1_000


def metadata(file: Path) -> bytes:
    """Return a file's bytes in front of its first tensor's numbers."""
    header = read_header(file)
    first = min(tensor.offset for tensor in header.tensors.values())
    with file.open("rb") as stream:
        return stream.read(first)


def changed(raw: bytes, pick: Random) -> bytes:
    """Return a header with a few changes."""
    damaged = bytearray(raw)
    for _ in range(pick.randint(1, MOST_CHANGES)):
        at = pick.randrange(min(len(damaged), HEAD_BYTES) if pick.random() < 0.5 else len(damaged))
        kind = pick.randrange(5)
        if kind == 0:
            damaged[at] = pick.randrange(256)
        elif kind == 1:
            damaged[at : at + 8] = struct.pack("<Q", pick.choice(EXTREMES))
        elif kind == 2:
            damaged[at : at + 4] = struct.pack("<I", pick.choice(EXTREMES) & 0xFFFFFFFF)
        elif kind == 3:
            run = damaged[at : at + pick.randint(1, 64)]
            damaged[at:at] = run
        else:
            del damaged[at : at + pick.randint(1, 64)]
    return bytes(damaged)


def read(file: Path, folder: Path) -> str:
    """Read all that a header says; return why it was refused, or an empty text."""
    try:
        header = read_header(file)
        architectures.config(header)
        native_bytes(header)
        wide_bytes(header)
        write_tokenizer(header, folder)
    except ModelError as error:
        return str(error)
    return ""


def fault(file: Path, folder: Path) -> str | None:
    """Return the fault in the way in which a file is read; None if there is none."""
    try:
        reason = read(file, folder)
    except Exception:  # noqa: BLE001 - whatever is no ModelError is what this looks for
        return traceback.format_exc()
    if "\n" in reason or len(reason) > LONGEST_MESSAGE:
        return f"no short line: {reason[:LONGEST_MESSAGE]!r}"
    return None


def limit_memory() -> None:
    """Let the process take little more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    """Try until the time is over; return 1 at the first fault."""
    parser = argparse.ArgumentParser(description="Read damaged headers of a GGUF file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    raw, pick = metadata(given.file), Random(given.seed)
    if sys.platform == "linux":
        limit_memory()
    until, tried = time.monotonic() + given.seconds, 0
    with TemporaryDirectory(prefix="penstock-fuzz-") as place:
        file = Path(place) / "bad.gguf"
        while time.monotonic() < until:
            damaged = changed(raw, pick)
            file.write_bytes(damaged)
            size = given.file.stat().st_size
            os.truncate(file, pick.randrange(len(damaged)) if pick.random() < 0.2 else size)
            wrong = fault(file, Path(place))
            tried += 1
            if wrong is not None:
                kept = Path(f"fault-{given.seed}-{tried}.gguf")
                kept.write_bytes(file.read_bytes())
                print(f"{kept}, try {tried}:\n{wrong}")
                return 1
    print(f"{tried:,} damaged headers: each read, or refused in one line")
    return 0


if __name__ == "__main__":
    sys.exit(main())
