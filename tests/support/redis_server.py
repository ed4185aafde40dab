"""A real Valkey or Redis on this machine, started, stopped, hung and killed by a test."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
START_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RedisServer:
    """A server on a port of its own, which it keeps when it is started again, empty.

    Args:
        folder: in which it runs.
        options: of its command line, as `maxmemory="1mb"`.
    """

    def __init__(self, folder: Path, **options: str) -> None:
        if PROGRAM is None:
            pytest.skip("there is neither valkey-server nor redis-server")
        self._redis = pytest.importorskip("redis")
        self._folder, self._options = folder, options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        secret = self._options.get("requirepass")
        return f"redis://{f':{quote(secret)}@' if secret else ''}127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        return self._redis.Redis.from_url(self.url, socket_timeout=START_SECONDS)

    def start(self) -> None:
        given = {"port": str(self.port), "save": "", "bind": "127.0.0.1", **self._options}
        assert PROGRAM is not None
        command = [PROGRAM, *(word for name in given for word in (f"--{name}", given[name]))]
        self.process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client.ping()
                return
            except self._redis.ConnectionError:
                assert self.process.poll() is None and time.monotonic() < until
                time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal: SIGKILL ends it, SIGSTOP lets it hang, SIGCONT lets it go on."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(START_SECONDS)
            self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.send(signal.SIGKILL)

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self.client.scan_iter())

    def calls(self, command: str) -> int:
        """How often a command was called since the start."""
        found = self.client.info("commandstats").get(f"cmdstat_{command}")
        return 0 if found is None else int(found["calls"])
