"""`penstock bench weights`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import options
from penstock_bench.cli.bench_options import Save, finish, progress_bar


def weights(
    model: Annotated[
        str,
        typer.Option(help="A folder, a .gguf file, or smollm2.", metavar="MODEL"),
    ] = "smollm2",
    tokens: Annotated[
        int,
        typer.Option(help="Length of the prompt that both sides prefill.", metavar="TOKENS", min=1),
    ] = 8,
    steps: Annotated[int, typer.Option(help="Number of decode steps on both sides.", min=1)] = 2,
    rounds: Annotated[
        int, typer.Option(help="Number of runs in float32; native weights run once.", min=1)
    ] = 3,
    texts: Annotated[
        int,
        typer.Option(
            help="Number of texts of --tokens each that both sides prefill and continue, to "
            "compare the generated tokens. Takes about a minute per text.",
            min=0,
        ),
    ] = 0,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Time weights converted to float32 against native weights.

    Few tokens are timed, since native weights take seconds per token on a Linux CPU. A GGUF file is
    also measured as an MLX folder. The first token of a short question is timed in float32 only.
    Exits with 1 if a goal is not met.
    """
    from penstock_bench.weights_speed import WeightsLoad, measure

    load = WeightsLoad(model, prompt_tokens=tokens, decode_tokens=steps, rounds=rounds, texts=texts)
    with progress_bar("timing") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save)
