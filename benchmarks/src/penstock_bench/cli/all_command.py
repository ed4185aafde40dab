"""`penstock bench all`: runs the benchmarks one after the other, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import typer

from penstock.models.named import OFFLINE
from penstock_bench.cli.bench_options import Docs, Records

Command: TypeAlias = tuple[str, ...]

HAND_IN = (
    "To hand them in, add these files to benchmarks/results/ in a pull request. They hold figures, "
    "and names of the machine's parts."
)

BENCHES: tuple[Command, ...] = (
    ("bench", "kernels"),
    ("bench", "kernels", "--codec", "auto3.5x"),
    ("bench", "growth"),
    ("bench", "recall"),
    ("bench", "lookup"),
    ("bench", "shared-prefix", "--cold-rounds", "0"),
    ("bench", "hit", "--rounds", "2"),
    ("bench", "hybrid"),
    ("bench", "single"),
    ("bench", "attend"),
    ("bench", "speculate"),
    ("bench", "ragged"),
    *(("bench-kv-cache", "--layers", "8", "--data", d) for d in ("gauss", "outliers", "biased")),
    ("bench", "quantized", "--codec", "kivi8", "--longest", "4096"),
)
"""Benchmarks that need nothing but the machine, with their settings."""
LEFT_OUT = {
    "mac": "runs other benches",
    "trace": "needs a file of requests",
    "cluster": "needs a file of requests",
    "serve": "takes longer than all others",
    "restore": "times the disk",
    "switch": "needs a real model",
    "decide": "needs a real model",
    "embed": "needs sentence-transformers",
    "remember": "counts right answers, and times nothing",
    "store": "compares with vllm-mlx, where that is installed",
    "million": "takes longer than all others together",
    "weights": "needs a real model",
    "agents": "shows agents at work, and times nothing",
    "verify": "compares answers, and times nothing",
}
"""Excluded benchmarks, with the reason."""
PAGES = ("growth", "recall")
"""Benchmarks that write pages of the docs."""
PICTURES = ("single", "quantized")
"""Benchmarks whose picture is in the docs."""
ENDS = {0: "goals met", 1: "a goal was not met"}
"""Meaning of a benchmark's exit status; any other is an error."""


@dataclass(frozen=True)
class BenchEnd:
    """Result of one benchmark."""

    command: Command
    status: int | None
    """Exit status; None if the time was over before the benchmark's end."""
    records: tuple[str, ...]
    """Paths of the stored records."""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status not in ENDS

    def __str__(self) -> str:
        end = "no time was left"
        if self.status is not None:
            end = ENDS.get(self.status, f"error (exit status {self.status})")
        lines = (f"{' '.join(self.command)}: {end}", *(self.records or ("no record",)))
        return "\n    ".join(lines)


def run_all(
    commands: Sequence[Command],
    folder: Path,
    docs: Path | None = None,
    seconds: float | None = None,
) -> list[BenchEnd]:
    """Run benchmarks one after the other, continuing after failures; print the progress.

    After `seconds` the current benchmark is stopped, and those after it are not started.
    """
    ends = []
    deadline = None if seconds is None else time.monotonic() + seconds
    for number, command in enumerate(commands, 1):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            ends.append(BenchEnd(command, None, ()))
            continue
        print(f"[{number} of {len(commands)}] penstock {' '.join(command)}", flush=True)
        ends.append(_run(command, folder, docs, left))
        print(flush=True)
    return ends


def _run(command: Command, folder: Path, docs: Path | None, left: float | None) -> BenchEnd:
    """Run a benchmark in a separate process for `left` seconds, without stdin and downloads."""
    before = set(_records(folder))
    drawn = () if docs is None else drawing(command, docs)
    line = (sys.executable, "-m", "penstock", *command, "--save", str(folder), *drawn)
    offline = {**os.environ, OFFLINE: "1"}
    began = time.monotonic()
    status: int | None = None
    try:
        run = subprocess.run(line, check=False, stdin=subprocess.DEVNULL, env=offline, timeout=left)
        status = run.returncode
    except subprocess.TimeoutExpired:
        print("stopped: the time is over", flush=True)
    records = tuple(p for p in _records(folder) if p not in before)
    return BenchEnd(command, status, records, time.monotonic() - began)


def drawing(command: Command, docs: Path) -> Command:
    """Add the flags with which a benchmark writes its part of the docs."""
    name = command[1]
    if name in PAGES:
        return ("--docs", str(docs))
    return ("--plot", str(docs / f"{name}.png")) if name in PICTURES else ()


def _records(folder: Path) -> Iterator[str]:
    return (str(file.absolute()) for file in sorted(folder.glob("*.json")))


def all_benches(save: Records, docs: Docs = None) -> None:
    """Run the benches that need nothing but this machine, one after the other.

    Needs no input and no network. Continues after a goal that is not met. Lists the records at the
    end, and how to contribute them. Exits with 1 if a goal is not met, and with 2 if a bench fails.
    """
    ends = run_all(BENCHES, save, docs)
    print("Benches and their records:")
    for end in ends:
        print(f"  {end}")
    print(HAND_IN)
    raise typer.Exit(max(2 if end.failed else end.status or 0 for end in ends))
