"""Watchdog process of each replica, which kills it if it hangs.

    replica ──a byte a second──> watcher ──SIGKILL after HUNG_SECONDS without one──> replica

Ray only asks a hung replica to exit, which a stopped process cannot do. It would keep its memory,
and Ray would not start another replica on its CPUs and GPUs.

Run as a program, this file imports nothing from penstock, so it starts fast.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

BEAT_SECONDS = 1.0
HUNG_SECONDS = 20.0
"""Seconds without a byte until a replica is killed; the router ejects it earlier."""
READ_BYTES = 4_096


def watch_this_process(
    *, beat_seconds: float = BEAT_SECONDS, hung_seconds: float = HUNG_SECONDS
) -> subprocess.Popen[bytes]:
    """Start a watcher, which ends with this process, and a thread that sends it bytes."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    numbers = (reading, os.getpid(), beat_seconds, hung_seconds)
    program = [sys.executable, "-I", "-S", __file__, *map(str, numbers)]
    try:
        watcher = subprocess.Popen(program, pass_fds=(reading,), stdin=subprocess.DEVNULL)
    finally:
        os.close(reading)
    arguments = (writing, beat_seconds)
    threading.Thread(target=_beat, args=arguments, name="penstock-beat", daemon=True).start()
    return watcher


def _beat(pipe: int, beat_seconds: float) -> None:
    while True:
        try:
            with suppress(BlockingIOError):  # the watcher is stopped, and the pipe is full
                os.write(pipe, b".")
        except OSError:  # the watcher has ended
            return
        time.sleep(beat_seconds)


# ---- the program


def _watch(pipe: int, watched: int, beat_seconds: float, hung_seconds: float) -> None:
    # Counts intervals instead of measuring time, which would include a suspend of the machine.
    silent_beats = 0
    while silent_beats * beat_seconds < hung_seconds:
        if select.select([pipe], [], [], beat_seconds)[0]:
            if not os.read(pipe, READ_BYTES):  # the replica has ended
                return
            silent_beats = 0
        else:
            silent_beats += 1
    if os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
