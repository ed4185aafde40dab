"""`penstock bench decide`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import options
from penstock_bench.cli.bench_options import Save, finish, progress_bar


def decide(
    model: Annotated[
        str,
        typer.Option(help="A folder, a .gguf file, or smollm2.", metavar="MODEL"),
    ] = "smollm2",
    questions: Annotated[
        int, typer.Option(help="Questions of a state, in one request.", min=1, max=4_096)
    ] = 2_000,
    chats: Annotated[
        int, typer.Option(help="Questions that are chat requests.", metavar="QUESTIONS", min=1)
    ] = 100,
    state_tokens: Annotated[
        int, typer.Option(help="Length of the state.", metavar="TOKENS", min=1)
    ] = 500,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1)] = 3,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Ask many yes-or-no questions of one state, in one request and as chat requests.

    The chat requests ask for one token with logprobs, eight at a time. Their probabilities and
    those of decisions are compared.
    """
    from penstock_bench.decide import DecideLoad, measure

    load = DecideLoad(model, questions, min(chats, questions), state_tokens, rounds)
    with progress_bar("asking") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save)
