"""Benchmarks of caches: growth and recall of windows, selective attention, a prefix cache."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import options
from penstock_bench.cli.bench_options import Docs, Plot, Rounds, Save, finish, progress_bar


def growth(
    window: Annotated[
        int, typer.Option(help="Size of the window in tokens.", metavar="TOKENS", min=2)
    ] = 4_096,
    tokens: Annotated[
        int, typer.Option(help="Number of tokens to process.", metavar="TOKENS", min=1_024)
    ] = 6_000,
    layers: Annotated[
        int, typer.Option(help="Number of layers, with 8 heads of size 128.", min=1)
    ] = 16,
    rounds: Rounds = 5,
    docs: Docs = None,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Measure copies, peak memory and steps of a bounded window.

    The other side is mlx-lm's window. Exits with 1 if a goal is not met.
    """
    from penstock_bench.growth import GrowthShape, measure
    from penstock_bench.growth_picture import draw

    shape = GrowthShape(layers=layers, window_tokens=window, read_tokens=tokens, rounds=rounds)
    plot = docs and docs / "growth.png"
    finish(measure(shape), as_json=as_json, save=save, plot=plot, draw=draw)


def recall(
    dialogues: Annotated[int, typer.Option(help="Number of dialogues.", min=1)] = 8,
    tokens: Annotated[
        int, typer.Option(help="Length of a dialogue.", metavar="TOKENS", min=1_000)
    ] = 2_000,
    docs: Docs = None,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Measure the memory of the embedded model through windows.

    The other side is mlx-lm's window of the same size. Exits with 1 if a goal is not met.
    """
    from penstock_bench.window_recall import RecallLoad, measure, write_page

    report = measure(RecallLoad(dialogues=dialogues, tokens=tokens))
    finish(report, as_json=as_json, save=save, plot=docs, draw=write_page)


def remember(
    dialogues: Annotated[int, typer.Option(help="Number of dialogues per length.", min=1)] = 2,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of a dialogue; may be given several times.",
            metavar="TOKENS",
            show_default="2,000, 4,000 and 8,000",
            min=1_000,
        ),
    ] = None,
    attend: Annotated[
        list[int] | None,
        typer.Option(
            "--attend-tokens",
            help="Number of tokens that a decode step attends to; may be given several times.",
            metavar="TOKENS",
            show_default="128 and 512",
            min=128,
        ),
    ] = None,
    plot: Plot = None,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Ask for facts in long dialogues while a step reads a part of them.

    The other sides are a window of as many bytes, Quest's bound, and all tokens. Exits with 1 if a
    goal is not met.
    """
    from penstock_bench.remember import RememberLoad, draw, measure

    default = RememberLoad()
    load = RememberLoad(
        dialogues=dialogues,
        lengths=tuple(sorted(tokens)) if tokens else default.lengths,
        attend=tuple(sorted(attend)) if attend else default.attend,
    )
    with progress_bar("reading") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save, plot=plot, draw=draw)


def store(
    rounds: Rounds = 9,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Put a prompt into an 8-bit prefix cache, and fetch it.

    The other side is vllm-mlx's cache, where it is installed. Exits with 1 if a goal is not met.
    """
    from penstock_bench.prefix_store import StoreLoad, measure

    finish(measure(StoreLoad(rounds=rounds)), as_json=as_json, save=save)
