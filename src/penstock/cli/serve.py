"""`penstock serve`: the engine behind OpenAI's and Anthropic's wire formats."""

from __future__ import annotations

import gc
import logging
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from penstock import __version__, config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli import serve_options as flags
from penstock.cli.group import check_same, joined
from penstock.cli.settings_options import with_settings
from penstock.errors import ModelError, SettingError
from penstock.heap import give_back_freed_memory
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.engine.ranks.process_group import RankGroup
    from penstock.models.mlx_lm import Loaded

ALONE = (
    "--pipeline divides a model among several processes; start them by mlx.launch (mlx.launch -n 2 "
    "-- penstock serve ...)"
)
UNHEARD = ("uvicorn.error", "transformers.tokenization_utils_base")
"""Loggers of which errors alone are heard."""
BACKLOG = 1_024
"""Connections that may wait to be accepted."""
_ORIGIN = re.compile(r"\*|https?://[^/?#\s]+")


@with_settings
def serve(
    model: flags.ServedModel = str(MODEL_PATH),
    config_file: flags.ConfigFile = None,
    model_name: flags.ModelName = None,
    weights_dtype: options.WeightsDtype = "auto",
    *,
    server: flags.Server,
    engine: flags.Engine,
    ssd_preload: flags.SSDPreload = False,
    pipeline: flags.Pipeline = False,
    in_ray: flags.InRay = False,
    fleet: flags.Fleet,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients.

    Prefixes that prompts share are computed once and held once, inside --memory-limit. The first
    SIGTERM or Ctrl-C lets open answers end; the second ends at once. Exit code 1 means that the
    engine has died.
    """
    _check_origins(server.get("cors_origin", ()), server.get("api_key"))
    settings = config.parse(config.ServerSettings, **server)
    cache_folder = engine.get("ssd_cache_dir")
    for flag, wanted in (("--session-dir", settings.session_dir), ("--ssd-preload", ssd_preload)):
        if wanted and cache_folder is None:
            raise SettingError(f"{flag} needs --ssd-cache-dir: it works on the blocks there")
    _check_reach(settings)
    limits = _checked_limits(model, engine)
    logging.basicConfig(level=logging.WARNING, format="penstock: %(message)s")
    _silence_libraries()
    options.warn_of_slow_blas(load_blas())
    name = model_name or _name(model)
    if in_ray:
        if pipeline:
            raise SettingError(ALONE)
        replicas = config.parse(config.FleetSettings, **fleet)
        _check_ray(settings)
        return _run_in_ray(
            model,
            name,
            settings,
            limits,
            replicas,
            preload=ssd_preload,
            weights_dtype=weights_dtype,
        )
    _check_fleet(fleet)
    options.check_writable("--session-dir", settings.session_dir)
    options.check_writable("--ssd-cache-dir", cache_folder)
    with joined() as ranks:
        load = partial(_load, model, name, limits, ranks, pipeline, weights_dtype)
        if ranks is not None:
            _check_alone(ssd_preload=ssd_preload, session_dir=settings.session_dir)
            ranks.check_equal("--pipeline", pipeline)
            if not ranks.leads:
                _follow(load, limits, ranks)
                return
        elif pipeline:
            raise SettingError(ALONE)
        with _listening(settings) as listener:
            _run(load, name, settings, limits, listener, ranks, preload=ssd_preload)


def _silence_libraries() -> None:
    """Silence the warnings of libraries about malformed requests.

    Those are bytes that are no HTTP, and prompts that are too long; the client is told.
    """
    for name in UNHEARD:
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


def _checked_limits(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's settings, checked in the words of flags.

    Raises:
        SettingError: says which flag.
    """
    limits = given | options.engine_size(
        model, {name: given[name] for name in ("memory_limit", "block_size") if name in given}
    )
    options.check_folder_limit(limits["ssd_cache_limit"])
    options.check_codec_settings(limits)
    config.parse(
        config.KVSettings, max_kv_size=limits["max_kv_size"], keep_kv_size=limits.get("keep")
    )
    options.check_tiers(config.parse(config.EngineSettings, **{**limits, "memory_limit": 1}))
    return limits


def _check_alone(**flags: object) -> None:
    """Refuse settings that only a model in one process has."""
    for flag, wanted in flags.items():
        if wanted:
            raise SettingError(
                f"--{flag.replace('_', '-')} does not work with a model on several machines, each "
                f"of which has a folder of its own; leave it out"
            )


def _follow(load: Callable[[], Loaded], limits: dict[str, Any], ranks: RankGroup) -> None:
    """Be a rank but the first: it has no socket, and ends when rank 0 does."""
    from penstock.engine.engine import follow

    loaded = load()
    follow(loaded.model, loaded.tokenizer, ranks, **limits)


def _load(
    model: str,
    name: str,
    limits: dict[str, Any],
    ranks: RankGroup | None,
    pipeline: bool,
    weights_dtype: config.WeightsDtype,
) -> Loaded:
    """Load a model, or this rank's part of it."""
    from penstock.models.mlx_lm import load_part

    if ranks is None:
        loaded = options.load_quietly(model, weights_dtype, limits.get("memory_limit"))
    else:
        loaded = load_part(model, ranks.group, pipeline=pipeline)
    if not loaded.tokenizer.eos_token_ids:
        raise ModelError(f"{name} has no token that ends an answer")
    if ranks is not None:
        check_same(ranks, loaded.config, limits)
    return loaded


def _name(model: str) -> str:
    """Return a model's name: that of its folder, or its name at the hub."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _check_origins(origins: Sequence[str], api_key: str | None) -> None:
    """Refuse an origin that no browser sends: it is a scheme and a host, and a port if need be.

    Without a key, all pages are refused as well: each could read cached prompts of others.
    """
    if "*" in origins and not api_key:
        raise SettingError(
            "--cors-origin '*' without a key lets every page that is open in a browser here read "
            "all prompts and answers in the cache; name the page's origin, or set PENSTOCK_API_KEY"
        )
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise SettingError(
                f"--cors-origin {origin} is no origin; write it as https://host or "
                "http://host:port, without a path, or * for all"
            )


def _check_reach(settings: config.ServerSettings) -> None:
    """Refuse to be there for other machines without a key."""
    if settings.api_key is None and not settings.on_loopback:
        raise SettingError(
            f"--host {settings.host} can be reached from other machines; set PENSTOCK_API_KEY (or "
            f"--api-key), or listen on {config.HOST}"
        )


def _check_fleet(fleet: dict[str, Any]) -> None:
    """Refuse settings of replicas where no Ray is to run them."""
    usual = config.FleetSettings()
    for name, value in fleet.items():
        if value != getattr(usual, name):
            flag = config.flag_of(config.FleetSettings, name)
            raise SettingError(f"--{flag} needs --ray: without it there is one server")


def _check_ray(settings: config.ServerSettings) -> None:
    """Refuse settings that Ray would refuse later, or in other words."""
    if find_spec("ray") is None:
        raise SettingError("--ray needs Ray: pip install 'penstock[ray]'")
    if settings.port == 0:
        raise SettingError("--ray needs a --port of its own: Ray's proxies do not take a free one")
    _listening(settings).close()  # a port that is taken is told of as without Ray


def _run_in_ray(
    model: str,
    name: str,
    settings: config.ServerSettings,
    limits: dict[str, Any],
    fleet: config.FleetSettings,
    *,
    preload: bool,
    weights_dtype: config.WeightsDtype,
) -> None:
    """Start the replicas, say where they are, and serve until told to stop."""
    from penstock.serve_ray.application import Fleet, running, wait_for_signal
    from penstock.serve_ray.replica import Served

    served = Served(model, name, settings, limits, preload, weights_dtype)
    with running(served, Fleet(**fleet.model_dump())) as url:
        most = fleet.max_replicas
        count = fleet.replicas if most is None else f"{fleet.replicas} to {most}"
        print(f"penstock {__version__} serves {name} on {url} with {count} replicas in Ray Serve")
        print(f"routing  {fleet.routing}")
        sys.stdout.flush()
        wait_for_signal()


def _listening(settings: config.ServerSettings) -> socket.socket:
    """Return a socket that listens; requests that arrive while the model is loaded wait."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    where = f"{settings.host} port {settings.port}"
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # Python adds the address
        raise SettingError(
            f"cannot listen on {where}: {why}; choose another --port (0 takes a free one) or --host"
        ) from error


def _run(
    load: Callable[[], Loaded],
    name: str,
    settings: config.ServerSettings,
    limits: dict[str, Any],
    listener: socket.socket,
    ranks: RankGroup | None,
    *,
    preload: bool,
) -> None:
    """Load, print the banner, and serve until told to stop, or until the engine dies."""
    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock.cli.banner import banner
    from penstock.cli.engines import make_engine
    from penstock.server.app import Server
    from penstock.server.parsing import check_names
    from penstock.server.service import Service

    check_names(settings.tool_parser, settings.reasoning_parser)
    console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
    waiting = console.status(f"loading {name} ...") if console.is_terminal else nullcontext()
    with waiting:
        loaded = load()
        engine = make_engine(loaded, group=ranks, **limits)
        engine.bound_process()
        if preload:
            engine.preload()
    with engine:
        service = Service(engine, loaded.tokenizer, settings, name, sampling=loaded.sampling)
        server = Server(service)
        for line in banner(
            engine,
            name,
            settings,
            listener.getsockname()[1],
            ranks,
            loaded.weights_note,
            service.context_tokens,
        ):
            console.print(line, soft_wrap=True)
        sys.stdout.flush()
        gc.collect()
        gc.freeze()  # the model stays: no collection need look at it again
        give_back_freed_memory()  # of loading, and of the trials that tell an engine its bytes
        server.run(sockets=[listener])
    if server.dead:
        print("penstock: the engine has died; see above", file=sys.stderr)
        raise typer.Exit(1)
