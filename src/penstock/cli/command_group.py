"""Command group that includes commands added by the entry points of installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from typer.main import get_command

from penstock.cli.help_groups import ListedCommands
from penstock.errors import SettingError

ENTRY_POINTS = "penstock.commands"
"""Entry-point group; each entry names a `typer.Typer`."""
BENCH_COMMANDS = ("bench", "bench-kv-cache", "eval")


class CommandGroup(ListedCommands):
    """Group of penstock's commands, followed by those of entry points, loaded on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return names + [name for name in _added() if name not in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command or None; SettingError if a known command's package is not installed."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        entry = _added().get(cmd_name)
        if entry is not None:
            return get_command(entry.load())
        if cmd_name in BENCH_COMMANDS:
            raise SettingError(
                f"penstock {cmd_name} is in a separate package: in a checkout of penstock run "
                f"pip install ./benchmarks"
            )
        return None


def _added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
