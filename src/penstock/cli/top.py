"""`penstock top`: shows a running server's memory, cache, queue and requests in a terminal."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from penstock.cli import options
from penstock.cli.whole_words import print_line

PLAIN_SECONDS = 1.0
"""Seconds between lines if the output is not an interactive terminal."""


def top(
    url: options.ServerURL = options.SERVER_URL,
    api_key: options.ServerKey = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model to watch, if the server has several."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line on standard output.")
    ] = False,
) -> None:
    """Watch a running server: memory by kind, cache hits, queue, speed, requests.

    Press q or Ctrl-C to quit. Exits with 2 if no server answers.
    """
    # httpx takes a moment to import, and --help and wrong flags do not need it.
    from penstock.cli.snapshots import line, record, snapshots
    from penstock.cli.top_screen import drawn

    console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
    shown = snapshots(url, api_key, model)
    if as_json:
        for snapshot in shown:
            print(json.dumps(record(snapshot)), flush=True)
            if once:
                return
    elif once:
        console.print(drawn(next(shown), url, console.width, console.height))
    elif not console.is_interactive:
        printed = 0.0
        for snapshot in shown:
            if snapshot["at_seconds"] - printed >= PLAIN_SECONDS:
                printed = snapshot["at_seconds"]
                print_line(console, line(snapshot))
    else:
        with _keys() as pressed, Live(console=console, auto_refresh=False, screen=True) as live:
            for snapshot in shown:
                live.update(drawn(snapshot, url, console.width, console.height), refresh=True)
                if "q" in pressed().lower():
                    return


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def pressed() -> str:
        ready, _, _ = select.select([terminal], [], [], 0)
        return os.read(terminal, 1_024).decode(errors="replace") if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
