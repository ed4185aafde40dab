"""The help of commands with many options, in groups: model, memory, cache, disk, and so on."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from typer.core import TyperCommand, TyperGroup

GROUPS = {
    "Model": "config model model-name weights-dtype system raw ignore-model-context "
    "keep-billing-header tool-parser reasoning-parser",
    "Answers": "max-tokens temperature top-p top-k min-p repetition-penalty seed",
    "Memory": "memory-limit memory-threshold max-kv-size keep-kv-size kv-bits max-batch-size "
    "prefill-chunk max-stall-ms speculative-tokens draft-model attend-tokens attend-rest "
    "attend-full-layers active-kv-size kernels max-queue",
    "Cache": "block-size hot-cache-only kv-cache-quantization kv-cache-min-quantize-tokens "
    "kv-cache-raw-first-tokens kv-cache-skip-layers kv-cache-quantize-when remote-cache "
    "remote-cache-ttl remote-cache-timeout",
    "Disk": "ssd-cache-dir ssd-cache-limit ssd-write-budget ssd-preload session-dir",
    "Network": "host port url api-key cors-origin max-connections request-timeout drain-timeout",
    "Scale": "pipeline ray replicas max-replicas replica-cpus replica-gpus routing",
}
"""Flags, without their dashes, by the group that shows them."""
NARROW_COLUMNS = 72
"""Columns of a terminal below which the help of a flag takes two thirds of a line."""
MOST_FLAG_COLUMNS = 30
LONGEST_SUMMARY = 200
"""Characters of a command's summary, at most."""
GROUP_OF = {f"--{flag}": group for group, flags in GROUPS.items() for flag in flags.split()}


class GroupedCommand(TyperCommand):
    """Command whose help shows its options in groups; those of no group come last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options of the command."""
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
    """Group whose help shows the whole summary of each command, on several lines if need be."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and the summaries of the commands."""
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
    """Return the columns up to which flags stand beside their help, and not above it.

    >>> flag_columns(80), flag_columns(50)
    (30, 16)
    """
    return MOST_FLAG_COLUMNS if width >= NARROW_COLUMNS else width // 3
