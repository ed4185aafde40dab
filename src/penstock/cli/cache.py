"""`penstock cache`: inspect, check and shrink a folder of the cold tier."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli import options
from penstock.cli.help_groups import ListedCommands
from penstock.cli.settings_options import option_of, size_bytes
from penstock.cli.whole_words import print_line
from penstock.config import EngineSettings
from penstock.errors import CacheFileError, SettingError
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted

if TYPE_CHECKING:
    from penstock.tiers.disk.folder import Folder, FolderUsage, Freed, Progress
    from penstock.tiers.disk.index import Entry
    from penstock.tiers.disk.integrity import IntegrityReport

SHOWN_FAULTS = 20
app = typer.Typer(
    cls=ListedCommands,
    help="Inspect, check and shrink a folder of the cold tier.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Where: TypeAlias = Annotated[
    Path,
    option_of(
        EngineSettings,
        "ssd_cache_dir",
        words="Folder given to penstock serve; a server may be using it.",
    ),
]


@app.command()
def ls(
    ssd_cache_dir: Where,
    limit: Annotated[
        int,
        typer.Option(help="Number of blocks to show, most valuable first.", metavar="ROWS", min=1),
    ] = 50,
    as_json: options.Json = False,
) -> None:
    """List the blocks by model, most valuable first.

    The column "uses ago" counts uses of any blocks since a block's last use. --json lists all
    blocks.
    """
    with _opened(ssd_cache_dir) as folder:
        entries, uses = folder.entries(), folder.index.uses
    if as_json:
        _print_json(ssd_cache_dir, blocks=[_block(entry, uses) for entry in entries])
        return
    console = _console()
    console.print(_listing(entries[:limit], uses))
    if len(entries) > limit:
        left_out = f"{len(entries) - limit:,} more blocks of less value; --limit shows more"
        print_line(console, left_out)


@app.command()
def stats(ssd_cache_dir: Where, as_json: options.Json = False) -> None:
    """Show blocks and bytes of each model, bytes written today, and foreign files."""
    with _opened(ssd_cache_dir) as folder:
        usage = folder.usage()
    if as_json:
        _print_json(ssd_cache_dir, **asdict(usage), total=_total(usage))
    else:
        _show_usage(usage)


@app.command()
def verify(
    ssd_cache_dir: Where,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Remove damaged blocks, records of missing ones and left-over files; add valid "
            "blocks that the index lacks.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check each block's hash, header, name and tokens, and the index against the files.

    Exits with 1 if a fault was found and not repaired.
    """
    from penstock.tiers.disk.folder import IndexDamaged
    from penstock.tiers.disk.integrity import make_index
    from penstock.tiers.disk.integrity import verify as verify_folder

    damage = None
    try:
        with _opened(ssd_cache_dir):
            pass
    except IndexDamaged as error:
        damage = str(error)
        if not repair:
            _print_damage(ssd_cache_dir, damage, as_json)
            raise typer.Exit(1) from None
        with _one_line(ssd_cache_dir):
            make_index(ssd_cache_dir.expanduser())
    with _opened(ssd_cache_dir) as folder, _progress("verify", folder.index.nbytes) as progress:
        verdict = verify_folder(folder, repair=repair, progress=progress)
    if as_json:
        counts = {kind: verdict.count(kind) for kind in ("damaged", "missing", "unknown")}
        counts["left_over"] = verdict.count("left over")
        _print_json(ssd_cache_dir, index=damage, **asdict(verdict), **counts)
    else:
        _show_verdict(verdict, damage is not None)
    raise typer.Exit(1 if verdict.faults and not repair else 0)


