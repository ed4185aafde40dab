"""`penstock bench switch`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import options
from penstock.memory.sizes import parse_bytes
from penstock_bench.cli.bench_options import Save, finish, progress_bar


def switch(
    model: Annotated[
        str,
        typer.Option(help="A folder, a .gguf file, or smollm2.", metavar="MODEL"),
    ] = "smollm2",
    prompt_tokens: Annotated[
        int,
        typer.Option(help="Length of the conversation that comes back.", metavar="TOKENS", min=1),
    ] = 1_000,
    memory_limit: Annotated[
        str,
        typer.Option(help="Limit that holds one of the two models.", metavar="BYTES"),
    ] = "250MB",
    rounds: Annotated[
        int, typer.Option(help="Number of rounds, each with four switches.", min=1)
    ] = 5,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Switch between two models in a limit that holds one.

    The other side is mlx-lm's server, which holds one model, on the same weights in float32. A
    conversation comes back after its model was away, with and without a folder of blocks.
    """
    from penstock_bench.switch import SwitchLoad, measure

    load = SwitchLoad(model, prompt_tokens, parse_bytes(memory_limit), rounds)
    with progress_bar("timing") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save)
