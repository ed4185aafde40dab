"""`penstock serve`: the engine behind OpenAI's and Anthropic's wire formats."""

from __future__ import annotations

import gc
import json
import logging
import socket
import sys
import tomllib
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock import __version__, config, memory
from penstock.blas import load_blas
from penstock.cli import options
from penstock.cli.agents import EMBEDDED_BLOCK_SIZE, EMBEDDED_LIMIT
from penstock.errors import ModelError, SettingError
from penstock.memory import format_bytes
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    from penstock.engine.core import Core
    from penstock.engine.engine import Engine

SHOWN_LENGTHS = (1_024, 4_096, 16_384, 65_536)
"""Tokens of the sequences that the banner counts."""
BACKLOG = 1_024
"""Connections that may wait to be accepted."""
EXAMPLE = "The code of the amber falcon is 4821. What is the code of the amber falcon?"
PLANNED = {
    "hot_cache_only": "an SSD tier, which is not there yet: the cache is in memory only",
    "ssd_cache_dir": "an SSD tier, which is not there yet",
    "ssd_cache_limit": "an SSD tier, which is not there yet",
    "kv_cache_quantization": "quantized segments, which are not there yet",
    "kv_cache_min_quantize_tokens": "quantized segments, which are not there yet",
}
"""Flags whose parts do not exist, and what they would need."""


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Let the keys of a TOML file be the defaults of the flags they name."""
    if file is not None and not context.resilient_parsing:
        names = {str(parameter.name) for parameter in context.command.params}
        context.default_map = {**(context.default_map or {}), **read_toml(file, names)}
    return file


def read_toml(file: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read settings from a TOML file; a key is a flag's name, with `-` or `_`.

    Raises:
        SettingError: there is no such file, it is not TOML, or it has keys that no flag has.
    """
    try:
        content = tomllib.loads(file.expanduser().read_text())
    except OSError as error:
        raise SettingError(f"--config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--config {file} is not TOML: {error}") from error
    known = set(names) - {"config_file"}
    unknown = [key for key in content if key.replace("-", "_") not in known]
    if unknown:
        raise SettingError(
            f"--config {file} has keys that no flag has: {', '.join(unknown)}; "
            "a key is a flag's name, as max-kv-size"
        )
    nested = [key for key, value in content.items() if isinstance(value, dict)]
    if nested:
        raise SettingError(f"--config {file}: {', '.join(nested)} must be a value, not a table")
    return {key.replace("-", "_"): value for key, value in content.items()}


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of a model, or its Hugging Face name (owner/model).",
            envvar="PENSTOCK_MODEL",
            show_default="the embedded model",
        ),
    ] = str(MODEL_PATH),
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML file with settings: a key for each flag, as max-kv-size = 8192. Flags and "
            "environment win over it.",
            envvar="PENSTOCK_CONFIG",
            metavar="FILE",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name under which the model is served.",
            envvar="PENSTOCK_MODEL_NAME",
            metavar="NAME",
            show_default="its folder's name",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; any but this machine's own needs --api-key.",
            envvar="PENSTOCK_HOST",
            metavar="ADDRESS",
        ),
    ] = config.HOST,
    port: Annotated[
        int,
        typer.Option(
            help="TCP port to listen on; 0 takes a free one.",
            envvar="PENSTOCK_PORT",
            metavar="NUMBER",
            min=0,
            max=65_535,
        ),
    ] = config.PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="What clients must show, as a bearer token or in x-api-key. Other users of this "
            "machine can read flags, but not the environment.",
            envvar="PENSTOCK_API_KEY",
            metavar="TEXT",
            show_default="none",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call the server from a browser; may be repeated.",
            envvar="PENSTOCK_CORS_ORIGIN",
            metavar="ORIGIN",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Memory for everything, the weights included: 16GB is 16 x 10^9 bytes.",
            envvar="PENSTOCK_MEMORY_LIMIT",
            metavar="BYTES",
            show_default=f"{EMBEDDED_LIMIT} for the embedded model, else as penstock doctor shows",
        ),
    ] = None,
    memory_threshold: Annotated[
        float | None,
        typer.Option(
            help="Give up cold prefixes while the machine as a whole uses more than this share "
            "of its memory.",
            envvar="PENSTOCK_MEMORY_THRESHOLD",
            metavar="SHARE",
            show_default="the own limit alone counts",
        ),
    ] = None,
    max_kv_size: options.MaxKVSize = config.MAX_KV_SIZE,
    keep_kv_size: options.KeepKVSize = None,
    max_batch_size: Annotated[
        int,
        typer.Option(
            help="Run at most this many sequences at the same time.",
            envvar="PENSTOCK_MAX_BATCH_SIZE",
            metavar="NUMBER",
            min=1,
        ),
    ] = config.MAX_BATCH_SIZE,
    prefill_chunk: Annotated[
        int,
        typer.Option(
            help="Read this many tokens of prompts between two decode steps.",
            envvar="PENSTOCK_PREFILL_CHUNK",
            metavar="TOKENS",
            min=1,
        ),
    ] = config.PREFILL_CHUNK,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Share and name tokens by blocks of this many.",
            envvar="PENSTOCK_BLOCK_SIZE",
            metavar="TOKENS",
            show_default=f"{EMBEDDED_BLOCK_SIZE} for the embedded model, else {config.BLOCK_SIZE}",
            min=1,
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            help="Answers that may wait for their place; more are refused with 429.",
            envvar="PENSTOCK_MAX_QUEUE",
            metavar="NUMBER",
            min=1,
        ),
    ] = config.MAX_QUEUE,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of an answer whose request does not say how many.",
            envvar="PENSTOCK_MAX_TOKENS",
            metavar="TOKENS",
            min=1,
        ),
    ] = config.MAX_TOKENS,
    request_timeout: Annotated[
        float,
        typer.Option(
            help="From a request's arrival to its last token, at most.",
            envvar="PENSTOCK_REQUEST_TIMEOUT",
            metavar="SECONDS",
        ),
    ] = config.REQUEST_TIMEOUT_SECONDS,
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="Go on with open answers for this long when told to stop.",
            envvar="PENSTOCK_DRAIN_TIMEOUT",
            metavar="SECONDS",
        ),
    ] = config.DRAIN_TIMEOUT_SECONDS,
    hot_cache_only: Annotated[
        bool,
        typer.Option("--hot-cache-only", help="Planned.", envvar="PENSTOCK_HOT_CACHE_ONLY"),
    ] = False,
    ssd_cache_dir: Annotated[
        str | None,
        typer.Option(help="Planned.", envvar="PENSTOCK_SSD_CACHE_DIR", metavar="FOLDER"),
    ] = None,
    ssd_cache_limit: Annotated[
        str | None,
        typer.Option(help="Planned.", envvar="PENSTOCK_SSD_CACHE_LIMIT", metavar="BYTES"),
    ] = None,
    kv_cache_quantization: Annotated[
        str | None,
        typer.Option(help="Planned.", envvar="PENSTOCK_KV_CACHE_QUANTIZATION", metavar="CODEC"),
    ] = None,
    kv_cache_min_quantize_tokens: Annotated[
        int | None,
        typer.Option(
            help="Planned.", envvar="PENSTOCK_KV_CACHE_MIN_QUANTIZE_TOKENS", metavar="TOKENS"
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients.

    Prefixes that prompts share are computed once and held once, inside --memory-limit. The first
    SIGTERM or Ctrl-C lets open answers end; the second ends at once. Exit code 1 means that the
    engine has died.
    """
    _refuse_planned(
        hot_cache_only=hot_cache_only or None,
        ssd_cache_dir=ssd_cache_dir,
        ssd_cache_limit=ssd_cache_limit,
        kv_cache_quantization=kv_cache_quantization,
        kv_cache_min_quantize_tokens=kv_cache_min_quantize_tokens,
    )
    settings = config.parse(
        config.ServerSettings,
        host=host,
        port=port,
        api_key=api_key or None,
        cors_origin=tuple(cors_origin or ()),
        max_tokens=max_tokens,
        request_timeout_seconds=request_timeout,
        drain_timeout_seconds=drain_timeout,
    )
    if settings.api_key is None and not settings.on_loopback:
        raise SettingError(
            f"--host {host} can be reached from other machines; set PENSTOCK_API_KEY (or "
            f"--api-key), or listen on {config.HOST}"
        )
    embedded = Path(model).expanduser().resolve() == MODEL_PATH.resolve()
    limits = {
        "memory_limit": EMBEDDED_LIMIT if memory_limit is None and embedded else memory_limit,
        "memory_threshold": memory_threshold,
        "max_kv_size": max_kv_size,
        "keep": keep_kv_size,
        "max_batch_size": max_batch_size,
        "prefill_chunk": prefill_chunk,
        "block_size": EMBEDDED_BLOCK_SIZE if block_size is None and embedded else block_size,
        "max_queue": max_queue,
    }
    config.parse(
        config.KVSettings, max_kv_size=max_kv_size, keep_kv_size=keep_kv_size
    )  # says it in the words of the flags
    if memory_limit is not None and memory.parse_bytes(memory_limit) < 1:
        raise SettingError(f"--memory-limit {memory_limit}: nothing fits in it")
    name = model_name or _name(model)
    logging.basicConfig(level=logging.WARNING, format="penstock: %(message)s")
    options.warn_of_slow_blas(load_blas())
    with _listening(settings) as listener:
        _run(model, name, settings, limits, listener)


def _refuse_planned(**given: object) -> None:
    for flag, value in given.items():
        if value is not None:
            shown = "--" + flag.replace("_", "-")
            raise SettingError(f"{shown} needs {PLANNED[flag]}; leave it out")


def _name(model: str) -> str:
    """Return what a model is called: its folder's name, or its name at the hub."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _listening(settings: config.ServerSettings) -> socket.socket:
    """Return a socket that listens; what arrives while the model is loaded waits for it."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        ) from error


def _run(
    model: str,
    name: str,
    settings: config.ServerSettings,
    limits: dict[str, Any],
    listener: socket.socket,
) -> None:
    """Load, say what there is, and serve until told to stop, or until the engine dies."""
    # mlx-lm takes a second to import, which --help and a wrong flag need not wait for.
    from penstock.engine.engine import Engine
    from penstock.models.mlx_lm import load_all
    from penstock.server.app import Server
    from penstock.server.service import Service

    console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
    waiting = console.status(f"loading {name} ...") if console.is_terminal else nullcontext()
    with waiting:
        loaded = load_all(model)
        if not loaded.tokenizer.eos_token_ids:
            raise ModelError(f"{name} has no token that ends an answer")
        engine = Engine(loaded.model, loaded.tokenizer, **limits)
    with engine:
        service = Service(engine, loaded.tokenizer, settings, name)
        server = Server(service)
        for line in banner(engine, name, settings, listener.getsockname()[1]):
            console.print(line, soft_wrap=True)
        sys.stdout.flush()
        gc.collect()
        gc.freeze()  # the model stays: no collection need look at it again
        server.run(sockets=[listener])
    if server.dead:
        print("penstock: the engine has died; see above", file=sys.stderr)
        raise typer.Exit(1)


def banner(engine: Engine, name: str, settings: config.ServerSettings, port: int) -> list[str]:
    """Say what is served where, inside which limits, and how to ask it."""
    room = engine.later(_room).result()
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $PENSTOCK_API_KEY"'
    body = {"messages": [{"role": "user", "content": EXAMPLE}]}
    return [
        f"penstock {__version__} serves {name} on {url}",
        *room,
        "key      "
        + ("none: programs on this machine only" if settings.api_key is None else "needed"),
        f"page     {url}/   (interfaces: {url}/docs, figures: {url}/metrics)",
        f"try      curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'",
    ]


def _room(core: Core) -> list[str]:
    """Say what the limits are and what fits in them; runs on the engine's thread."""
    stats, limits = core.stats(), core.limits
    free = stats.limit_bytes - stats.used_bytes

    def needed_bytes(tokens: int) -> int:
        blocks = -(-tokens // limits.block_size)
        return tokens * core.runner.token_bytes + core.prefixes.index_bytes(blocks)

    fitting = [
        f"{count:,} of {length:,}"
        for length in SHOWN_LENGTHS
        if length <= limits.max_kv_size and (count := free // needed_bytes(length))
    ]
    tokens = free * 1_024 // needed_bytes(1_024)
    weights = stats.by_kind.get("weights", 0)
    return [
        f"memory   limit {format_bytes(stats.limit_bytes)}: weights {format_bytes(weights)}, "
        f"{format_bytes(free)} free for KV",
        f"fits     about {tokens:,} tokens of KV; in sequences: {', '.join(fitting) or 'none'}",
        f"limits   {limits.max_kv_size:,} tokens a sequence, {limits.max_batch_size} sequences at "
        f"a time, {limits.max_queue} waiting, blocks of {limits.block_size}",
    ]