@app.command()
def prune(
    ssd_cache_dir: Where,
    to: Annotated[
        str | None,
        typer.Option(
            help="Remove the least valuable blocks until the rest takes no more than this.",
            metavar="BYTES",
            show_default="none",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Remove the blocks of the model whose fingerprint begins with this.",
            metavar="PREFIX",
            show_default="none",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Shrink the folder to a size, or remove one model's blocks; keeps unfinished writes."""
    if (to is None) == (model is None):
        raise SettingError("name one of --to and --model")
    limit_bytes = None if to is None else size_bytes("--to", to)
    with _opened(ssd_cache_dir) as folder, _progress("prune", None) as progress:
        if limit_bytes is not None:
            freed = folder.shrink(limit_bytes, progress)
        else:
            freed = folder.clear(progress, folder.model(model or ""))
    _print_freed(ssd_cache_dir, freed, as_json)


@app.command()
def clear(
    ssd_cache_dir: Where,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Do not ask for confirmation; required without a terminal."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Remove all blocks of all models, except those being written.

    Exits with 1 if not confirmed.
    """
    with _opened(ssd_cache_dir) as folder:
        if not yes:
            _ask(folder)
        with _progress("clear", folder.index.nbytes) as progress:
            freed = folder.clear(progress)
    _print_freed(ssd_cache_dir, freed, as_json)


# ---- the folder and its errors


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        hint = "another process locks the index, or it is not writable; try again"
        raise CacheFileError(f"{path}: {error}: {hint}") from error
    except (OSError, sqlite3.Error) as error:
        raise CacheFileError(f"{path}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Folder]:
    from penstock.tiers.disk.folder import Folder

    with _one_line(path), Folder(path.expanduser()) as folder:
        yield folder


@contextmanager
def _progress(what: str, total_bytes: int | None) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def _ask(folder: Folder) -> None:
    if not sys.stdin.isatty():
        raise SettingError("clear removes all blocks; without a terminal to confirm at, add --yes")
    content = f"{counted(len(folder.index), 'block')} ({format_bytes(folder.index.nbytes)})"
    if not typer.confirm(f"Remove all {content} of {folder.path}?", err=True):
        raise typer.Exit(1)


# ---- output


def _console() -> Console:
    return Console(highlight=False, markup=False)


def _print_line(line: str) -> None:
    print_line(_console(), line)


def _print_json(path: Path, **fields: Any) -> None:
    print(json.dumps({"folder": str(path.expanduser()), **fields}))


def _block(entry: Entry, uses: int) -> dict[str, object]:
    return {
        "key": entry.key.hex(),
        "model": entry.fingerprint,
        "parent": entry.parent.hex(),
        "depth": entry.depth,
        "nbytes": entry.nbytes,
        "hits": entry.hits,
        "uses_since": uses - entry.used,
        "written_seconds": entry.written_seconds,
        "age_seconds": max(0.0, time.time() - entry.written_seconds),
        "is_writing": entry.owner is not None,
    }


def _listing(entries: list[Entry], uses: int) -> Table:
    from penstock.tiers.disk.folder import SHOWN_CHARACTERS, shown

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model", "key"):
        table.add_column(name, no_wrap=True)
    for name in ("depth", "size", "hits", "uses ago", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    models = list(dict.fromkeys(entry.fingerprint for entry in entries))
    for entry in sorted(entries, key=lambda entry: models.index(entry.fingerprint)):
        table.add_row(
            shown(entry.fingerprint),
            entry.key.hex()[:SHOWN_CHARACTERS],
            f"{entry.depth:,}",
            format_bytes(entry.nbytes),
            f"{entry.hits:,}",
            f"{uses - entry.used:,}",
            "being written" if entry.owner else _age(time.time() - entry.written_seconds),
        )
    return table


def _age(seconds: float) -> str:
    """Format an age in its largest unit.

    >>> _age(59), _age(7_300), _age(1_000_000), _age(-5)
    ('59 s', '2 h', '11 d', '0 s')
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds / size):,} {unit}"
    return f"{max(0, int(seconds))} s"


def _total(usage: FolderUsage) -> dict[str, int]:
    names = ("blocks", "nbytes", "chains", "hits", "writing_blocks")
    return {name: sum(getattr(model, name) for model in usage.models) for name in names}


def _show_usage(usage: FolderUsage) -> None:
    from penstock.tiers.disk.folder import shown

    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for name in ("blocks", "size", "chains", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(shown(model.fingerprint), asdict(model)) for model in usage.models]
    for name, row in (*rows, ("in all", _total(usage))):
        chains, hits = f"{row['chains']:,}", f"{row['hits']:,}"
        table.add_row(name, f"{row['blocks']:,}", format_bytes(row["nbytes"]), chains, hits)
    console = _console()
    console.print(table)
    others = ", ".join(usage.other_formats) or "none"
    for name, value in {
        "index": format_bytes(usage.index_bytes),
        "written today": format_bytes(usage.written_today_bytes),
        "being written": counted(usage.writing_files, "file"),
        "left over": f"{counted(usage.left_over_files, 'file')} of killed processes",
        "other formats": f"{others} ({format_bytes(usage.other_format_bytes)}), left alone",
        "foreign": f"{usage.foreign:,} files and folders, left alone",
        "free disk": format_bytes(usage.disk_free_bytes),
    }.items():
        print_line(console, f"{name:<14}{value}", indent=14)


def _show_verdict(verdict: IntegrityReport, is_made_anew: bool) -> None:
    if is_made_anew:
        _print_line("the index was damaged and has been rebuilt")
    for fault in verdict.faults[:SHOWN_FAULTS]:
        _print_line(f"{fault.kind}: {fault.name}: {_plain(fault.what)}")
    if len(verdict.faults) > SHOWN_FAULTS:
        _print_line(f"... and {len(verdict.faults) - SHOWN_FAULTS:,} more; --json has all")
    blocks = counted(verdict.checked_blocks, "block")
    whole = f"{blocks} ({format_bytes(verdict.checked_bytes)}) whole"
    counts = ", ".join(
        f"{verdict.count(kind):,} {kind}" for kind in ("damaged", "missing", "unknown", "left over")
    )
    _print_line(f"{whole}; {counts}")
    if verdict.faults:
        remedy = "penstock cache verify --repair repairs the folder"
        _print_line("repaired" if verdict.repaired else remedy)


def _print_damage(path: Path, damage: str, as_json: bool) -> None:
    if as_json:
        _print_json(path, index=damage, repaired=False)
    else:
        _print_line(_plain(damage))


def _print_freed(path: Path, freed: Freed, as_json: bool) -> None:
    if as_json:
        _print_json(path, **asdict(freed))
        return
    rest = f"{format_bytes(freed.held_bytes)} are left"
    _print_line(
        f"{counted(freed.blocks, 'block')} removed, {format_bytes(freed.nbytes)} freed; {rest}"
    )


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
