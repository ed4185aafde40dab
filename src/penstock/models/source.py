"""Checks of a model's path or name before it is loaded, and its errors in one line."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ModelError


def checked_source(path_or_name: str | Path) -> str:
    """Return the folder or hub name to load, after the checks that need no loading."""
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        for needed in ("config.json", "model*.safetensors"):
            if not any(folder.glob(needed)):
                raise ModelError(f"{folder} is not a model folder: it has no {needed}")
        if not any(folder.glob("tokenizer*")):
            raise ModelError(f"{folder} is not a complete model folder: it has no tokenizer files")
        return str(folder)
    name = str(path_or_name)
    if folder.exists():
        raise ModelError(
            f"{name} is a file; a model is a folder, a .gguf file or a name like owner/model"
        )
    if folder.suffix == ".gguf":
        raise ModelError(f"there is no file {name}")
    if name.count("/") != 1 or name[0] in "./~":
        raise ModelError(f"there is no folder {name}; a hub name has the form owner/model")
    return name


def first_line(error: BaseException) -> str:
    r"""Return an error's class and its first line, with the lines that a colon announces.

    >>> first_line(ValueError("validator 'heads':\n    12 is no multiple of 5\nmore"))
    "ValueError: validator 'heads': 12 is no multiple of 5"
    >>> first_line(KeyError("model_type"))
    'config.json has no model_type'
    """
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        return f"config.json has no {error.args[0]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    end = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return f"{type(error).__name__}: {' '.join(lines[: end + 1])}"
