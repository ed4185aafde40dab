"""`penstock serve --ray` as a process, for tests with Ray."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from server_processes import STOP_SECONDS


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextmanager
def in_ray(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `penstock serve --ray` until left; yield its URL once it is printed."""
    port = free_port()
    command = (
        *(sys.executable, "-m", "penstock", "serve", "--ray", "--port", str(port)),
        *("--replica-cpus", "0.25", *flags),
    )
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    try:
        assert running.stdout is not None
        for line in running.stdout:
            said.append(line)
            if line.startswith("routing"):
                break
        else:
            pytest.fail("".join(said[-20:]))
        yield f"http://127.0.0.1:{port}", running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
        try:
            running.communicate(timeout=4 * STOP_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
