"""`penstock eval`: recall, agreement and perplexity of a model with quantized KV."""

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
from penstock.config.defaults import LEAST_ATTEND_TOKENS
from penstock.errors import SettingError
from penstock.plurals import counted
from penstock.recall import MODEL_PATH
from penstock_bench.bench_settings import EvalSettings
from penstock_bench.cli.bench_options import EngineSize, Plot, Save, finish, progress_bar

if TYPE_CHECKING:
    from penstock_bench.key_forms import KeyForm
    from penstock_bench.long_tasks import LongTask
    from penstock_bench.report import Report

LEAST_LENGTH = 64
"""Shortest dialogue with a fact, in tokens."""
TASK_LENGTHS = (1_000, 2_000)
"""Text lengths of tasks, in tokens."""
Codecs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Codec of keys and values (docs/codecs.md); may be given several times.",
        metavar="NAME",
        show_default="one of every size",
    ),
]
Text: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text to evaluate on; may be given several times, and then pieces of the texts "
        "alternate.",
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
        help="Number of first tokens that are never dropped and stay in full precision; may be "
        "given several times.",
        metavar="TOKENS",
        show_default="as penstock serve",
        min=0,
    ),
]
Forms: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Variant of the model with equal outputs but other keys: plain, outliers (some "
        "channels are larger) or biased (by a constant); may be given several times.",
        metavar="FORM",
        show_default="all for the embedded model, else plain",
    ),
]
Tasks: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Task on the text of --text, for other models than the embedded one: needle, "
        "needles, variables or words; may be given several times.",
        metavar="TASK",
        show_default="all with --length, else none",
    ),
]
Lengths: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="Length of the dialogues that the embedded model is asked about, or of the texts of "
        "--task; may be given several times.",
        metavar="TOKENS",
        show_default="250, 1000 and 4000; of tasks 1000 and 2000",
        min=LEAST_LENGTH,
    ),
]
Attend: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="Instead of codecs, measure steps that attend to this many tokens of each piece "
        "(--attend-tokens of penstock serve), and a window of as many bytes. Proposes a "
        "number. With --task, measure the engine's answers instead of pieces. May be "
        "given several times.",
        metavar="TOKENS",
        show_default=False,
        min=LEAST_ATTEND_TOKENS,
    ),
]
AttendRest: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--attend-rest",
        help="With --attend, also attend to the other tokens, at two bits per number "
        "(--attend-rest of penstock serve).",
    ),
]
AttendLayers: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--attend-layers",
        help="With --attend, also measure each layer with selection alone, and exclude the "
        "worst layers if fewer tokens are then enough. Takes a pass per layer.",
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
    task: Tasks = None,
    attend: Attend = None,
    attend_rest: AttendRest = False,
    attend_layers: AttendLayers = False,
    *,
    sizes: Annotated[dict[str, Any], Fields(EvalSettings, variables=False)],
    engine_size: EngineSize,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Measure the loss of a model with quantized KV.

    Recall: the engine answers questions about dialogues (embedded model) or long texts (--task).
    Agreement: the engine continues a text as with raw KV. Perplexity, KL and top-1 of a text, read
    block by block. Each with n and standard error. Attention: KL of the layers' weights on
    quantized keys, and the relative error of the output.

    Exits with 1 if a goal is not met.
    """
    engine = options.engine_size(model, engine_size)
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    texts = tuple(map(_read, text or ()))
    options.warn_of_slow_blas(load_blas())

    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock_bench.eval_load import EvalLoad
    from penstock_bench.evaluate import measure
    from penstock_bench.evaluate_picture import draw

    chosen = {**_settings(codec, window, keep), **_questions(form, length, task, embedded)}
    name = str(MODEL_PATH) if embedded else model
    load = EvalLoad(model=name, texts=texts, attend_rest=attend_rest, **sizes, **engine, **chosen)
    if attend_rest and not attend:
        raise SettingError("--attend-rest needs --attend")
    if attend:
        from penstock_bench import attend_eval, attend_tasks

        with progress_bar("reading the model") as progress:
            if load.tasks:
                report = attend_tasks.measure(load, attend, progress)
            else:
                report = attend_eval.measure(load, attend, progress, by_layer=attend_layers)
        finish(report, as_json=as_json, save=save)
    with progress_bar("reading the model") as progress:
        report = measure(load, progress)
    if not as_json:
        _print(report)
    finish(report, as_json=as_json, save=save, plot=plot, draw=draw)


def _settings(
    codecs: Sequence[str] | None, windows: Sequence[int] | None, keeps: Sequence[int] | None
) -> dict[str, Any]:
    """Return the combinations of codecs, windows and kept tokens to measure."""
    from penstock_bench.eval_load import RAW, SETTINGS, KVSetting

    if not (codecs or windows or keeps):
        return {}
    names = list(codecs or dict.fromkeys(setting.codec for setting in SETTINGS))
    if windows and RAW not in names:  # the cost of the window alone
        names.insert(0, RAW)
    sizes: list[int | None] = [*windows] if windows else [None]
    firsts: list[int | None] = [*keeps] if keeps else [None]
    settings = [KVSetting(name, size, kept) for size, kept, name in product(sizes, firsts, names)]
    return {"settings": tuple(settings), "windows_once": False}


def _questions(
    forms: Sequence[str] | None,
    lengths: Sequence[int] | None,
    tasks: Sequence[str] | None,
    embedded: bool,
) -> dict[str, Any]:
    """Return the forms, tasks and lengths to measure; only the plain form for other models.

    Raises:
        SettingError: a form is unknown, or the model supports no questions.
    """
    if tasks and embedded:
        raise SettingError(
            "--task needs another model than the embedded one, which only knows its dialogues"
        )
    chosen: dict[str, Any] = {}
    if forms or not embedded:
        chosen["forms"] = _forms(forms or ["plain"])
    if lengths or not embedded:
        chosen["lengths"] = tuple(dict.fromkeys(lengths or (TASK_LENGTHS if tasks else ())))
    if chosen.get("lengths") and not embedded:
        chosen["tasks"] = _tasks(tasks)
    return chosen


def _tasks(names: Sequence[str] | None) -> tuple[LongTask, ...]:
    from penstock_bench.long_tasks import LongTask

    for name in names or ():
        if name not in list(LongTask):
            raise SettingError(f"--task {name}: there are {', '.join(LongTask)}")
    return tuple(map(LongTask, dict.fromkeys(names or LongTask)))


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
    """Print recall, the figures of the text, and the errors of attention."""
    rows = report.penstock["rows"]
    console = Console(highlight=False)
    for form in dict.fromkeys(row["form"] for row in rows):
        of_form = [row for row in rows if row["form"] == form]
        if of_form[0]["recall"]:
            console.print(_recall_table(form, of_form))
        console.print(_text_table(form, of_form))
        if any(any(row["layers"]) for row in of_form):
            console.print(_attention_table(form, of_form))
    console.print(_legend(rows[0], report.penstock["baseline"]))


def _recall_table(form: str, rows: Sequence[dict[str, Any]]) -> Table:
    lengths = list(rows[0]["recall"])
    table = _table(f"{form}: recall", *map(_heading, lengths))
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


def _attention_table(form: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of attention errors: mean, and the worst layer."""
    table = _table(f"{form}: attention", "KL", "worst", "layer", "output", "worst", "layer")
    for row in rows:
        layers = {n: layer for n, layer in enumerate(row["layers"]) if layer is not None}
        if not layers:
            continue
        cells: list[str] = []
        for name, form_ in (("kl", ".1e"), ("output", ".3f")):
            errors = {number: layer[name] for number, layer in layers.items()}
            worst = max(errors, key=lambda number: errors[number])
            mean = sum(errors.values()) / len(errors)
            cells += [f"{mean:{form_}}", f"{errors[worst]:{form_}}", str(worst)]
        table.add_row(row["setting"], *cells)
    return table


def _legend(row: dict[str, Any], baseline: str) -> str:
    """Return the legend of the tables, with the counts of one row."""
    counts = [f"{_heading(n)}: {estimate['n']}" for n, estimate in row["recall"].items()]
    continued = (row["agreement"] or {"n": 0})["n"]
    questions = f"Questions by length: {', '.join(counts)}. " if counts else ""
    return (
        f"{questions}Of the text {counted(row['kl']['n'], 'token')} count, and {continued} "
        f"continuations. Bytes of a token; ratio against {baseline}; KL in nats; +- is the "
        "standard error. -: nothing is continued."
    )


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        if number:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")  # a long name is not cut off
    return table


def _heading(length: int | str) -> str:
    """Return the column heading of a length, or of a task and a length."""
    return f"{counted(length, 'token')}" if isinstance(length, int) else length


def _share(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate['mean']:.1f}+-{100 * estimate['standard_error']:.1f}"


def _plain(estimate: dict[str, Any], form: str) -> str:
    return f"{estimate['mean']:{form}}+-{estimate['standard_error']:{form}}"
