"""`penstock serve` with several models: a pool of models behind one address."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from penstock import __version__, config
from penstock.cli import options
from penstock.cli.banner import url_of
from penstock.cli.model_table import TableModel, name_of, table_models
from penstock.cli.reload import ReloadedFile, ReloadedTable, reload_on_hangup
from penstock.errors import ModelError, SettingError
from penstock.memory.sizes import format_bytes
from penstock.models.encoder_types import ENCODER_NOTE, WRITING
from penstock.plurals import counted

if TYPE_CHECKING:
    from penstock.models.mlx_lm import Loaded
    from penstock.pool.open_model import PoolMember
    from penstock.server.app import Server

__all__ = [
    "check_encoder",
    "check_several",
    "lone_encoder",
    "name_of",
    "serve_several",
    "table_models",
]


def check_several(**flags: object) -> None:
    """Raise SettingError for flags that work only with a single model."""
    for flag, value in flags.items():
        if value:
            raise SettingError(
                f"--{flag.replace('_', '-')} does not work with several models; serve one, or "
                f"remove it"
            )


def lone_encoder(model: str, name: str | None) -> TableModel | None:
    """Return the table entry of the only model if it is an encoder, else None."""
    table = TableModel(
        name=name or name_of(model), path=model, pin=True, weights_dtype="auto", model_source="auto"
    )
    return None if table.kinds == WRITING else table


def check_encoder(encoder: TableModel, **flags: object) -> None:
    """Raise SettingError for flags that work only with a text-generating model."""
    for flag, value in flags.items():
        if value:
            raise SettingError(
                f"--{flag.replace('_', '-')} does not work with {encoder.name}: {ENCODER_NOTE}; "
                f"remove the flag"
            )


def serve_several(
    models: Sequence[TableModel],
    settings: config.ServerSettings,
    limits: dict[str, Any],
    listener: socket.socket,
    stopped_by_signals: Callable[[Server], AbstractContextManager[None]],
    *,
    any_name: bool,
    reloaded: ReloadedFile | None,
    read: Callable[[], Sequence[TableModel]] | None = None,
) -> None:
    """Serve models; SIGHUP calls `read` for their new settings."""
    # As in `serve`: mlx-lm takes a second to import.
    from penstock.engine.settings import checked
    from penstock.models.loading import check_model
    from penstock.pool.model_pool import ModelPool
    from penstock.server.app import Server
    from penstock.server.attached_models import ServedModel
    from penstock.server.parsing.formats import check_names
    from penstock.server.prompt_memory import share_of
    from penstock.server.several_models import SeveralModels

    limit_bytes = checked({"memory_limit": limits.get("memory_limit")}).memory_limit
    served = []
    for model in models:
        check_model(model.path)
        own = _own(model, settings)
        check_names(own.tool_parser, own.reasoning_parser)
        adapters = tuple(model.adapters)
        served.append(ServedModel(model.name, own, model.aliases, adapters, model.kinds))
    prompt_bytes = share_of(limit_bytes)
    several = SeveralModels(served, settings, prompt_bytes=prompt_bytes, any_name=any_name)
    with ModelPool(
        [_spec(model, limits) for model in models],
        limit_bytes,
        aside_bytes=prompt_bytes,
        opened=several.opened,
        closing=several.closing,
        stuck=several.stuck,
    ) as several.pool:
        server = Server(several, several.app())
        table = None if read is None else ReloadedTable(models, read)

        def change(changed: config.ServerSettings) -> None:
            now = models if table is None else table.models
            several.change(changed, {model.name: _own(model, changed) for model in now})

        def reload() -> None:
            several.access.reload()
            if table is not None:
                table.reload()
                change(several.settings)
            if reloaded is not None:
                pool = several.pool
                reloaded.reload(several.settings, change, lambda n: pool.set_limit(n).result())

        with stopped_by_signals(server):
            console = Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty())
            for line in _lines(models, settings, limit_bytes, listener.getsockname()[1]):
                console.print(line, soft_wrap=True)
            sys.stdout.flush()
            if settings.keys is not None or reloaded is not None or table is not None:
                reload_on_hangup(reload)
            for model in models:
                if model.pin:
                    several.pool.load(model.name)
            server.run(sockets=[listener])


def _own(model: TableModel, settings: config.ServerSettings) -> config.ServerSettings:
    return settings.model_copy(update=model.answering)


def _spec(model: TableModel, limits: dict[str, Any]) -> PoolMember:
    from penstock.encoders import decoder_embedder
    from penstock.models.loading import expected_bytes
    from penstock.pool.open_model import PoolMember

    common = {key: value for key, value in limits.items() if key != "memory_limit"}
    settings = common | model.engine
    if model.kinds != WRITING:
        how = model.path, model.weights_dtype
        return PoolMember(
            name=model.name,
            load=partial(decoder_embedder.load_any_encoder, *how),
            expected_bytes=partial(decoder_embedder.expected_any_bytes, *how),
            encodes=True,
            settings=settings,
            pinned=model.pin,
            ttl_seconds=model.ttl_seconds,
        )

    mtp = options.head_of(settings)

    def expected(limit_bytes: int) -> int:
        how = model.weights_dtype, limit_bytes, model.model_source, model.adapters
        return expected_bytes(model.path, *how, mtp=mtp)

    return PoolMember(
        name=model.name,
        load=partial(_load, model, mtp=mtp),
        expected_bytes=expected,
        settings=settings,
        pinned=model.pin,
        ttl_seconds=model.ttl_seconds,
    )


def _load(model: TableModel, limit_bytes: int, *, mtp: str | None) -> Loaded:
    how = model.weights_dtype, limit_bytes, model.model_source, model.adapters
    loaded = options.load_quietly(model.path, *how, mtp=mtp)
    options.use_template(loaded, model.chat_template)
    if not loaded.tokenizer.eos_token_ids:
        raise ModelError(f"{model.name} has no token that ends an answer")
    return loaded


def _lines(
    models: Sequence[TableModel], settings: config.ServerSettings, limit_bytes: int, port: int
) -> list[str]:
    url = url_of(settings, port)
    of_all = " for all of them" if len(models) > 1 else ""
    lines = [
        f"penstock {__version__} serves {counted(len(models), 'model')} on {url}",
        f"memory   limit {format_bytes(limit_bytes)}{of_all}; loaded on demand",
    ]
    for model in models:
        notes = [*model.aliases, *(["pinned"] if model.pin else [])]
        notes += [] if model.kinds == WRITING else [f"encoder: {', '.join(model.kinds)}"]
        notes += [] if model.ttl_seconds is None else [f"ttl {model.ttl_seconds:.0f} s"]
        lines.append(f"model    {model.name}" + (f"  ({', '.join(notes)})" if notes else ""))
    key = "needed" if settings.needs_key else "none: programs on this machine only"
    return [*lines, f"key      {key}", f"models   {url}/v1/models   (interfaces: {url}/docs)"]
