"""Servers as separate processes, for tests of several servers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from patience import SOON

START_SECONDS = STOP_SECONDS = SOON


@dataclass
class Process:
    """A listening `penstock serve` process."""

    url: str
    running: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """Drain and end the process."""
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
            self.running.communicate(timeout=STOP_SECONDS)

    def stats(self) -> dict[str, float]:
        """Return the engine's statistics."""
        found: dict[str, float] = httpx.get(f"{self.url}/v1/cache/stats", timeout=SOON).json()
        return found["stats"]  # type: ignore[return-value]


@contextmanager
def serving(*flags: str, port: int = 0) -> Iterator[Process]:
    """Run `penstock serve` with the embedded model until left; the URL is read from its output."""
    running = subprocess.Popen(
        (sys.executable, "-m", "penstock", "serve", "--port", str(port), *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert running.stdout is not None
        said = []
        for line in running.stdout:  # of its progress, at first
            said.append(line)
            if (found := re.search(r"http://\S+", line)) is not None:
                break
        else:
            raise AssertionError("".join(said))
        yield Process(found[0], running)
    finally:
        running.kill()
        running.communicate(timeout=STOP_SECONDS)


def wait_until(true: Callable[[], object], seconds: float = START_SECONDS) -> None:
    """Wait until a function returns something true."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.05)
