"""A model's config.json: the one place that reads it, and refuses what no model has."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.regular_files import read_text

MOST_LAYERS = 4_096
"""Largest count of layers, blocks or experts; loaders make an object for each."""
_REPEATED = re.compile(r"(^|_)(layers?|blocks|experts?)$")


def read_config(file: Path) -> dict[str, Any]:
    """Read and check a config.json; FileNotFoundError and ModelError pass through."""
    try:
        values = json.loads(read_text(file))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{file} is not a readable JSON file: {why}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    check_config(values, str(file))
    return values


def check_config(values: Mapping[str, Any], name: str) -> None:
    """Refuse layer counts so large that building the model would exhaust memory."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_config(value, name)
        elif _REPEATED.search(key) and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(
                f"{name}: {key} is {value:,}, more than the {MOST_LAYERS:,} of a model"
            )
