"""Child processes that end with their parent, however it ends.

    start ──> this file as a program ──exec──> the command, under the same process id
                │ Linux: the kernel sends it SIGTERM when the thread that started it is gone
                └ elsewhere: a watcher process does, when the parent's end of a pipe closes

As a program it imports nothing from penstock, so it starts fast.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

KERNEL_WATCHES = sys.platform == "linux"
"""Whether the kernel signals a process when its parent ends."""
LOOK_SECONDS = 0.5
"""Seconds between a watcher's checks whether its command has ended."""
STOP_SECONDS = 15.0
"""Seconds between SIGTERM and SIGKILL."""
_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command that gets SIGTERM when this process, or the calling thread, ends.

    `options` are those of `subprocess.Popen`. If the program is missing, the process exits with
    code 1, and no error is raised.
    """
    program = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    if KERNEL_WATCHES:
        return subprocess.Popen([*program, "-1", *command], **options)
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [*program, str(reading), *command], pass_fds=(reading,), **options
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(process, os.close, writing)
    return process


def run(
    command: Sequence[str],
    *,
    input: bytes | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command started with `start` to its end, like `subprocess.run`."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with start(command, **{"stdin": stdin, **options}) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def end(process: subprocess.Popen[Any], seconds: float = STOP_SECONDS) -> None:
    """End a process with SIGTERM, then with SIGKILL if it still runs after `seconds`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- the program


def _become(parent: int, pipe: int, command: list[str]) -> None:
    if pipe < 0:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call
            sys.exit(1)
    else:
        _watch_beside(pipe)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _watch_beside(pipe: int) -> None:
    """Start a detached process that watches a pipe and ends this process when it closes."""
    watched = os.getpid()
    child = os.fork()
    if child:
        os.close(pipe)
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for stream in (0, 1, 2):  # readers of the command's output must not wait for the watcher
        os.close(stream)
    while _lives(watched):
        if select.select([pipe], [], [], LOOK_SECONDS)[0]:
            _kill(watched, signal.SIGTERM)
            until = time.monotonic() + STOP_SECONDS
            while _lives(watched) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
            _kill(watched, signal.SIGKILL)
            break
    os._exit(0)


def _lives(process: int) -> bool:
    return _kill(process, 0)


def _kill(process: int, sig: int) -> bool:
    """Send a signal; return False if there is no such process."""
    try:
        os.kill(process, sig)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    _become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
