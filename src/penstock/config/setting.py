"""Immutable settings, whose fields also define flags and help texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import SettingError


@dataclass(frozen=True, slots=True)
class Setting:
    help: str
    unit: str | None = None
    """Unit or kind of the value shown in help; `BYTES` accepts values like 16GB."""
    unset: str | None = None
    """Description of the default, for flags without a default value."""
    flag: str | None = None
    """Name of the flag without dashes; None derives it from the field, without `_seconds`."""
    is_flag: bool = True
    """Whether commands have a flag for it; False for limits that need no tuning."""
    is_local: bool = False
    """Whether machines that share one model may have different values."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def setting_of(kind: type[Settings], name: str) -> Setting:
    """Return the description of a settings field.

    >>> from penstock.config import EngineSettings
    >>> setting_of(EngineSettings, "max_kv_size").unit
    'TOKENS'
    """
    for annotation in kind.model_fields[name].metadata:
        if isinstance(annotation, Setting):
            return annotation
    raise TypeError(f"{kind.__name__}.{name} has no Setting: add its help and unit to the field")


def flag_of(kind: type[Settings], name: str) -> str:
    """Return the flag of a settings field, without leading dashes.

    >>> from penstock.config import EngineSettings, ServerSettings
    >>> flag_of(EngineSettings, "keep"), flag_of(ServerSettings, "request_timeout_seconds")
    ('keep-kv-size', 'request-timeout')
    """
    field = kind.model_fields.get(name)
    flag = None if field is None else setting_of(kind, name).flag
    return flag or name.removesuffix("_seconds").replace("_", "-")


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse(kind: type[SettingsT], *, flags: bool = True, **values: Any) -> SettingsT:
    """Validate settings; SettingError is one line that names the flag or the field.

    >>> from penstock.config import EngineSettings
    >>> parse(EngineSettings, memory_limit=10**9, max_kv_size=1024).max_kv_size
    1024
    >>> parse(EngineSettings, memory_limit=10**9, kernels="on")
    Traceback (most recent call last):
    penstock.errors.SettingError: --kernels on: must be 'auto' or 'off'
    """
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                near = get_close_matches(name, kind.model_fields, 1)
                raise SettingError(
                    f"{name} is not a setting" + (f"; did you mean {near[0]}?" if near else "")
                ) from None
            field = kind.model_fields.get(name)
            value = f" {first['input']}" if field is None or field.repr else ""
            if flags:
                name, message = f"--{flag_of(kind, name)}", in_plain_words(message)
            message = f"{name}{value}: {message}"
        raise SettingError(message) from None


PLAIN_WORDS = (
    (r"^Value error, ", ""),
    (r"^'.*' is not one of (.*)\.$", r"must be one of \1"),
    (r"^Input should be ", "must be "),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"a valid integer.*", "a whole number"),
    (r"a valid number.*", "a number"),
)
"""Patterns in messages of pydantic and Typer, with their replacements."""


def in_plain_words(message: str) -> str:
    """Rewrite a library's message about an invalid value in plain words.

    >>> in_plain_words("Input should be less than or equal to 65535")
    'must be at most 65535'
    """
    for pattern, words in PLAIN_WORDS:
        message = re.sub(pattern, words, message)
    return message
