"""`penstock top`: a running server's memory, cache, queue and requests, in a terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from penstock.config import HOST, PORT

PLAIN_SECONDS = 1.0
"""Seconds between two printed lines where the terminal cannot redraw one."""


def top(
    url: Annotated[
        str,
        typer.Option(help="Where the server is.", envvar="PENSTOCK_URL", metavar="URL"),
    ] = f"http://{HOST}:{PORT}",
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's key.",
            envvar="PENSTOCK_API_KEY",
            metavar="KEY",
            show_default="none",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line on standard output.")
    ] = False,
) -> None:
    """Watch a running server: memory by what it is for, hits, queue, speed, requests.

    Ctrl-C ends it. A server that is not there is one line and exit code 2.
    """
    # httpx takes a moment to import, which --help and a wrong flag need not wait for.
    from penstock.cli.snapshots import drawn, line, record, snapshots

    console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
    shown = snapshots(url, api_key)
    if as_json:
        for snapshot in shown:
            print(json.dumps(record(snapshot)), flush=True)
            if once:
                return
    elif once:
        console.print(drawn(next(shown), url, console.height))
    elif not console.is_terminal or console.is_dumb_terminal:
        printed = 0.0
        for snapshot in shown:
            if snapshot["at_seconds"] - printed >= PLAIN_SECONDS:
                printed = snapshot["at_seconds"]
                console.print(line(snapshot), soft_wrap=True)
    else:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for snapshot in shown:
                live.update(drawn(snapshot, url, console.height), refresh=True)
