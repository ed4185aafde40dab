"""Benches of caches: windows, what they remember, a prefix cache in 8 bits."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import options
from penstock_bench.cli.bench_options import Docs, Rounds, Save, finish


def growth(
    window: Annotated[
        int, typer.Option(help="Columns of the window.", metavar="TOKENS", min=2)
    ] = 4_096,
    tokens: Annotated[
        int, typer.Option(help="Read this many.", metavar="TOKENS", min=1_024)
    ] = 6_000,
    layers: Annotated[int, typer.Option(help="Layers of 8 heads of size 128.", min=1)] = 16,
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
    dialogues: Annotated[int, typer.Option(help="Dialogues to read.", min=1)] = 8,
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


def store(
    rounds: Rounds = 9,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Put a prompt into a prefix cache of 8 bits, and fetch it.

    The other side is vllm-mlx's cache, where it is installed. Exits with 1 if a goal is not met.
    """
    from penstock_bench.prefix_store import StoreLoad, measure

    finish(measure(StoreLoad(rounds=rounds)), as_json=as_json, save=save)
