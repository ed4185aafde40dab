"""The process beside a replica that kills it when it hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from patience import SOON

BEAT_SECONDS, HUNG_SECONDS = 0.05, 0.3
WATCHED = f"""
import time
from penstock.plugins.ray.hang_watcher import watch_this_process
watcher = watch_this_process(beat_seconds={BEAT_SECONDS}, hung_seconds={HUNG_SECONDS})
print(watcher.pid, flush=True)
time.sleep({SOON})
"""


@pytest.fixture
def watched() -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Return a process and its watcher."""
    process = subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, psutil.Process(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def test_stopped_process_is_killed(
    watched: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    process, watcher = watched
    time.sleep(2 * HUNG_SECONDS)
    assert process.poll() is None, "it beats"
    process.send_signal(signal.SIGSTOP)
    assert process.wait(SOON) == -signal.SIGKILL
    assert not psutil.wait_procs([watcher], SOON)[1]


def test_watcher_ends_with_its_process(
    watched: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    process, watcher = watched
    process.kill()
    assert not psutil.wait_procs([watcher], SOON)[1]
