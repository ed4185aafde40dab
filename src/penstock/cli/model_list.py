"""`penstock models` and `penstock pull`: recommended models, and their download."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli import options
from penstock.memory.arithmetic import default_limit_bytes
from penstock.models.recommended import RECOMMENDED, RecommendedModel, downloaded
from penstock.models.recommended import pull as pull_model

MACHINES_GB = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
"""Memory sizes of machines in GB."""
DEVICE_SHARE = 0.75
"""Share of a Mac's memory that Metal recommends for MLX."""
WIDE_COLUMNS = 150
"""Minimum terminal width at which the list shows sources."""


def models(as_json: options.Json = False) -> None:
    """List recommended models by the memory that they need, and whether they are downloaded.

    Sizes are approximate. On a Mac with the memory shown, the default --memory-limit has room for
    the weights, and for a quarter of their size in KV.
    """
    here = {name: downloaded(name) is not None for name in RECOMMENDED}
    if as_json:
        listed = [_record(name, model, here[name]) for name, model in RECOMMENDED.items()]
        print(json.dumps({"models": listed}))
        return
    console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
    table = Table(box=None, pad_edge=False)
    if not console.is_terminal:
        console.width = WIDE_COLUMNS
    titles = ["name", "here", "memory", "size", "good for", "tokens/s", "source"]
    if console.width < WIDE_COLUMNS:
        titles.pop()
    for title in titles:
        table.add_column(title, no_wrap=title in ("name", "memory", "size"))
    for name, model in RECOMMENDED.items():
        sizes = [f"{machine_gb(model.size_bytes)} GB", f"{model.size_bytes / 1e9:.1f} GB"]
        mark = "yes" if here[name] else ""
        cells = [name, mark, *sizes, model.good_for, model.speed or "", model.source]
        table.add_row(*cells[: len(titles)])
    console.print(table)
    console.print("\npenstock pull NAME downloads one, or owner/model; penstock serve NAME")


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="A name that penstock models lists, or owner/model of the Hugging Face hub."
        ),
    ],
) -> None:
    """Download a model.

    Complete files are not downloaded again, so an interrupted download continues.
    """
    path = pull_model(name)
    print(f"{name} is in {path}; penstock serve {name}")


def machine_gb(size_bytes: int) -> int:
    """Return the memory in GB of the smallest machine for a model of `size_bytes`.

    >>> machine_gb(98_000_000), machine_gb(6_000_000_000), machine_gb(63_300_000_000)
    (4, 16, 128)
    """
    for size in MACHINES_GB:
        if default_limit_bytes(int(size * DEVICE_SHARE * 2**30)) >= size_bytes * 5 // 4:
            return size
    return MACHINES_GB[-1]


def _record(name: str, model: RecommendedModel, is_here: bool) -> dict[str, object]:
    return {
        "name": name,
        "source": model.source,
        "size_bytes": model.size_bytes,
        "machine_gb": machine_gb(model.size_bytes),
        "good_for": model.good_for,
        "tokens_per_second": model.speed,
        "downloaded": is_here,
    }
