"""Output of a benchmark: JSON, a table, and a record file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from rich.console import Console
from rich.table import Table

from penstock import __version__
from penstock.blas import load_blas
from penstock.cli.model_table import name_of

Notify = Callable[[str, int, int], None]
"""Takes a description, the completed steps or seconds, and the total."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table: ours, the rival's, and an optional goal."""

    figure: str
    ours: str
    rival: str
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of one benchmark."""

    name: str
    """Name of the command and of the record file: `growth`."""
    claim: str
    rival: str
    penstock: dict[str, Any]
    rival_figures: dict[str, Any]
    ratio: dict[str, float | None]
    """Rival over penstock; above 1 is better for us."""
    goal: dict[str, Any]
    met: bool
    lines: Sequence[Line]
    raw: dict[str, Any]
    """Every round, only for the record."""
    dtype: str
    heading: str = ""
    """Column heading for several rivals; by default the rival's name."""

    def as_object(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "penstock": self.penstock,
            self.rival: self.rival_figures,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
            "environment": environment(self.dtype),
        }


def environment(dtype: str) -> dict[str, Any]:
    """Return the environment of the measurement: machine, versions, back end, BLAS, dtype."""
    back_end = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "penstock": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "system": platform.platform(terse=True),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_1_minute": round(os.getloadavg()[0], 2),
        "memory_bytes": psutil.virtual_memory().total,
        "back_end": back_end,
        "blas": Path(load_blas().name).name,
        "dtype": dtype,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def publish(report: Report, *, as_json: bool, save: Path | None) -> None:
    """Print the table, or JSON with `as_json`; store all rounds in `save`."""
    record = report.as_object()
    if save is not None:
        keep(report.name, {**record, "raw": without_folder(report.raw)}, save)
    if as_json:
        print(json.dumps(record))
        return
    console = Console(highlight=False)
    if report.lines:
        console.print(table(report))
    where = record["environment"]
    console.print(
        f"{where['cpu']}, {where['cores']} cores, {where['back_end']} with {where['blas']}, "
        f"mlx {where['mlx']}, mlx-lm {where['mlx-lm']}, {where['dtype']}"
    )


def without_folder(raw: dict[str, Any]) -> dict[str, Any]:
    """Replace the path of a load's model by its name; folders do not belong in records."""
    load = raw.get("load")
    if not isinstance(load, dict) or not isinstance(load.get("model"), str):
        return raw
    return {**raw, "load": {**load, "model": name_of(load["model"])}}


def keep(name: str, record: dict[str, Any], folder: Path) -> None:
    """Store a record, with its `environment`, in a file named by the date.

    A record of the same second is kept: the names of later ones end in -2, -3, and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = record["environment"]["date"].replace(":", "").replace("+0000", "Z")
    path = folder / f"{name}-{stamp}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{stamp}-{number}.json"
    path.write_text(json.dumps(record) + "\n")


def table(report: Report) -> Table:
    """Return a table of all lines with their verdicts."""
    drawn = Table(title=report.claim, title_justify="left", box=None, pad_edge=False)
    drawn.add_column("")
    for heading in ("penstock", report.heading or report.rival, "goal", ""):
        drawn.add_column(heading, justify="right")
    for line in report.lines:
        verdict = "" if line.met is None else "met" if line.met else "NOT MET"
        drawn.add_row(line.figure, line.ours, line.rival, line.goal, verdict)
    return drawn
