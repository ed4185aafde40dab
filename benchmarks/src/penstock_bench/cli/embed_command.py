"""`penstock bench embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock_bench.cli.bench_options import Save, finish, progress_bar


def embed(
    sentence_transformers: Annotated[
        Path,
        typer.Option(help="Python of an environment with sentence-transformers.", metavar="PYTHON"),
    ],
    model: Annotated[
        str, typer.Option(help="Folder or short name of an encoder.", metavar="MODEL")
    ] = "minilm",
    texts: Annotated[int, typer.Option(help="Number of texts.", min=1)] = 1_000,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="Device of the other side.", metavar="NAME")] = "cpu",
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Embed the same texts by an encoder and by sentence-transformers, in turn.

    Texts are passages of Python's own sources, of log-normal lengths.
    """
    from penstock_bench.embed import EmbedLoad, measure

    load = EmbedLoad(model, texts, rounds, sentence_transformers, device)
    with progress_bar("embedding") as notify:
        measured = measure(load, notify)
    finish(measured, as_json=as_json, save=save)
