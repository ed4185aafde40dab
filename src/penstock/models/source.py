"""Validation of a model's path or name before loading, and one-line error messages."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ModelError
from penstock.memory.model_config import read_config
from penstock.models import named
from penstock.regular_files import check_regular, read_text

logger = logging.getLogger(__name__)

TEXTS = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".jsonl"})
"""Suffixes of files that loaders read into memory as a whole."""
MOST_TEXT_BYTES = 512 << 20
"""Maximum size of these files in bytes; real vocabularies have tens of megabytes."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of `generation_config.json` that are used; they are fields of `engine.request.Sampling`."""


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """Library whose classes load a model, and the reason for the choice."""

    name: Literal["mlx-lm", "mlx-vlm"]
    why: str


MLX_LM = SourceChoice("mlx-lm", "the default")


def checked_source(path_or_name: str | Path) -> str:
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        for needed in ("config.json", "model*.safetensors"):
            if not any(folder.glob(needed)):
                raise ModelError(f"{folder} is not a model folder: it has no {needed}")
        if not any(folder.glob("tokenizer*")):
            raise ModelError(f"{folder} is not a complete model folder: it has no tokenizer files")
        _check_files(folder)
        return str(folder)
    name = str(path_or_name)
    if folder.exists():
        raise ModelError(
            f"{name} is a file; a model is a folder, a .gguf file or a name like owner/model"
        )
    if folder.suffix == ".gguf":
        raise ModelError(f"there is no file {name}")
    if not is_hub_name(name):
        raise unknown_model(name)
    return name


def is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and name[0] not in "./~"


def unknown_model(name: str) -> ModelError:
    """Return the error about a name that is neither a path, nor known, nor one of the hub."""
    return ModelError(
        f"there is no folder {name}, and no model of that name; penstock models lists names, and a "
        f"hub name has the form owner/model"
    )


def _check_files(folder: Path) -> None:
    """Raise ModelError if a folder has pipes, devices, huge text files, or an invalid config.

    Loaders would block on a pipe forever, and read from a device until memory is full.
    """
    for file in (*folder.glob("*"), *folder.glob("*/*")):
        if file.exists() and not file.is_dir():
            is_text = file.suffix in TEXTS
            try:
                check_regular(file, MOST_TEXT_BYTES if is_text else None)
            except OSError as error:
                raise ModelError(f"cannot read {file}: {error.strerror}") from error
    read_config(folder / "config.json")


def read_object(source: str | Path, name: str) -> dict[str, Any]:
    file = find_file(source, name)
    if file is None:
        return {}
    try:
        content: Any = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("ignoring %s, which cannot be read: %s", file, error)
        return {}
    return content if isinstance(content, dict) else {}


def read_generation_config(source: str | Path) -> dict[str, float]:
    """Return the sampling settings in a model's `generation_config.json`."""
    content = read_object(source, "generation_config.json")
    sampling = {name: content[name] for name in SAMPLING if _is_number(content.get(name))}
    if content.get("do_sample") is False:
        sampling = {**sampling, "temperature": 0.0}
    return sampling


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def find_file(source: str | Path, name: str) -> Path | None:
    """Return a file in a model's folder or in the hub's cache; None if it is missing."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        file = folder / name
        return file if file.is_file() else None
    if folder.exists():
        return None
    # Imported here because the hub client is slow to import, and a folder does not need it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(source), name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def not_downloaded(source: str, error: BaseException) -> ModelError:
    """Return the error about a hub name whose files are not here, and cannot be fetched now."""
    absent = f"there is no folder {source}, it is not downloaded, and"
    if named.is_offline():
        return ModelError(
            f"{absent} {named.OFFLINE} forbids downloads; run once without --offline: "
            f"penstock pull {source}"
        )
    return ModelError(
        f"{absent} {not_reached(error)}; check the network, or use a model that is on this "
        f"machine: penstock models lists them"
    )


def not_reached(error: BaseException) -> str:
    """Return a text that the hub cannot be reached, with the cause but no names of classes."""
    from huggingface_hub import constants  # as in `find_file`

    cause = str(error.__cause__ or "").partition("\n")[0]
    return f"{constants.ENDPOINT} cannot be reached{f' ({cause})' if cause else ''}"


def first_line(error: BaseException) -> str:
    r"""Return an error's class and first line; lines that end in a colon are joined with the next.

    >>> first_line(ValueError("validator 'heads':\n    12 is not a multiple of 5\nmore"))
    "ValueError: validator 'heads': 12 is not a multiple of 5"
    >>> first_line(KeyError("model_type"))
    'config.json has no model_type'
    """
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        return f"config.json has no {error.args[0]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    end = next(
        (index for index, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1
    )
    return f"{type(error).__name__}: {' '.join(lines[: end + 1])}"
