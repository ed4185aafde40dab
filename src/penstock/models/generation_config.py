"""Sampling that a model was made for, from its `generation_config.json`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = "generation_config.json"
READ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys that are read; each is a field of `engine.request.Sampling`."""


def read_generation_config(source: str | Path) -> dict[str, float]:
    """Return the sampling that a model's folder asks for; nothing where it says nothing.

    A model with `do_sample` false is greedy. End-of-sequence ids of the file are mlx-lm's to read.

    Args:
        source: a folder, or the name of a model that was fetched from the Hugging Face hub.
    """
    file = _find(source)
    if file is None:
        return {}
    try:
        given: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is passed over: %s", file, error)
        return {}
    if not isinstance(given, dict):
        return {}
    sampling = {name: given[name] for name in READ if _is_number(given.get(name))}
    if given.get("do_sample") is False:
        sampling = {**sampling, "temperature": 0.0}
    return sampling


def _find(source: str | Path) -> Path | None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        file = folder / NAME
        return file if file.is_file() else None
    if folder.exists():
        return None
    # As in `cli.plan`: the hub client is slow to import, and a folder need not wait for it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        held = try_to_load_from_cache(str(source), NAME)
    except HFValidationError:
        return None
    return Path(held) if isinstance(held, str) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
