"""`penstock bench serve`: agents that talk to servers over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from penstock.cli import options
from penstock.cli.settings_options import Fields, with_settings
from penstock.errors import SettingError
from penstock_bench.bench_settings import ServeSettings
from penstock_bench.cli.bench_options import (
    EngineCodec,
    Plot,
    Save,
    engine_shape,
    finish,
    progress_bar,
)

if TYPE_CHECKING:
    from penstock_bench.report import Notify

REAL_DEFAULTS = {"system_tokens": 3_000, "connections": 0, "overhead_rounds": 0}
"""Defaults for a model with real weights, overriding the settings' defaults."""
ServedModel: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="random: a llama of 21 million parameters; embedded; or a model with real weights: "
        "a folder, a .gguf file, or smollm2.",
        metavar="MODEL",
    ),
]
Text: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text for the prompts of a model with real weights; may be given several times.",
        metavar="FILE",
        show_default="sources of Python's library",
        exists=True,
        dir_okay=False,
    ),
]
LlamaServer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Command that runs llama.cpp's server with its own settings; also measured, on the "
        "same .gguf file.",
        metavar="COMMAND",
        show_default="it is left out",
    ),
]
MlxLm: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--mlx-lm/--no-mlx-lm",
        help="Also measure mlx-lm's server; without it the other side is --llama-server.",
    ),
]
Conversations: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="Instead of sessions, measure servers that cache this many conversations of 1,000 "
        "tokens. Reports memory, and the time to first token of a next turn, also after "
        "a restart. May be given several times.",
        metavar="NUMBER",
        show_default="sessions are measured",
        min=1,
    ),
]
Lengths: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        help="Instead of sessions, one client asks new prompts of about this many tokens. Reports "
        "time to first token, decode speed and memory. May be given several times.",
        metavar="TOKENS",
        show_default="sessions are measured",
        min=1,
    ),
]


@with_settings
def serve(
    model: ServedModel = "random",
    text: Text = None,
    llama_server: LlamaServer = None,
    mlx_lm: MlxLm = True,
    conversations: Conversations = None,
    length: Lengths = None,
    *,
    load: Annotated[dict[str, Any], Fields(ServeSettings, variables=False)],
    codec: EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Let agents talk with the server over HTTP.

    The other side is mlx-lm's server on the same model, and with --llama-server llama.cpp's. A
    model with real weights gets real text, a system prompt of 3,000 tokens, and no test with 200
    connections. Prints the expected time. Exits with 1 if a goal is not met.
    """
    from penstock_bench import serve_held, serve_length
    from penstock_bench.models import ModelChoice
    from penstock_bench.serve_load import ServeLoad
    from penstock_bench.serve_picture import draw
    from penstock_bench.serve_runs import measure

    real = model not in list(ModelChoice)
    if not real and (text or llama_server):
        raise SettingError("--text and --llama-server need a model with real weights: add --model")
    if not mlx_lm and not llama_server:
        raise SettingError("--no-mlx-lm needs another side: add --llama-server")
    if conversations and length:
        raise SettingError("--conversations and --length are two benches: run one of them")
    if plot and (conversations or length or not mlx_lm):
        raise SettingError("--plot needs sessions and mlx-lm's server")
    settings = {
        "model": model if real else ModelChoice(model),
        "texts": tuple(map(str, text or ())),
        "llama_server": llama_server,
        "mlx_lm": mlx_lm,
        "engine": engine_shape(codec),
        **(_real_settings(load) if real else load),
    }
    served = ServeLoad(**settings)
    with progress_bar("loading the model") as notify:
        if conversations:
            report = serve_held.measure(served, conversations, _announced(notify))
        elif length:
            report = serve_length.measure(served, length, notify)
        else:
            report = measure(served, notify=_announced(notify))
    finish(report, as_json=as_json, save=save, plot=plot, draw=draw)


def _announced(notify: Notify) -> Notify:
    """Print the expected total time of the sessions first."""
    from penstock_bench.serve_time import EXPECTED

    def announced(what: str, done: int, of: int) -> None:
        if what == EXPECTED:
            minutes = max(1, round(of / 60))
            print(f"the sessions take about {minutes} min in all", file=sys.stderr, flush=True)
        notify(what, done, of)

    return announced


def _real_settings(load: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a load, with the defaults of a real model."""
    fields = ServeSettings.model_fields
    unset = {name for name in REAL_DEFAULTS if load.get(name, 0) == fields[name].default}
    missing = REAL_DEFAULTS.keys() - load.keys()
    return {**load, **{name: REAL_DEFAULTS[name] for name in unset | missing}}
