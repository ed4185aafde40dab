"""Every command that the command line has, with the words that call it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a command, and all commands of it if it is a group, in the order of the help."""
    yield words, command
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), *words, name)
