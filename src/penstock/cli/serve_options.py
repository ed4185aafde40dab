"""Options of `penstock serve`, except those generated from settings classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from penstock import config
from penstock.cli.options import MODEL_HELP
from penstock.cli.settings_file import read_config
from penstock.cli.settings_options import Fields
from penstock.recall import MODEL_PATH

EMBEDDED = str(MODEL_PATH)

ServedModel: TypeAlias = Annotated[
    str, typer.Argument(help=MODEL_HELP, envvar="PENSTOCK_MODEL", show_default="the embedded model")
]
MoreModels: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="More models, loaded on demand within one --memory-limit.", show_default=False
    ),
]
ModelsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--models",
        help="TOML file with a table [[model]] for each of several models: path, name, aliases, "
        "pin, ttl in seconds, and settings of its own.",
        envvar="PENSTOCK_MODELS",
        metavar="FILE",
    ),
]
AnyModelName: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--any-model-name",
        help="With several models: the first one answers requests for unknown names.",
        envvar="PENSTOCK_ANY_MODEL_NAME",
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file with settings, one key per flag, such as max-kv-size = 8192. Flags and "
        "environment variables take precedence.",
        envvar="PENSTOCK_CONFIG",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
    ),
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Name of the model in the APIs.",
        envvar="PENSTOCK_MODEL_NAME",
        metavar="NAME",
        show_default="its folder's name",
    ),
]
Adapter: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        help="LoRA or DoRA adapter in mlx-lm's form, which requests name as MODEL+NAME; may be "
        "repeated. All share the model's weights.",
        envvar="PENSTOCK_ADAPTER",
        metavar="NAME=FOLDER",
        show_default="none",
    ),
]
ChatTemplate: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="Chat template that replaces the model's: a Jinja file, chatml, or the name of one "
        "of the model's templates, such as rag.",
        envvar="PENSTOCK_CHAT_TEMPLATE",
        metavar="FILE",
        show_default="the model's own",
    ),
]
SSDPreload: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--ssd-preload",
        help="Read the most valuable blocks of --ssd-cache-dir into free memory before the first "
        "request.",
        envvar="PENSTOCK_SSD_PRELOAD",
    ),
]
Pipeline: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--pipeline",
        help="With mlx.launch: give each process whole layers instead of heads of every layer.",
        envvar="PENSTOCK_PIPELINE",
    ),
]
InRay: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Serve with replicas in Ray Serve; needs the extra ray, and RAY_ADDRESS if a Ray "
        "cluster is already running.",
        envvar="PENSTOCK_RAY",
    ),
]
Server: TypeAlias = Annotated[dict[str, Any], Fields(config.ServerSettings)]
Engine: TypeAlias = Annotated[dict[str, Any], Fields(config.EngineSettings)]
Fleet: TypeAlias = Annotated[dict[str, Any], Fields(config.FleetSettings)]
