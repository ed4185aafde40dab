"""Named API keys, read from a TOML file with one table per key."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.config.setting import in_plain_words
from penstock.errors import SettingError

MAX_FILE_BYTES = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ApiKey(BaseModel):
    """API key of a client, of which only the SHA-256 is stored.

    >>> ApiKey(name="alice", sha256=digest_of(b"secret"), requests_per_minute=60).salt
    'alice'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name in metrics and logs; empty for the key of `--api-key`."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    requests_per_minute: Annotated[int | None, Field(ge=1)] = None
    tokens_per_minute: Annotated[int | None, Field(ge=1)] = None
    """Limit on tokens of prompts and answers per minute."""
    salt: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=256, repr=False)] = ""
    """Cache salt of the key's requests; defaults to the name. Different salts share no prefixes."""
    admin: bool = False
    """Whether clients with this key may see and change cache entries of other keys."""

    @model_validator(mode="before")
    @classmethod
    def _salted_by_its_name(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {"salt": fields.get("name", ""), **fields}


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Read a key file that only its owner can access; errors quote no key and no path."""
    try:
        content = tomllib.loads(_private_text(file.expanduser()))
    except OSError as error:
        raise SettingError(f"--keys: the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingError("--keys: the file is not TOML: its text is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        # The message has a position, and at most one character of the file.
        raise SettingError(f"--keys: the file is not TOML: {error}") from None
    keys = tuple(_key(name, table) for name, table in content.items())
    if not keys:
        raise SettingError("--keys: the file has no keys; write a table [NAME] for each")
    names: dict[str, str] = {}
    for key in keys:
        if (other := names.setdefault(key.sha256, key.name)) != key.name:
            raise SettingError(f"--keys: {other} and {key.name} have the same key")
    return keys


def _private_text(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SettingError("--keys: this is not a regular file")
        if mode := stat.S_IMODE(status.st_mode) & 0o077:
            raise SettingError(
                f"--keys: other users can read or change the file (mode "
                f"{stat.S_IMODE(status.st_mode):04o}, of which {mode:04o} is too much); chmod 600"
            )
        raw = opened.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise SettingError(f"--keys: the file is larger than {MAX_FILE_BYTES:,} bytes")
    return raw.decode()


def _key(name: str, table: Any) -> ApiKey:
    if not isinstance(table, dict):
        raise SettingError(f"--keys: {_shown(name)} must be a table: [NAME], then key = ...")
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"--keys: {_shown(name)} is not a valid name; use 1 to 64 letters, digits, dots, - "
            f"and _"
        )
    values = {**table, "name": name}
    if "name" in table:
        raise SettingError(f"--keys: {name}: the table's own name is the key's")
    if ("key" in values) == ("sha256" in values):
        raise SettingError(f"--keys: {name}: give either key or sha256")
    if "key" in values:
        key = values.pop("key")
        if not isinstance(key, str) or not key:
            raise SettingError(f"--keys: {name}: key must be a text that is not empty")
        values["sha256"] = digest_of(key.encode())
    elif isinstance(values["sha256"], str):
        values["sha256"] = values["sha256"].lower()
    try:
        return ApiKey(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingError(
            f"--keys: {name}: {_shown(where)}: {in_plain_words(first['msg'])}"
        ) from None


def _shown(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:64]}..."
