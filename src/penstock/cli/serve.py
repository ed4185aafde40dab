"""`penstock serve`: the HTTP server with OpenAI- and Anthropic-compatible APIs."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from penstock import config
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli import serve_options as flags
from penstock.cli.group import check_same, joined
from penstock.cli.log_setup import set_up_logs
from penstock.cli.reload import ReloadedFile, reload_on_hangup
from penstock.cli.serve_several import (
    check_encoder,
    check_several,
    lone_encoder,
    name_of,
    serve_several,
    table_models,
)
from penstock.cli.settings_options import with_settings
from penstock.cli.start_progress import StartProgress
from penstock.errors import ModelError, SettingError
from penstock.extensions import extension
from penstock.models.recommended import RECOMMENDED, downloaded

if TYPE_CHECKING:
    from penstock.engine.ranks.process_group import RankGroup
    from penstock.models.mlx_lm import Loaded
    from penstock.server.app import Server

ALONE = (
    "--pipeline divides a model among several processes; start them with mlx.launch (mlx.launch -n "
    "2 -- penstock serve ...)"
)
BACKLOG = 1_024
STOPPING = (signal.SIGINT, signal.SIGTERM)
_ORIGIN = re.compile(r"\*|https?://[^/?#\s]+")


@with_settings
def serve(
    context: typer.Context,
    model: flags.ServedModel = flags.EMBEDDED,
    more_models: flags.MoreModels = None,
    models_file: flags.ModelsFile = None,
    any_model_name: flags.AnyModelName = False,
    config_file: flags.ConfigFile = None,
    model_name: flags.ModelName = None,
    chat_template: flags.ChatTemplate = None,
    adapter: flags.Adapter = None,
    weights_dtype: options.WeightsDtype = "auto",
    model_source: options.ModelSource = "auto",
    *,
    server: flags.Server,
    engine: flags.Engine,
    ssd_preload: flags.SSDPreload = False,
    pipeline: flags.Pipeline = False,
    in_ray: flags.InRay = False,
    fleet: flags.Fleet,
) -> None:
    """Serve one or several models through OpenAI's and Anthropic's APIs.

    Common prefixes of prompts are computed and stored once, within --memory-limit. The first
    SIGTERM or Ctrl-C lets open answers finish; the second ends them with an error. Exits with 1 if
    the engine has died.
    """
    settings = config.parse(config.ServerSettings, **server)
    _check_origins(settings)
    _check_endpoint(settings.otlp_traces_endpoint)
    cache_folder = engine.get("ssd_cache_dir")
    adapters = options.adapter_folders(adapter)
    options.check_text("--system", settings.system or "")
    for flag, value in (("--session-dir", settings.session_dir), ("--ssd-preload", ssd_preload)):
        if value and cache_folder is None:
            raise SettingError(f"{flag} needs --ssd-cache-dir: it uses the blocks there")
    _check_reach(settings)
    if settings.keys is not None:
        config.read_keys(settings.keys)  # to report errors before the model is loaded
    limits = _checked_limits(model, engine)
    _check_template(chat_template, in_ray)
    set_up_logs(settings)
    options.warn_of_slow_blas(load_blas())
    reloaded = None if config_file is None else ReloadedFile(config_file, context)
    several_given = bool(more_models) or models_file is not None
    encoder = None if several_given else lone_encoder(model, model_name)
    if encoder is not None:
        check_encoder(
            encoder,
            pipeline=pipeline,
            ray=in_ray,
            ssd_preload=ssd_preload,
            session_dir=settings.session_dir,
            chat_template=chat_template,
        )
        with _listening(settings) as listener:
            serve_several(
                [encoder],
                settings,
                limits,
                listener,
                _stopped_by_signals,
                any_name=True,
                reloaded=reloaded,
            )
        return
    if several_given:
        check_several(
            model_name=model_name,
            adapter=adapters,
            pipeline=pipeline,
            ray=in_ray,
            ssd_preload=ssd_preload,
            session_dir=settings.session_dir,
        )
        options.check_writable("--ssd-cache-dir", cache_folder)
        given = [] if models_file is not None and model == flags.EMBEDDED else [model]
        read = partial(
            table_models,
            [*given, *(more_models or [])],
            models_file,
            weights_dtype=weights_dtype,
            model_source=model_source,
            chat_template=chat_template,
        )
        several = read()
        with _listening(settings) as listener:
            serve_several(
                several,
                settings,
                limits,
                listener,
                _stopped_by_signals,
                any_name=any_model_name,
                reloaded=reloaded,
                read=None if models_file is None else read,
            )
        return
    name = model_name or name_of(model)
    if in_ray:
        if pipeline:
            raise SettingError(ALONE)
        if adapters:
            raise SettingError("--adapter does not work with --ray; remove one of them")
        replicas = config.parse(config.FleetSettings, **fleet)
        run_in_ray = _check_ray(settings)
        limit = limits.get("memory_limit")
        mtp = options.head_of(limits)
        options.check_weights(model, weights_dtype, limit, model_source=model_source, mtp=mtp)
        return run_in_ray(
            model,
            name,
            settings,
            limits,
            replicas,
            preload=ssd_preload,
            weights_dtype=weights_dtype,
            model_source=model_source,
        )
    _check_fleet(fleet)
    options.check_writable("--session-dir", settings.session_dir)
    options.check_writable("--ssd-cache-dir", cache_folder)
    with joined() as ranks:
        load = partial(
            _load,
            model,
            name,
            limits,
            ranks,
            pipeline=pipeline,
            weights_dtype=weights_dtype,
            model_source=model_source,
            chat_template=chat_template,
            adapters=adapters,
        )
        if ranks is not None:
            _check_alone(
                ssd_preload=ssd_preload, session_dir=settings.session_dir, adapter=adapters
            )
            ranks.check_equal("--pipeline", pipeline)
            if not ranks.leads:
                _follow(load, limits, ranks)
                return
        elif pipeline:
            raise SettingError(ALONE)
        with _listening(settings) as listener:
            embedded = model == flags.EMBEDDED
            others = _downloaded_lines if embedded else list
            _run(
                load,
                name,
                settings,
                limits,
                listener,
                ranks,
                others,
                preload=ssd_preload,
                reloaded=reloaded,
            )


def _downloaded_lines() -> list[str]:
    names = [name for name in RECOMMENDED if downloaded(name) is not None]
    if not names:
        return []
    return [f"others   downloaded are {', '.join(names)}: penstock serve {names[-1]}"]


def _checked_limits(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    limits = settings | options.engine_size(
        model, {name: settings[name] for name in ("memory_limit", "block_size") if name in settings}
    )
    options.check_folder_limit(limits["ssd_cache_limit"])
    options.check_codec_settings(limits)
    options.check_tiers(config.parse(config.EngineSettings, **{**limits, "memory_limit": 1}))
    return limits


def _check_template(template: str | None, in_ray: bool) -> None:
    if template is not None and in_ray:
        raise SettingError(
            "--chat-template does not work with --ray, whose router also renders prompts; put the "
            "template into chat_template.jinja in the model's folder"
        )
    options.check_template(template)


def _check_alone(**flags: object) -> None:
    for flag, value in flags.items():
        if value:
            raise SettingError(
                f"--{flag.replace('_', '-')} does not work with a model on several machines, each "
                f"of which has its own folders; remove it"
            )


def _follow(load: Callable[[], Loaded], limits: dict[str, Any], ranks: RankGroup) -> None:
    from penstock.engine.engine import follow

    loaded = load()
    follow(loaded.model, loaded.tokenizer, ranks, **limits)


def _load(
    model: str,
    name: str,
    limits: dict[str, Any],
    ranks: RankGroup | None,
    *,
    pipeline: bool,
    weights_dtype: config.WeightsDtype,
    model_source: config.ModelSource,
    chat_template: str | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Loaded:
    from penstock.models.mlx_lm import load_part

    if ranks is None:
        limit = limits.get("memory_limit")
        mtp = options.head_of(limits)
        loaded = options.load_quietly(model, weights_dtype, limit, model_source, adapters, mtp=mtp)
    else:
        if model_source == "mlx-vlm":
            raise SettingError(
                "--model-source mlx-vlm does not work with a model on several machines, which only "
                "mlx-lm supports; remove it"
            )
        options.check_weights(model, "native", limits.get("memory_limit"), ranks.size)
        loaded = load_part(model, ranks.group, pipeline=pipeline)
    options.use_template(loaded, chat_template)
    if not loaded.tokenizer.eos_token_ids:
        raise ModelError(f"{name} has no token that ends an answer")
    if ranks is not None:
        check_same(ranks, loaded.config, limits)
    return loaded


def _check_origins(settings: config.ServerSettings) -> None:
    """Raise SettingError for origins without the form that browsers send, scheme://host[:port].

    Without a key, `*` is refused, as any page could read cached prompts.
    """
    if "*" in settings.cors_origin and not settings.needs_key:
        raise SettingError(
            "--cors-origin '*' without a key lets every page that is open in a browser here read "
            "all prompts and answers in the cache; set the page's origin, or set PENSTOCK_API_KEY"
        )
    for origin in settings.cors_origin:
        if not _ORIGIN.fullmatch(origin):
            raise SettingError(
                f"--cors-origin {origin} is not an origin; write it as https://host or "
                "http://host:port, without a path, or * for all"
            )


def _check_endpoint(endpoint: str | None) -> None:
    """Raise SettingError for an endpoint of traces that is no URL with a host."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise SettingError(
            f"--otlp-traces-endpoint {endpoint} is not a URL with a host; write it as "
            "http://127.0.0.1:4318/v1/traces"
        )


