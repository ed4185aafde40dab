"""Settings from a TOML file, whose values become the defaults of flags."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from penstock.cli.options import WITHOUT_VALUE
from penstock.errors import SettingError
from penstock.regular_files import read_text


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Option callback that uses a TOML file's values as defaults of the flags."""
    if file is not None and not context.resilient_parsing:
        flags = {str(parameter.name): parameter for parameter in context.command.params}
        read = _switched(read_toml(file, flags))
        for name, value in read.items():
            if getattr(flags[name], "multiple", False) and not isinstance(value, list):
                read[name] = [value]
        context.default_map = {**(context.default_map or {}), **read}
    return file


def _switched(read: dict[str, Any]) -> dict[str, Any]:
    """Replace booleans of flags with an optional value: true by that value, false by nothing."""
    values = {flag[2:].replace("-", "_"): value for flag, value in WITHOUT_VALUE.items()}
    switches = {name for name in values if isinstance(read.get(name), bool)}
    on = {name: values[name] for name in switches if read[name]}
    return {name: value for name, value in read.items() if name not in switches} | on


def toml_of(flag: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(file.expanduser()))
    except OSError as error:
        raise SettingError(f"{flag} {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{flag} {file} is not TOML: {error}") from error


def read_toml(file: Path, names: Iterable[str]) -> dict[str, Any]:
    content = toml_of("--config", file)
    known = set(names) - {"config_file"}
    unknown = [key for key in content if key.replace("-", "_") not in known]
    if unknown:
        raise SettingError(
            f"--config {file} has unknown keys: {', '.join(unknown)}; "
            "a key is a flag's name, such as max-kv-size"
        )
    nested = [key for key, value in content.items() if isinstance(value, dict)]
    if nested:
        raise SettingError(f"--config {file}: {', '.join(nested)} must be a value, not a table")
    return {key.replace("-", "_"): value for key, value in content.items()}
