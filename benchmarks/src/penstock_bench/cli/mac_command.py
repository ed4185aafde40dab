"""`penstock bench mac`: one file about a machine with a GPU, in ten minutes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from penstock.cli.model_table import name_of
from penstock.cli.planned_spec import limit_or_usual, read_spec
from penstock.errors import SettingError
from penstock.plurals import counted
from penstock_bench.cli.all_command import BenchEnd, Command, run_all

_SINGLE: Command = ("bench", "single", "--rounds", "2", "--longest", "0")
_ATTEND: Command = ("bench", "attend", "--rounds", "3")
_SHARED: Command = ("bench", "shared-prefix", "--rounds", "2", "--cold-rounds", "0")
RECORDED: tuple[Command, ...] = (
    ("bench", "kernels"),
    (*_SINGLE, "--prompt", "1024"),
    (*_SHARED, "--prefix", "2048"),
    ("bench", "hit", "--rounds", "2", "--tokens", "4096"),
    (*_ATTEND, "--tokens", "8192"),
    (*_SINGLE, "--prompt", "8192"),
    (*_SHARED, "--prefix", "8192"),
    (*_ATTEND, "--tokens", "32768"),
    (*_SINGLE, "--prompt", "32768"),
)
"""Self-test of the kernels, decode and prefill beside mlx-lm, a shared prefix, a hit, a choice.

The longest are last: a slow machine leaves them out.
"""
SEND = (
    "To send it, attach the file to an issue, or add it to benchmarks/results/ in a pull request. "
    "It holds figures, and names of the machine's parts."
)

_FOLDERS = re.compile(r"[^\s'\"=:,;()\[\]]*/(?=[^\s/])")
"""Part of a path before its last name."""

MEASURED_ON_MODEL = ("single", "shared-prefix", "hit")


def mac(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of decode, prefill, sharing and hit, in place of a random one: a folder, a "
            ".gguf file, or a name such as smollm2. The record has its name only.",
            metavar="MODEL",
            show_default="a random llama",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="File of the record, which is replaced.", metavar="FILE.json", dir_okay=False
        ),
    ] = Path("penstock-record.json"),
    minutes: Annotated[
        float,
        typer.Option(
            help="Time for everything; benches that it leaves no time for are not in the record.",
            metavar="MINUTES",
            min=0.1,
        ),
    ] = 10,
) -> None:
    """Record a GPU in one file: kernels, speed beside mlx-lm, sharing.

    Needs no input and no network. Stops after ten minutes (--minutes), and lists what a slow
    machine had no time for. Exits with 2 if no bench ends in time, or one fails, as on tokens that
    differ from mlx-lm's; goals that are not met are only recorded. A model with real weights has to
    be there (penstock pull); its tokens are not compared.
    """
    _check_out(out)
    if model is not None:
        read_spec(model, "auto", limit_or_usual(None))  # to report errors before anything runs
    time = counted(int(minutes) if minutes.is_integer() else minutes, "minute")
    doctor = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--json"], capture_output=True, text=True
    )
    with TemporaryDirectory() as folder:
        benches = [_with_model(bench, model) for bench in RECORDED]
        ends = run_all(benches, Path(folder), seconds=60 * minutes)
        if all(end.status is None for end in ends):
            raise SettingError(
                f"nothing was measured: no bench ended within {time}; try --minutes {4 * minutes:g}"
            )
        out.write_text(json.dumps(merged(doctor.stdout, ends, model)) + "\n")
    failed = [end for end in ends if end.failed]
    for end in failed:
        print(f"failed: penstock {' '.join(end.command)}")
    late = [end for end in ends if end.status is None]
    for end in late:
        print(f"no time: penstock {' '.join(end.command)}")
    if late:
        print(f"the time of {time} was over; --minutes {4 * minutes:g} records more")
    print(f"The record is {out.absolute()}\n{SEND}")
    raise typer.Exit(2 if failed else 0)


def _check_out(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    was_there = file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise SettingError(
            f"--out {file} cannot be written ({error.strerror}); choose another file"
        ) from None
    if not was_there:
        file.unlink()


def _with_model(bench: Command, model: str | None) -> Command:
    return (
        bench if model is None or bench[1] not in MEASURED_ON_MODEL else (*bench, "--model", model)
    )


def merged(machine: str, ends: Sequence[BenchEnd], model: str | None = None) -> dict[str, Any]:
    """Return the record of a machine: the doctor's report, and each bench with its records."""
    benches = [
        {
            "command": " ".join(
                ("penstock", *(name_of(word) if word == model else word for word in end.command))
            ),
            "status": end.status,
            "seconds": round(end.seconds, 1),
            "records": [json.loads(Path(path).read_text()) for path in end.records],
        }
        for end in ends
    ]
    return {"machine": without_folders(json.loads(machine or "null")), "benches": benches}


def without_folders(value: Any) -> Any:
    """Return a value of JSON whose texts have the last names of paths only."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    return _FOLDERS.sub("", value.replace(f"{Path.home()}/", "/"))
