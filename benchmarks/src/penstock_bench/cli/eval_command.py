"""`penstock eval`: what a model still knows, says and expects with its KV in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli import serve_options as flags
from penstock.cli.settings_options import Fields, with_settings
from penstock.errors import SettingError
from penstock.recall import MODEL_PATH
from penstock_bench.bench_settings import EvalSettings
from penstock_bench.cli.bench_options import Plot, Save, finish, progress_bar

if TYPE_CHECKING:
    from penstock_bench.key_forms import KeyForm
    from penstock_bench.report import Report

LEAST_LENGTH = 64
"""Tokens of a dialogue with a fact in it."""
Codecs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Codec of keys and values (docs/codecs.md); may be given several times.",
        metavar="NAME",
        show_default="one of every size",
    ),
]
Text: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Read this text.",
        metavar="FILE",
        show_default="dialogues of the embedded model's",
        exists=True,
        dir_okay=False,
    ),
]
Windows: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="Window (max_kv_size) for each codec, and for raw; may be given several times.",
        metavar="TOKENS",
        show_default="no bound",
        min=2,
    ),
]
Keeps: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="First tokens that are never dropped, and stay in full precision; may be given "
        "several times.",
        metavar="TOKENS",
        show_default="as penstock serve",
        min=0,
    ),
]
Forms: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Form of the model that computes the same with other keys: plain, outliers (some "
        "channels are larger) or biased (by a constant); may be given several times.",
        metavar="FORM",
        show_default="all for the embedded model, else plain",
    ),
]
Lengths: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="Length of the dialogues that the embedded model is asked about; may be given "
        "several times.",
        metavar="TOKENS",
        show_default="250, 1000 and 4000",
        min=LEAST_LENGTH,
    ),
]
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
@with_settings
def evaluate(
    model: flags.ServedModel = str(MODEL_PATH),
    codec: Codecs = None,
    text: Text = None,
    window: Windows = None,
    keep: Keeps = None,
    form: Forms = None,
    length: Lengths = None,
    *,
    sizes: Annotated[dict[str, Any], Fields(EvalSettings, variables=False)],
    engine_size: options.EngineSize,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Measure what a model still knows with KV in fewer bits.

    Recall, of the embedded model: answers of the engine to questions about dialogues. Agreement:
    the engine continues a text as with raw ones. Perplexity, KL and likeliest token of a text, read
    block by block. Each with its n and standard error.

    Exits with 1 if a goal is not met.
    """
    engine = options.engine_size(model, engine_size)
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    own_text = None if text is None else _read(text)
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock_bench.eval_load import EvalLoad
    from penstock_bench.evaluate import measure
    from penstock_bench.evaluate_picture import draw

    chosen = {**_settings(codec, window, keep), **_questions(form, length, embedded)}
    name = str(MODEL_PATH) if embedded else model
    load = EvalLoad(model=name, text=own_text, **sizes, **engine, **chosen)
    with progress_bar("reading the model") as progress:
        report = measure(load, progress)
    if not as_json:
        _print(report)
    finish(report, as_json=as_json, save=save, plot=plot, draw=draw)


def _settings(
    codecs: Sequence[str] | None, windows: Sequence[int] | None, keeps: Sequence[int] | None
) -> dict[str, Any]:
    """Return the combinations of codecs, windows and first tokens that are measured."""
    from penstock_bench.eval_load import RAW, SETTINGS, KVSetting

    if not (codecs or windows or keeps):
        return {}
    names = list(codecs or dict.fromkeys(setting.codec for setting in SETTINGS))
    if windows and RAW not in names:  # what the window alone costs
        names.insert(0, RAW)
    sizes: list[int | None] = [*windows] if windows else [None]
    firsts: list[int | None] = [*keeps] if keeps else [None]
    settings = [KVSetting(name, size, kept) for size, kept, name in product(sizes, firsts, names)]
    return {"settings": tuple(settings), "windows_once": False}


def _questions(
    forms: Sequence[str] | None, lengths: Sequence[int] | None, embedded: bool
) -> dict[str, Any]:
    """Return the forms and lengths that are measured; of other models, the plain form alone.

    Raises:
        SettingError: there is no such form, or the model cannot be asked.
    """
    if lengths and not embedded:
        raise SettingError("--length: the embedded model alone knows what is asked there")
    chosen: dict[str, Any] = {}
    if forms or not embedded:
        chosen["forms"] = _forms(forms or ["plain"])
    if lengths or not embedded:
        chosen["lengths"] = tuple(dict.fromkeys(lengths or ()))
    return chosen


def _forms(names: Sequence[str]) -> tuple[KeyForm, ...]:
    from penstock_bench.key_forms import KeyForm

    for name in names:
        if name not in list(KeyForm):
            raise SettingError(f"--form {name}: there are {', '.join(KeyForm)}")
    return tuple(map(KeyForm, names))


def _read(file: Path) -> str:
    text = file.read_text(errors="surrogateescape")
    options.check_text(f"--text {file}", text)
    return text


def _print(report: Report) -> None:
    """Print what is lost of recall, and the figures of the text."""
    rows = report.penstock["rows"]
    console = Console(highlight=False)
    for form in dict.fromkeys(row["form"] for row in rows):
        of_form = [row for row in rows if row["form"] == form]
        if of_form[0]["recall"]:
            console.print(_recall_table(form, of_form))
        console.print(_text_table(form, of_form))
    console.print(_legend(rows[0], report.penstock["baseline"]))


def _recall_table(form: str, rows: Sequence[dict[str, Any]]) -> Table:
    lengths = list(rows[0]["recall"])
    table = _table(f"{form}: recall", *(f"{length:,} tokens" for length in lengths))
    for row in rows:
        table.add_row(row["setting"], *(_share(row["recall"].get(n)) for n in lengths))
    return table


def _text_table(form: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(f"{form}: text", "bytes", "ratio", "perplexity", "KL", "top 1", "agrees")
    for row in rows:
        table.add_row(
            row["setting"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['ratio']:.2f}x",
            _plain(row["perplexity"], ".3f"),
            _plain(row["kl"], ".0e"),
            _share(row["top_1"]),
            _share(row["agreement"]),
        )
    return table


def _legend(row: dict[str, Any], baseline: str) -> str:
    """Say what the figures count, by the figures of one row."""
    counts = [f"{n:,} tokens: {estimate['n']}" for n, estimate in row["recall"].items()]
    asked = f"Questions by length: {', '.join(counts)}. " if counts else ""
    return (
        f"{asked}Of the text {row['kl']['n']:,} tokens count, and {row['agreement']['n']} "
        f"continuations. Bytes of a token; ratio against {baseline}; KL in nats; +- is the "
        "standard error. -: the engine refuses this codec, which is there to be compared with."
    )


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        if number:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")  # a long name is not cut off
    return table


def _share(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate['mean']:.1f}+-{100 * estimate['standard_error']:.1f}"


def _plain(estimate: dict[str, Any], form: str) -> str:
    return f"{estimate['mean']:{form}}+-{estimate['standard_error']:{form}}"
