"""The command line, run as a process or in this process."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import SOON

from penstock.cli import main

SCRIPT = Path(sys.executable).parent / "penstock"

Done = subprocess.CompletedProcess


def run(*arguments: str | Path, stdin: str = "", **environment: str) -> Done[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return subprocess.run(
        [SCRIPT, *arguments],
        input=stdin,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


Capture = pytest.CaptureFixture[str]
Call = Callable[..., Done[str]]


@pytest.fixture
def call(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Call:
    """How to run the command line as `run` does, but in this process; standard input may be bytes,
    read with the given handling of errors."""

    def called(
        *arguments: str, stdin: str | bytes = "", errors: str = "strict", **environment: str
    ) -> Done[str]:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for key in [key for key in os.environ if key.startswith("PENSTOCK_")]:
                patch.delenv(key)
            for key, value in environment.items():
                patch.setenv(key, value)
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), "utf-8", errors))
            code = main(list(arguments))
        return Done(arguments, code, *capsys.readouterr())

    return called


def refused(capsys: Capture, *arguments: str) -> str:
    """Return the one-line error of a refused command."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("penstock: ")
    return line


def open_terminal() -> tuple[int, int]:
    """Open a pseudo-terminal; skip if the machine has none, as in a bare container."""
    try:
        return pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal can be opened here: {error}")


def typed(text: str, *arguments: str | Path) -> tuple[int, str]:
    """Run the script on a terminal, type `text`; return exit code and output."""
    ours, theirs = open_terminal()
    with subprocess.Popen(
        [SCRIPT, *arguments], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.write(ours, text.encode())
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # how a pseudo-terminal says that the other end has closed
            pass
        code = process.wait(timeout=SOON)
    os.close(ours)
    return code, shown.decode()
