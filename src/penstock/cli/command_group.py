"""Commands of penstock, and those that installed packages add by entry points."""

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
    """Own commands first, then those of entry points, which are looked up only if needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return names + [name for name in _added() if name not in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command or None; SettingError names the package of a known missing one."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        entry = _added().get(cmd_name)
        if entry is not None:
            return get_command(entry.load())
        if cmd_name in BENCH_COMMANDS:
            raise SettingError(
                f"penstock {cmd_name} is in a package of its own: in a checkout of penstock run "
                f"pip install ./benchmarks"
            )
        return None


def _added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
