"""`penstock bench`: the project's claims, measured here and now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli import options

app = typer.Typer(
    help="Measure the project's claims on this machine, a rival in the same run.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Save: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Store every round as a JSON file in this folder.",
        metavar="FOLDER",
        show_default="nothing is stored",
        file_okay=False,
    ),
]
Rounds: TypeAlias = Annotated[
    int, typer.Option(help="How often each side runs; medians are compared.", min=1)
]


@app.command()
def growth(
    window: Annotated[
        int, typer.Option(help="Columns of the window.", metavar="TOKENS", min=2)
    ] = 4_096,
    tokens: Annotated[int, typer.Option(help="Read this many.", metavar="TOKENS", min=2)] = 6_000,
    layers: Annotated[int, typer.Option(help="Layers of 8 heads of size 128.", min=1)] = 16,
    rounds: Rounds = 5,
    docs: Annotated[
        Path | None,
        typer.Option(
            help="Write growth.png into this folder (needs matplotlib).",
            metavar="FOLDER",
            show_default="nothing is written",
            file_okay=False,
            exists=True,
        ),
    ] = None,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Growth copies, peak memory and step times of a bounded window, against mlx-lm's.

    Exits with 1 if a goal is not met.
    """
    from penstock.bench.growth import Shape, measure
    from penstock.bench.report import publish

    shape = Shape(layers=layers, window_tokens=window, read_tokens=tokens, rounds=rounds)
    report = measure(shape)
    publish(report, as_json=as_json, save=save)
    if docs is not None:
        from penstock.bench.growth_picture import draw

        draw(report, docs / "growth.png")
    raise typer.Exit(0 if report.met else 1)


@app.command()
def recall(
    dialogues: Annotated[int, typer.Option(help="Dialogues to read.", min=1)] = 8,
    tokens: Annotated[
        int, typer.Option(help="Length of each.", metavar="TOKENS", min=1_000)
    ] = 2_000,
    docs: Annotated[
        Path | None,
        typer.Option(
            help="Write recall.md and recall.png into this folder (needs matplotlib).",
            metavar="FOLDER",
            show_default="nothing is written",
            file_okay=False,
            exists=True,
        ),
    ] = None,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """What the embedded model remembers through windows of several sizes, against mlx-lm's.

    Exits with 1 if a goal is not met.
    """
    from penstock.bench.recall import Load, measure, write_page
    from penstock.bench.report import publish

    report = measure(Load(dialogues=dialogues, tokens=tokens))
    publish(report, as_json=as_json, save=save)
    if docs is not None:
        write_page(report, docs)
    raise typer.Exit(0 if report.met else 1)


@app.command()
def lookup(
    tokens: Annotated[
        int, typer.Option(help="Length of a prompt.", metavar="TOKENS", min=2_048)
    ] = 131_072,
    rounds: Annotated[
        int, typer.Option(help="How often every look-up is timed; mlx-lm's only once.", min=1)
    ] = 15,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Time to find out how much of a prompt is known, in trees of several shapes, against mlx-lm's.

    Exits with 1 if a goal is not met.
    """
    from penstock.bench.lookup import Load, measure
    from penstock.bench.report import publish

    report = measure(Load(prompt_tokens=tokens, rounds=rounds))
    publish(report, as_json=as_json, save=save)
    raise typer.Exit(0 if report.met else 1)


@app.command()
def trace(
    file: Annotated[
        Path,
        typer.Option(
            "--trace",
            help="Requests as JSON lines: timestamp, input_length, hash_ids (Mooncake's form).",
            metavar="FILE",
            dir_okay=False,
        ),
    ],
    node_blocks: Annotated[
        int, typer.Option(help="Blocks that one eviction gives up, at most.", min=1)
    ] = 4,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Share of a trace's tokens found in bounded caches, beside plain LRU and the optimum.

    Exits with 1 if a goal is not met.
    """
    from penstock.bench.report import publish
    from penstock.bench.trace import Load, measure

    report = measure(file, Load(node_blocks=node_blocks))
    publish(report, as_json=as_json, save=save)
    raise typer.Exit(0 if report.met else 1)
