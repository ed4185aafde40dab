"""`penstock bench`: the project's claims, measured here and now."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import typer

from penstock import config
from penstock.cli import options
from penstock.cli.settings_options import Fields, with_settings
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock_bench.engine_runs import EngineShape
    from penstock_bench.report import Report

app = typer.Typer(
    help="Measure the project's claims on this machine, a rival in the same run.",
    add_completion=False,
    rich_markup_mode=None,
)


def _check_save(folder: Path | None) -> Path | None:
    """Refuse before anything is measured what could not be stored afterwards."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"--save {folder}: {error.strerror}") from None
    return folder


Save: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Store every round as a JSON file in this folder.",
        metavar="FOLDER",
        show_default="nothing is stored",
        file_okay=False,
        callback=_check_save,
    ),
]
Rounds: TypeAlias = Annotated[
    int, typer.Option(help="How often each side runs; medians are compared.", min=1)
]


def _check_plot(file: Path | None) -> Path | None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    if file is not None and find_spec("matplotlib") is None:
        raise SettingError("--plot needs matplotlib: pip install matplotlib")
    if file is not None and not file.absolute().parent.is_dir():
        raise SettingError(f"--plot {file}: there is no folder {file.parent}")
    if file is not None and file.suffix:
        from matplotlib.figure import Figure

        known = sorted(Figure().canvas.get_supported_filetypes())
        if file.suffix[1:].lower() not in known:
            raise SettingError(f"--plot {file}: pictures end with {', '.join(known)}")
    return file


Which: TypeAlias = Annotated[
    Literal["random", "embedded"],
    typer.Option("--model", help="A random llama of 21 million parameters, or the embedded one."),
]
Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Draw the outcome into this file (needs matplotlib).",
        metavar="FILE.png",
        show_default="nothing is drawn",
        dir_okay=False,
        callback=_check_plot,
    ),
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
    from penstock_bench.growth import Shape, measure
    from penstock_bench.report import publish

    shape = Shape(layers=layers, window_tokens=window, read_tokens=tokens, rounds=rounds)
    report = measure(shape)
    publish(report, as_json=as_json, save=save)
    if docs is not None:
        from penstock_bench.growth_picture import draw

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
    from penstock_bench.recall import Load, measure, write_page
    from penstock_bench.report import publish

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
    from penstock_bench.lookup import Load, measure
    from penstock_bench.report import publish

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
        int, typer.Option(help="Blocks that one eviction evicts, at most.", min=1)
    ] = 4,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Share of a trace's tokens found in bounded caches, beside plain LRU and the optimum.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.report import publish
    from penstock_bench.trace import Load, measure

    report = measure(file, Load(node_blocks=node_blocks))
    publish(report, as_json=as_json, save=save)
    raise typer.Exit(0 if report.met else 1)


