"""`penstock bench mac`: one file about a machine with a GPU, in ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from penstock_bench.cli.all_command import ENDS, BenchEnd, Command, run_all

RECORDED: tuple[Command, ...] = (
    ("bench", "kernels"),
    (
        *("bench", "single", "--rounds", "2", "--longest", "0"),
        *("--prompt", "1024", "--prompt", "8192", "--prompt", "32768"),
    ),
    ("bench", "shared-prefix", "--cold-rounds", "0"),
    ("bench", "hit", "--rounds", "2"),
    ("bench", "attend"),
)
"""Self-test of the kernels, decode and prefill beside mlx-lm, a shared prefix, a hit, a choice."""
SEND = (
    "To send it, attach the file to an issue, or add it to benchmarks/results/ in a pull request. "
    "It holds figures, and names of the machine's parts."
)


def mac(
    out: Annotated[
        Path,
        typer.Option(
            help="File of the record, which is replaced.", metavar="FILE.json", dir_okay=False
        ),
    ] = Path("penstock-record.json"),
) -> None:
    """Record a GPU in one file: kernels, speed beside mlx-lm, sharing.

    Needs no input and no network, and takes ten minutes on a Mac. Exits with 2 if a bench fails, as
    on tokens that differ from mlx-lm's; goals that are not met are only recorded.
    """
    doctor = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--json"], capture_output=True, text=True
    )
    with TemporaryDirectory() as folder:
        ends = run_all(RECORDED, Path(folder))
        out.write_text(json.dumps(merged(doctor.stdout, ends)) + "\n")
    failed = [end for end in ends if end.status not in ENDS]
    for end in failed:
        print(f"failed: penstock {' '.join(end.command)}")
    print(f"The record is {out.absolute()}\n{SEND}")
    raise typer.Exit(2 if failed else 0)


def merged(machine: str, ends: Sequence[BenchEnd]) -> dict[str, Any]:
    """Return the record of a machine: the doctor's report, and each bench with its records."""
    benches = [
        {
            "command": " ".join(("penstock", *end.command)),
            "status": end.status,
            "records": [json.loads(Path(path).read_text()) for path in end.records],
        }
        for end in ends
    ]
    return {"machine": json.loads(machine) if machine else None, "benches": benches}
