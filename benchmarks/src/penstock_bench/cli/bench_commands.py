"""`penstock bench`: measures the project's claims on this machine."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from penstock.cli.help_groups import ListedCommands
from penstock_bench.cli import (
    agents_command,
    all_command,
    cache_commands,
    decide_command,
    embed_command,
    engine_commands,
    index_commands,
    kernels_command,
    mac_command,
    serve_command,
    switch_command,
    verify_command,
    weights_command,
)

app = typer.Typer(cls=ListedCommands, add_completion=False, rich_markup_mode=None)
app.command("all")(all_command.all_benches)
app.command()(mac_command.mac)
app.command("shared-prefix")(engine_commands.shared_prefix)
app.command()(engine_commands.hit)
app.command()(engine_commands.ragged)
app.command()(engine_commands.single)
app.command()(engine_commands.attend)
app.command()(engine_commands.million)
app.command()(engine_commands.speculate)
app.command()(kernels_command.kernels)
app.command()(weights_command.weights)
app.command()(engine_commands.quantized)
app.command()(engine_commands.hybrid)
app.command()(engine_commands.restore)
app.command()(serve_command.serve)
app.command()(switch_command.switch)
app.command()(embed_command.embed)
app.command()(decide_command.decide)
app.command()(index_commands.lookup)
app.command()(index_commands.trace)
app.command()(index_commands.cluster)
app.command()(cache_commands.growth)
app.command()(cache_commands.recall)
app.command()(cache_commands.remember)
app.command()(cache_commands.store)
app.command()(agents_command.agents)
app.command()(verify_command.verify)

SUMMARY_COLUMNS = 80
"""Width of a benchmark's summary line."""


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure the project's claims, a rival in the same run.

    Without a command, list the benches.
    """
    if context.invoked_subcommand is None:
        _list(context)


def _list(context: typer.Context) -> None:
    group = context.command
    assert isinstance(group, TyperGroup)
    names = group.list_commands(context)
    width = max(map(len, names))
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        print(f"{name:<{width}}  {command.get_short_help_str(SUMMARY_COLUMNS)}")
