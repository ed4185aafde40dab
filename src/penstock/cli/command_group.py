"""The commands of penstock, and those that installed packages add by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from typer.main import get_command

from penstock.cli.help_groups import ListedCommands
from penstock.errors import SettingError

ENTRY_POINTS = "penstock.commands"
"""Group of the entry points. Each names a `typer.Typer`; its name is the command's."""
BENCH_COMMANDS = ("bench", "bench-kv-cache", "eval")
"""Commands of the distribution `penstock-bench`."""


class CommandGroup(ListedCommands):
    """Commands of penstock first, then those of entry points.

    Entry points are looked up only where a command is not one of penstock's own, or where all are
    listed: the look-up reads a file of every installed distribution.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        own = super().list_commands(ctx)
        return own + [name for name in _added() if name not in own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of that name.

        Raises:
            SettingError: the command belongs to a package that is not installed; says which.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _added().get(cmd_name)
        if entry is not None:
            return get_command(entry.load())
        if cmd_name in BENCH_COMMANDS:
            raise SettingError(
                f"penstock {cmd_name} is in a package of its own: pip install penstock-bench "
                f"(from a checkout: pip install ./benchmarks)"
            )
        return None


def _added() -> dict[str, EntryPoint]:
    """Return the entry points of commands by their names."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