def _check_reach(settings: config.ServerSettings) -> None:
    if not settings.needs_key and not settings.on_loopback:
        raise SettingError(
            f"--host {settings.host} can be reached from other machines; set PENSTOCK_API_KEY (or "
            f"--api-key, or --keys), or listen on {config.HOST}"
        )


def _check_fleet(fleet: dict[str, Any]) -> None:
    usual = config.FleetSettings()
    for name, value in fleet.items():
        if value != getattr(usual, name):
            flag = config.flag_of(config.FleetSettings, name)
            raise SettingError(f"--{flag} needs --ray: without it there is only one server")


def _check_ray(settings: config.ServerSettings) -> Callable[..., None]:
    """Return the plug-in that runs replicas, after checks that Ray would make too late."""
    run: Callable[..., None] | None = extension("ray")
    if run is None or find_spec("ray") is None:
        raise SettingError("--ray needs Ray: pip install 'ray[serve]'")
    if settings.port == 0:
        raise SettingError("--ray needs a fixed --port: Ray's proxies cannot choose a free one")
    if "RAY_ADDRESS" not in os.environ:  # else a running Serve may use the port
        _listening(settings).close()  # raises SettingError if the port is in use
    return run


def _listening(settings: config.ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    where = f"{settings.host} port {settings.port}"
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # Python adds the address
        raise SettingError(
            f"cannot listen on {where}: {why}; choose another --port (0 for any free one) or --host"
        ) from error


@contextmanager
def _stopped_by_signals(server: Server) -> Iterator[None]:
    before = {number: signal.signal(number, server.handle_exit) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    load: Callable[[], Loaded],
    name: str,
    settings: config.ServerSettings,
    limits: dict[str, Any],
    listener: socket.socket,
    ranks: RankGroup | None,
    others: Callable[[], list[str]],
    *,
    preload: bool,
    reloaded: ReloadedFile | None,
) -> None:
    # mlx-lm takes a second to import, and --help and wrong flags do not need it.
    from penstock.cli.banner import banner, print_banner
    from penstock.cli.engines import freeze_loaded, make_engine
    from penstock.server.app import Server, create_app
    from penstock.server.parsing.formats import check_names
    from penstock.server.service import Service

    check_names(settings.tool_parser, settings.reasoning_parser)
    console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
    with StartProgress(console, f"loading {name}", quiet=settings.log_format == "json"):
        loaded = load()
        engine = make_engine(loaded, group=ranks, **limits)
        engine.bound_process()
        if preload:
            engine.preload()
    with engine:
        service = Service(engine, loaded.tokenizer, settings, name, sampling=loaded.sampling)
        server = Server(service, create_app(service))

        def reload() -> None:
            service.access.reload()
            if reloaded is not None:
                reloaded.reload(service.settings, service.change, engine.set_limit)

        with _stopped_by_signals(server):
            lines = banner(
                engine,
                name,
                settings,
                listener.getsockname()[1],
                ranks,
                loaded.weights_note,
                service.context_tokens,
                chats=loaded.tokenizer.has_chat_template,
            )
            print_banner(console, [*lines, *others()])
            sys.stdout.flush()
            freeze_loaded()
            if settings.keys is not None or reloaded is not None:
                reload_on_hangup(reload)
            server.run(sockets=[listener])
    if server.dead:
        print("penstock: the engine has died; see above", file=sys.stderr)
        raise typer.Exit(1)
