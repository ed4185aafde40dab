"""Options shared by benchmarks, and publishing of their reports."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from penstock import config
from penstock.cli import options
from penstock.cli.settings_options import Fields
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock_bench.engine_sides import EngineShape
    from penstock_bench.report import Notify, Report

EngineSize: TypeAlias = Annotated[
    dict[str, Any], Fields(config.EngineSettings, "memory_limit", "block_size")
]
LINE_SECONDS = 60.0
"""Seconds between two lines of progress in a log."""


def _check_save(folder: Path | None) -> Path | None:
    """Refuse a folder that is not writable, before anything is measured."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"--save {folder}: {error.strerror}") from None
    return folder


def _check_plot(file: Path | None) -> Path | None:
    """Refuse a picture file with an unknown extension or folder, before anything is measured."""
    if file is not None and not file.absolute().parent.is_dir():
        raise SettingError(f"--plot {file}: there is no folder {file.parent}")
    if file is not None and file.suffix:
        from matplotlib.figure import Figure

        known = sorted(Figure().canvas.get_supported_filetypes())
        if file.suffix[1:].lower() not in known:
            raise SettingError(f"--plot {file}: pictures end with {', '.join(known)}")
    return file


Save: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write the result of each round to a JSON file in this folder.",
        metavar="FOLDER",
        show_default="nothing is stored",
        file_okay=False,
        callback=_check_save,
    ),
]
Records: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--save",
        help="Store a JSON file of each bench in this folder.",
        metavar="FOLDER",
        file_okay=False,
        callback=_check_save,
    ),
]
Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Plot the result into this file.",
        metavar="FILE.png",
        show_default="nothing is drawn",
        dir_okay=False,
        callback=_check_plot,
    ),
]
Docs: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write the page and the picture of the docs into this folder.",
        metavar="FOLDER",
        show_default="nothing is written",
        file_okay=False,
        exists=True,
    ),
]
Rounds: TypeAlias = Annotated[
    int, typer.Option(help="Number of runs of each side; medians are compared.", min=1)
]
Which: TypeAlias = Annotated[
    Literal["random", "embedded"],
    typer.Option("--model", help="A random llama of 21 million parameters, or the embedded one."),
]
AnyModel: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="random: a llama of 21 million parameters; embedded; or a model with real weights: a "
        "folder, a .gguf file, or a name such as smollm2.",
        metavar="MODEL",
    ),
]
KnownTokens: TypeAlias = Annotated[
    int, typer.Option("--tokens", help="Length of the cached prompt.", metavar="TOKENS", min=256)
]
TraceFile: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--trace",
        help="Requests as JSON lines, in Mooncake's form: timestamp, input_length, "
        "output_length, hash_ids.",
        metavar="FILE",
        dir_okay=False,
    ),
]
EngineCodec: TypeAlias = Annotated[
    dict[str, Any],
    Fields(
        config.EngineSettings,
        "kv_cache_quantization",
        "kv_cache_min_quantize_tokens",
        "kv_cache_raw_first_tokens",
    ),
]


def engine_shape(codec: dict[str, Any]) -> EngineShape:
    """Return the engine's settings; invalid ones are refused before anything is measured."""
    options.check_codec_settings(codec)
    from penstock_bench.engine_sides import EngineShape

    return EngineShape(**codec)


def finish(
    report: Report,
    *,
    as_json: bool,
    save: Path | None,
    plot: Path | None = None,
    draw: Callable[[Report, Path], None] | None = None,
) -> NoReturn:
    """Publish a report, draw its picture, and exit with its status."""
    from penstock_bench.report import publish

    publish(report, as_json=as_json, save=save)
    if plot is not None:
        if draw is None:
            from penstock_bench import engine_picture

            draw = engine_picture.draw
        draw(report, plot)
    raise typer.Exit(0 if report.met else 1)


@contextmanager
def progress_bar(first: str) -> Iterator[Notify]:
    """Show a progress bar on a terminal, and yield the function that updates it.

    The function takes a description, the count and the total. Without a terminal, or on a dumb
    one, stderr gets a line per minute with the estimated time left.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        lines = ProgressLines(lambda line: print(line, file=sys.stderr, flush=True))
        with _ended_by_signals(lines.last):
            yield lines
        return
    with Progress(console=console, transient=True) as progress, _ended_by_signals():
        task = progress.add_task(first, total=None)
        yield lambda what, done, of: progress.update(
            task, description=what, completed=done, total=of
        )


@contextmanager
def _ended_by_signals(last: Callable[[], str] = str) -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the context with a line on stderr; its files are deleted.

    Args:
        last: returns how far the measurement is, for that line.
    """

    def leave(number: int, _: object) -> NoReturn:
        print(f"ended by {signal.Signals(number).name}{last()}", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    before = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGHUP)}
    before = {sig: handler for sig, handler in before.items() if handler != signal.SIG_IGN}  # nohup
    for sig in before:
        signal.signal(sig, leave)
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


class ProgressLines:
    """Progress of a long measurement as log lines."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._began = self._written = clock()
        self._last = ""

    def last(self) -> str:
        """Return what was told last, for the line that says why it ended."""
        return self._last

    def __call__(self, what: str, done: int, of: int) -> None:
        """Write a line if the last one is a minute old."""
        now = self._clock()
        self._last = f" at {what}, {done} of {of}"
        if done == 0 or now - self._written < LINE_SECONDS:
            return
        self._written = now
        left = (now - self._began) / done * (of - done)
        self._write(f"{what}: {done / of:.0%}, about {left / 60:.0f} min left")
