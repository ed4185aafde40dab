"""`penstock eval`: what a model still knows, says and expects with its KV in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli import serve_options as flags
from penstock.cli.settings_options import with_settings
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH
from penstock_bench.cli.bench_commands import Plot, Save

if TYPE_CHECKING:
    from penstock_bench.key_forms import KeyForm
    from penstock_bench.report import Report

LEAST_LENGTH = 64
"""Tokens of a dialogue with a fact in it."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_settings
def evaluate(
    model: flags.ServedModel = str(MODEL_PATH),
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="How keys and values are held (docs/codecs.md); may be given several times.",
            metavar="NAME",
            show_default="one of every size",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Read this text.",
            metavar="FILE",
            show_default="dialogues of the embedded model's",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(
            help="Windows (max_kv_size) for each codec, and for raw; may be given several times.",
            metavar="TOKENS",
            show_default="no bound",
            min=2,
        ),
    ] = None,
    keep: Annotated[
        list[int] | None,
        typer.Option(
            help="First tokens that are never dropped, and stay in full precision; may be given "
            "several times.",
            metavar="TOKENS",
            show_default="as penstock serve",
            min=0,
        ),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            help="Forms of the model that compute the same with other keys: plain, outliers (some "
            "channels are larger) or biased (by a constant); may be given several times.",
            metavar="FORM",
            show_default="all for the embedded model, else plain",
        ),
    ] = None,
    outliers: Annotated[
        float,
        typer.Option(help="How many times larger those channels are.", metavar="FACTOR", min=1.0),
    ] = 16.0,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the dialogues that the embedded model is asked about; may be given "
            "several times.",
            metavar="TOKENS",
            show_default="250, 1000 and 4000",
            min=LEAST_LENGTH,
        ),
    ] = None,
    questions: Annotated[
        int, typer.Option(help="Questions for each length, at least.", min=1)
    ] = 64,
    text_tokens: Annotated[
        int, typer.Option(help="Read so much of the text, at most.", metavar="TOKENS", min=1)
    ] = 4_000,
    kv_cache_raw_first_tokens: Annotated[
        int,
        typer.Option(
            help="First tokens of every prompt that stay in full precision. 0 shows most of what "
            "a codec does.",
            metavar="TOKENS",
            min=0,
        ),
    ] = 0,
    *,
    engine_size: options.EngineSize,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Measure recall, agreement and perplexity of a model with its KV in fewer bits.

    Recall, of the embedded model: answers of the engine to questions about dialogues. Agreement:
    the engine continues a text as with raw ones. Perplexity, KL and likeliest token of a text, read
    block by block. Each with its n and standard error.

    Exits with 1 if a goal is not met.
    """
    engine = options.engine_size(model, engine_size)
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    read = None if text is None else _read(text)
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock_bench.evaluate import RAW, Load, Setting, measure
    from penstock_bench.report import publish

    load = Load(
        model=str(MODEL_PATH) if embedded else model,
        outlier_scale=outliers,
        questions=questions,
        text=read,
        text_tokens=text_tokens,
        raw_first_tokens=kv_cache_raw_first_tokens,
        **engine,
    )
    if codec or window or keep:
        names = codec or list(dict.fromkeys(each.codec for each in load.settings))
        if window and RAW not in names:  # what the window alone costs
            names = [RAW, *names]
        windows: list[int | None] = [*window] if window else [None]
        keeps: list[int | None] = [*keep] if keep else [None]
        chosen = product(windows, keeps, names)
        load = replace(
            load,
            settings=tuple(Setting(name, size, kept) for size, kept, name in chosen),
            windows_once=False,
        )

    if form or not embedded:
        load = replace(load, forms=_forms(form or ["plain"]))
    if length and not embedded:
        raise SettingError("--length: the embedded model alone knows what is asked there")
    if length or not embedded:
        load = replace(load, lengths=tuple(dict.fromkeys(length or ())))

    with _progress() as tell:
        report = measure(load, tell)
    if not as_json:
        _print(report)
    publish(report, as_json=as_json, save=save)
    if plot is not None:
        from penstock_bench.evaluate_picture import draw

        draw(report, plot)
    raise typer.Exit(0 if report.met else 1)


def _forms(names: Sequence[str]) -> tuple[KeyForm, ...]:
    from penstock_bench.key_forms import KeyForm

    for name in names:
        if name not in list(KeyForm):
            raise SettingError(f"--form {name}: there are {', '.join(KeyForm)}")
    return tuple(map(KeyForm, names))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show how far it is; what is given out is told what is done, how much of it, and of what."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading the model", total=None)

        def tell(what: str, done: int, of: int) -> None:
            progress.update(task, description=what, completed=done, total=of)

        yield tell


def _read(file: Path) -> str:
    text = file.read_text(errors="surrogateescape")
    options.check_text(f"--text {file}", text)
    return text


def _print(report: Report) -> None:
    """Print what is lost of recall, and the figures of the text."""
    rows, baseline = report.penstock["rows"], report.penstock["baseline"]
    console = Console(highlight=False)
    for form in dict.fromkeys(row["form"] for row in rows):
        mine = [row for row in rows if row["form"] == form]
        lengths = list(mine[0]["recall"])
        if lengths:
            recall = _drawn(f"{form}: recall", *(f"{length:,} tokens" for length in lengths))
            for row in mine:
                recall.add_row(row["setting"], *(_share(row["recall"].get(n)) for n in lengths))
            console.print(recall)
        text = _drawn(f"{form}: text", "bytes", "ratio", "perplexity", "KL", "top 1", "agrees")
        for row in mine:
            text.add_row(
                row["setting"],
                f"{row['bytes_per_token']:,.0f}",
                f"{row['ratio']:.2f}x",
                _plain(row["perplexity"], ".3f"),
                _plain(row["kl"], ".0e"),
                _share(row["top_1"]),
                _share(row["agreement"]),
            )
        console.print(text)
    first = rows[0]
    counts = [f"{n:,} tokens: {found['n']}" for n, found in first["recall"].items()]
    asked = f"Questions by length: {', '.join(counts)}. " if counts else ""
    console.print(
        f"{asked}Of the text {first['kl']['n']:,} tokens count, and {first['agreement']['n']} "
        f"continuations. Bytes of a token; ratio against {baseline}; KL in nats; +- is the "
        "standard error. -: the engine refuses this codec, which is there to be compared with."
    )


def _drawn(*headings: str) -> Table:
    drawn = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        if number:
            drawn.add_column(heading, justify="right", no_wrap=True)
        else:
            drawn.add_column(heading, overflow="fold")  # a long name is not cut off
    return drawn


def _share(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{100 * found['mean']:.1f}+-{100 * found['standard_error']:.1f}"


def _plain(found: dict[str, Any], form: str) -> str:
    return f"{found['mean']:{form}}+-{found['standard_error']:{form}}"
