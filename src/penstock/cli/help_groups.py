"""Command groups, and help that arranges a command's many options in sections."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from penstock.errors import SettingError

GROUPS = {
    "Model": "config model models model-name any-model-name adapter chat-template weights-dtype "
    "model-source system raw ignore-model-context keep-billing-header tool-parser "
    "tools-without-template reasoning-parser",
    "Answers": "max-tokens temperature top-p top-k min-p repetition-penalty seed",
    "Memory": "memory-limit memory-threshold max-kv-size keep-kv-size kv-bits max-batch-size "
    "prefill-chunk max-stall-ms speculative-tokens draft-model attend-tokens attend-rest "
    "attend-full-layers attend-prompt active-kv-size kernels max-queue",
    "Cache": "block-size hot-cache-only kv-cache-quantization kv-cache-min-quantize-tokens "
    "kv-cache-raw-first-tokens kv-cache-skip-layers kv-cache-quantize-when remote-cache "
    "remote-cache-ttl remote-cache-timeout",
    "Disk": "ssd-cache-dir ssd-cache-limit ssd-write-budget ssd-preload session-dir",
    "Network": "host port url api-key keys cors-origin allow-remote-images max-connections "
    "request-timeout drain-timeout",
    "Logs": "log-format otlp-traces-endpoint",
    "Scale": "pipeline ray replicas max-replicas replica-cpus replica-gpus routing",
}
"""Flags by section of the help, without leading dashes."""
NARROW_COLUMNS = 72
"""Terminal width below which the flag column is a third of the width."""
MOST_FLAG_COLUMNS = 30
LONGEST_SUMMARY = 200
"""Maximum characters of a command's summary in the list of commands."""
GROUP_OF = {f"--{flag}": group for group, flags in GROUPS.items() for flag in flags.split()}


REPLACED = {
    "penstock agents": "run penstock bench agents",
    "penstock verify": "run penstock bench verify",
    "penstock cache export": "copy the folder while no server uses it",
    "penstock cache import": "copy the folder while no server uses it",
}

ENTRY_POINTS = "penstock.commands"
"""Entry-point group of additional commands; each entry is a `typer.Typer`."""
BENCH_COMMANDS = ("bench", "bench-kv-cache", "eval")


class GroupedCommand(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_argument = parameter.param_type_name == "argument"
            name = "Arguments" if is_argument else GROUP_OF.get(parameter.opts[0], "Other")
            sections[name].append(record)
        for name in ("Arguments", *GROUPS, "Other"):
            if name in sections:
                with formatter.section(name):
                    formatter.write_dl(sections[name], col_max=flag_columns(formatter.width))


class ListedCommands(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        name = f"{ctx.command_path} {cmd_name}"
        if command is None and name in REPLACED:
            raise SettingError(f"{name} was removed: {REPLACED[name]}")
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(LONGEST_SUMMARY))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def flag_columns(width: int) -> int:
    """Return the maximum width of a flag that is printed on the same line as its help.

    >>> flag_columns(80), flag_columns(50)
    (30, 16)
    """
    return MOST_FLAG_COLUMNS if width >= NARROW_COLUMNS else width // 3


class CommandGroup(ListedCommands):
    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return names + [name for name in _added() if name not in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
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