@app.command()
def cluster(
    file: Annotated[
        Path,
        typer.Option(
            "--trace",
            help="Requests as JSON lines: timestamp, input_length, output_length, hash_ids.",
            metavar="FILE",
            dir_okay=False,
        ),
    ],
    replicas: Annotated[
        list[int] | None,
        typer.Option(
            help="How many there are; may be given several times.",
            metavar="NUMBER",
            show_default="1, 3, 10, 30 and 100",
            min=1,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy of the router: round-robin, hash, prefix or prefix+load; may be given "
            "several times.",
            metavar="NAME",
            show_default="all four",
        ),
    ] = None,
    split: Annotated[
        int,
        typer.Option(
            help="Cut the trace into so many parts of whole conversations, and give each replica "
            "one; more replicas get copies whose users are others.",
            metavar="PARTS",
            min=1,
        ),
    ] = 10,
    requests: Annotated[
        int,
        typer.Option(
            help="Replay at most this many a run, the first ones of all replicas together.",
            metavar="NUMBER",
            min=1,
        ),
    ] = 20_000,
    memory: Annotated[
        int, typer.Option(help="KV that a replica holds.", metavar="TOKENS", min=1)
    ] = 500_000,
    prefill: Annotated[
        float,
        typer.Option(
            help="Tokens of prompts that a replica reads a second.", metavar="TOKENS", min=1.0
        ),
    ] = 5_000.0,
    decode: Annotated[
        float, typer.Option(help="Tokens a second of each answer.", metavar="TOKENS", min=0.1)
    ] = 30.0,
    batch: Annotated[
        int,
        typer.Option(
            help="Sequences that a replica runs at the same time.", metavar="NUMBER", min=1
        ),
    ] = 16,
    routers: Annotated[
        int,
        typer.Option(
            help="Routers that take turns; each knows at once what it sent itself.",
            metavar="NUMBER",
            min=1,
        ),
    ] = 1,
    gossip: Annotated[
        float,
        typer.Option(help="How often replicas say what they hold.", metavar="SECONDS", min=0.1),
    ] = 5.0,
    worth: Annotated[
        float,
        typer.Option(
            help="What a block of one conversation counts where it would be computed again, "
            "against one that waits.",
            metavar="NUMBER",
            min=0.1,
        ),
    ] = 8.0,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Many replicas in simulated time: hits, waits and gossip, by how prompts find theirs.

    Real trees and the router of penstock serve --ray; a request takes its missing tokens by
    --prefill and its answer by --decode. Exits with 1 if a goal is not met.
    """
    from rich.console import Console
    from rich.progress import Progress

    from penstock_bench.cluster import Load, measure, policy_of, table
    from penstock_bench.cluster_simulation import Machine
    from penstock_bench.report import publish

    load = Load(
        split=split,
        requests=requests,
        routers=routers,
        gossip_seconds=gossip,
        worth=worth,
        machine=Machine(memory, prefill, decode, batch),
    )
    load = replace(
        load,
        replicas=tuple(replicas or load.replicas),
        policies=tuple(map(policy_of, policy or load.policies)),
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        report = measure(
            file,
            load,
            lambda what, done, of: progress.update(
                task, description=what, completed=done, total=of
            ),
        )
    if not as_json:
        Console(highlight=False).print(table(report))
    publish(report, as_json=as_json, save=save)
    if plot is not None:
        from penstock_bench.cluster_picture import draw

        draw(report, plot)
    raise typer.Exit(0 if report.met else 1)


@app.command("shared-prefix")
@with_settings
def shared_prefix(
    model: Which = "random",
    conversations: Annotated[
        int, typer.Option(help="Conversations at the same time.", metavar="NUMBER", min=2)
    ] = 8,
    prefix: Annotated[
        list[int] | None,
        typer.Option(
            help="What they begin with; may be given several times.",
            metavar="TOKENS",
            show_default="8192 and 2048",
            min=1,
        ),
    ] = None,
    rounds: Rounds = 5,
    cold_rounds: Annotated[
        int,
        typer.Option(
            help="How often mlx-lm reads the prefix for every conversation, which takes minutes.",
            min=0,
        ),
    ] = 1,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Conversations that share their beginning: speed and bytes, against mlx-lm's batches.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.models import Choice
    from penstock_bench.shared_prefix import Load, measure

    engine = _engine(codec)
    load = Load(
        Choice(model),
        engine=engine,
        conversations=conversations,
        rounds=rounds,
        cold_rounds=cold_rounds,
    )
    if prefix:
        load = replace(load, prefix_tokens=tuple(prefix))
    _finish(measure(load), as_json=as_json, save=save, plot=plot)


@app.command()
@with_settings
def hit(
    model: Which = "random",
    tokens: Annotated[
        int, typer.Option(help="Length of the known prompt.", metavar="TOKENS", min=1)
    ] = 8_192,
    rounds: Rounds = 5,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """First token and bytes copied when all of a prompt is known, against mlx-lm's prompt cache.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.hit import Load, measure
    from penstock_bench.models import Choice

    engine = _engine(codec)
    report = measure(Load(Choice(model), engine=engine, known_tokens=tokens, rounds=rounds))
    _finish(report, as_json=as_json, save=save, plot=plot)


@app.command()
@with_settings
def restore(
    model: Which = "random",
    tokens: Annotated[
        int, typer.Option(help="Length of the known prompt.", metavar="TOKENS", min=256)
    ] = 8_192,
    rounds: Rounds = 5,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """First token after a restart, and what writing costs, against mlx-lm's file of a prompt.

    Files are written to the folder for temporary files (TMPDIR). Exits with 1 if a goal is not
    met.
    """
    from penstock_bench.models import Choice
    from penstock_bench.restore import Load, measure

    engine = _engine(codec)
    report = measure(Load(Choice(model), engine=engine, known_tokens=tokens, rounds=rounds))
    _finish(report, as_json=as_json, save=save, plot=plot)


@app.command()
@with_settings
def ragged(
    model: Which = "random",
    rounds: Rounds = 5,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """One long sequence and seven short ones: speed and bytes, against mlx-lm's padded batches.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.models import Choice
    from penstock_bench.ragged import Load, measure

    engine = _engine(codec)
    report = measure(Load(Choice(model), engine=engine, rounds=rounds))
    _finish(report, as_json=as_json, save=save, plot=plot)


@app.command()
@with_settings
def single(
    model: Which = "random",
    rounds: Rounds = 5,
    longest: Annotated[
        int,
        typer.Option(
            help="Show the cost of a step up to this length; 0 leaves that out.",
            metavar="TOKENS",
            min=0,
        ),
    ] = 32_768,
    curve_only: Annotated[
        bool, typer.Option("--curve-only", help="Show that cost alone, and no comparison of speed.")
    ] = False,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Sequences that share nothing: speed and the cost of a step, against mlx-lm's.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.models import Choice
    from penstock_bench.single import Load, measure

    engine = _engine(codec)
    load = Load(Choice(model), engine=engine, rounds=rounds)
    load = replace(load, curve_tokens=load.curve_to(longest))
    if curve_only:
        if not longest:
            raise SettingError("--curve-only with --longest 0 leaves nothing to measure")
        load = replace(load, shapes=())
    report = measure(load)
    _finish(report, as_json=as_json, save=save, plot=plot)


@app.command()
@with_settings
def quantized(
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            "--kv-cache-quantization",
            help="Of the form that is set against full precision.",
            metavar="CODEC",
        ),
    ] = "auto3.5x",
    *,
    min_tokens: Annotated[
        dict[str, Any], Fields(config.EngineSettings, "kv_cache_min_quantize_tokens")
    ],
    model: Which = "random",
    longest: Annotated[
        int, typer.Option(help="Length of the longest prompt.", metavar="TOKENS", min=1_024)
    ] = 8_192,
    rounds: Rounds = 5,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """One sequence held in a codec and as it is: peak and speed, beside mlx-lm's quantized cache.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.engine_runs import EngineShape
    from penstock_bench.models import Choice
    from penstock_bench.quantized import Load, measure

    engine = EngineShape(**min_tokens)
    load = Load(codec, Choice(model), engine=engine, rounds=rounds)
    lengths = tuple(tokens for tokens in load.lengths if tokens <= longest)
    report = measure(replace(load, lengths=lengths))
    _finish(report, as_json=as_json, save=save, plot=plot)


@app.command()
@with_settings
def hybrid(
    known: Annotated[
        int, typer.Option(help="Length of the first turn's prompt.", metavar="TOKENS", min=512)
    ] = 4_096,
    rounds: Rounds = 5,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """The second turn of a conversation with a model of recurrent layers, against mlx-lm's.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.hybrid import Load, measure

    engine = _engine(codec)
    report = measure(Load(engine=engine, known_tokens=known, rounds=rounds))
    _finish(report, as_json=as_json, save=save, plot=None)


@app.command()
def store(
    rounds: Rounds = 9,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """A prompt into a prefix cache in 8 bits and out of it, against vllm-mlx's where it is there.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.store import Load, measure

    _finish(measure(Load(rounds=rounds)), as_json=as_json, save=save, plot=None)


@app.command()
@with_settings
def serve(
    model: Which = "random",
    sessions: Annotated[
        int, typer.Option(help="Agents that talk at the same time.", metavar="NUMBER", min=1)
    ] = 8,
    turns: Annotated[int, typer.Option(help="Turns of each.", metavar="NUMBER", min=1)] = 5,
    system: Annotated[
        int,
        typer.Option(help="Length of the system prompt they share.", metavar="TOKENS", min=64),
    ] = 4_000,
    answer: Annotated[
        int, typer.Option(help="Length of an answer, at most.", metavar="TOKENS", min=2)
    ] = 64,
    forks: Annotated[
        int,
        typer.Option(
            help="Of the agents, those that go on twice after two turns.", metavar="NUMBER", min=0
        ),
    ] = 0,
    edits: Annotated[
        int,
        typer.Option(
            help="Of the agents, those whose fourth turn replaces the third.",
            metavar="NUMBER",
            min=0,
        ),
    ] = 0,
    rate: Annotated[
        float,
        typer.Option(
            help="Then send requests that come at random, so many a second on average, whether "
            "or not the servers keep up; 0 leaves that out.",
            metavar="REQUESTS",
            min=0.0,
        ),
    ] = 0.0,
    arrivals: Annotated[
        int, typer.Option(help="How many of those come.", metavar="REQUESTS", min=1)
    ] = 40,
    connections: Annotated[
        int,
        typer.Option(
            help="Requests to penstock at the same moment; 0 leaves them out.",
            metavar="NUMBER",
            min=0,
        ),
    ] = 200,
    overhead_rounds: Annotated[
        int,
        typer.Option(
            help="How often the server and the engine without one are timed; 0 leaves it out.",
            min=0,
        ),
    ] = 5,
    rounds: Annotated[
        int, typer.Option(help="How often each server is started and given the sessions.", min=1)
    ] = 1,
    *,
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Our server under load over HTTP, against mlx-lm's on the same model.

    Exits with 1 if a goal is not met.
    """
    from penstock_bench.models import Choice
    from penstock_bench.report import publish
    from penstock_bench.serve import Load, measure

    report = measure(
        Load(
            Choice(model),
            engine=_engine(codec),
            rounds=rounds,
            sessions=sessions,
            turns=turns,
            system_tokens=system,
            answer_tokens=answer,
            forks=forks,
            edits=edits,
            rate=rate,
            arrivals=arrivals,
            connections=connections,
            overhead_rounds=overhead_rounds,
        )
    )
    publish(report, as_json=as_json, save=save)
    if plot is not None:
        from penstock_bench.serve_picture import draw

        draw(report, plot)
    raise typer.Exit(0 if report.met else 1)


def _engine(codec: dict[str, Any]) -> EngineShape:
    """Return our engine's settings; refuse before anything is measured what it would refuse."""
    options.check_codec_settings(codec)
    from penstock_bench.engine_runs import EngineShape

    return EngineShape(**codec)


def _finish(report: Report, *, as_json: bool, save: Path | None, plot: Path | None) -> NoReturn:
    """Publish a report and exit by it."""
    from penstock_bench.report import publish

    publish(report, as_json=as_json, save=save)
    if plot is not None:
        from penstock_bench.engine_picture import draw

        draw(report, plot)
    raise typer.Exit(0 if report.met else 1)
