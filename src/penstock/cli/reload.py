"""Reload of a running server's settings: SIGHUP rereads --keys, --config and --models."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from penstock import config
from penstock.cli.model_table import TableModel
from penstock.cli.settings_file import read_toml
from penstock.cli.settings_options import size_bytes
from penstock.errors import PenstockError, SettingError

logger = logging.getLogger(__name__)
notices = logging.getLogger(config.NOTICES)

CHANGEABLE = {
    name.removesuffix("_seconds"): name
    for name in (
        "max_tokens",
        *config.SAMPLED,
        "request_timeout_seconds",
        "drain_timeout_seconds",
    )
}
"""Fields of `ServerSettings` that can change while the server runs, by the name of their flag."""
LIMIT = "memory_limit"


class ReloadedFile:
    """The --config file of a running server. Flags and environment variables take precedence.

    Args:
        file: the file, which was read once for the flags' defaults.
        context: the context of the command, from which the source of each value is known.
    """

    def __init__(self, file: Path, context: typer.Context) -> None:
        self._file = file
        self._names = [str(parameter.name) for parameter in context.command.params]
        sources = {name: context.get_parameter_source(name) for name in self._names}
        self._fixed = {
            name
            for name, source in sources.items()
            if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
        }
        self._values = read_toml(file, self._names)

    def reload(
        self,
        settings: config.ServerSettings,
        change: Callable[[config.ServerSettings], None],
        set_limit: Callable[[int], None],
    ) -> None:
        """Apply changed values, and log those that take effect only after a restart.

        Args:
            settings: current settings.
            change: function that applies new settings.
            set_limit: function that applies a new memory limit; may block.
        """
        try:
            values = read_toml(self._file, self._names)
            names = {
                name
                for name in (values.keys() | self._values.keys()) - self._fixed
                if values.get(name) != self._values.get(name)
            }
            limit = values.get(LIMIT) if LIMIT in names else None
            limit_bytes = None if limit is None else size_bytes("memory-limit", str(limit))
            changed = config.parse(
                config.ServerSettings,
                **{
                    **settings.model_dump(),
                    **{CHANGEABLE[name]: _value(values, name) for name in names & {*CHANGEABLE}},
                },
            )
        except SettingError as error:
            logger.error("--config was not reloaded (%s); keeping the previous settings", error)
            return
        self._values = values
        change(changed)
        applied = names & {*CHANGEABLE}
        if limit_bytes is not None:
            # The engine answers only between steps, and a signal handler must not wait.
            threading.Thread(target=_set, args=(set_limit, limit_bytes), daemon=True).start()
            applied.add(LIMIT)
        for name in sorted(applied):
            notices.info("--%s is now %s", _flag(name), values.get(name, "the default"))
        for name in sorted(names - applied):
            logger.warning("the change of --%s takes effect after a restart", _flag(name))


class ReloadedTable:
    """Models of a running server, and the --models file with their settings.

    Args:
        models: the models that are served.
        read: function that reads them again.
    """

    def __init__(
        self, models: Sequence[TableModel], read: Callable[[], Sequence[TableModel]]
    ) -> None:
        self.models = tuple(models)
        self._read = read
        self._table = {model.name: model for model in models}

    def reload(self) -> None:
        """Update the settings of `models`, and log the changes that need a restart."""
        try:
            table = {model.name: model for model in self._read()}
        except SettingError as error:
            logger.error("--models was not reloaded (%s); keeping the previous settings", error)
            return
        before, self._table = self._table, table
        later = before.keys() ^ table.keys()
        for name in before.keys() & table.keys():
            old, new = (_changeable(models[name]) for models in (before, table))
            for key in sorted(old.keys() | new.keys()):
                if old.get(key) != new.get(key):
                    value = new.get(key, "the default")
                    notices.info("%s of %s is now %s", _flag(key), name, value)
            if _with(before[name], {}) != _with(table[name], {}):
                later.add(name)
        if later:
            names = ", ".join(sorted(later))
            logger.warning("the changes to %s in --models take effect after a restart", names)
        self.models = tuple(
            _with(model, _changeable(table[model.name])) if model.name in table else model
            for model in self.models
        )


def reload_on_hangup(reload: Callable[[], None]) -> None:
    """Call a function at SIGHUP, outside the context of the request that the signal interrupts."""
    signal.signal(signal.SIGHUP, lambda *_: Context().run(reload))


def _changeable(model: TableModel) -> dict[str, Any]:
    return {key: value for key, value in model.answering.items() if key in CHANGEABLE}


def _with(model: TableModel, changeable: dict[str, Any]) -> TableModel:
    fixed = {key: value for key, value in model.answering.items() if key not in CHANGEABLE}
    return replace(model, answering=fixed | changeable)


def _value(values: dict[str, Any], name: str) -> Any:
    return values.get(name, config.ServerSettings.model_fields[CHANGEABLE[name]].default)


def _set(set_limit: Callable[[int], None], limit_bytes: int) -> None:
    try:
        set_limit(limit_bytes)
    except PenstockError as error:
        logger.error("--memory-limit was not changed: %s", error)


def _flag(name: str) -> str:
    return name.replace("_", "-")
