"""Groups of ranks on one machine, over loopback, for tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

WORKER = Path(__file__).parent / "rank_worker.py"
SECONDS = 1_200.0
"""For a thousand requests, on a machine that has other things to do."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Results of a rank."""

    code: int
    found: dict[str, Any] | None
    errors: str


def ports(count: int) -> list[int]:
    """Return unused ports."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def started(size: int, arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a command once per rank, as `mlx.launch` does; end all on exit."""
    with NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"127.0.0.1:{port}"] for port in ports(size)], hosts)
        hosts.flush()
        processes = []
        for rank in range(size):
            group = {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts.name} if size > 1 else {}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **group},
                )
            )
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def run(size: int, scenario: str, **told: Any) -> list[Ended]:
    """Run a scenario on this number of ranks, and return the result of each."""
    with started(size, [str(WORKER), scenario, json.dumps(told)]) as processes:
        return [ended(process) for process in processes]


def ended(process: subprocess.Popen[str], seconds: float = SECONDS) -> Ended:
    out, errors = process.communicate(timeout=seconds)
    last = out.strip().splitlines()[-1:] or [""]
    found = json.loads(last[0]) if last[0].startswith("{") else None
    return Ended(process.returncode, found, errors)


def results(size: int, scenario: str, **told: Any) -> list[dict[str, Any]]:
    """Run a scenario that all ranks must complete; return the result of each."""
    found = []
    for each in run(size, scenario, **told):
        assert each.code == 0 and each.found is not None, each.errors
        found.append(each.found)
    return found
