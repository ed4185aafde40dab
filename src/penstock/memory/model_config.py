"""Reading and checking of a model's config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.regular_files import read_text

MOST_LAYERS = 4_096
"""Maximum number of layers, blocks or experts; loaders create an object for each."""
_REPEATED = re.compile(r"(^|_)(layers?|blocks|experts?)$")


def read_config(file: Path) -> dict[str, Any]:
    """Read and check a config.json; FileNotFoundError if missing, ModelError if invalid."""
    try:
        values = json.loads(read_text(file))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{file} is not a readable JSON file: {why}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    check_config(values, str(file))
    return values


def check_config(values: Mapping[str, Any], name: str) -> None:
    """Raise ModelError for layer counts with which building the model would exhaust memory."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_config(value, name)
        elif _REPEATED.search(key) and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(
                f"{name}: {key} is {value:,}, more than the maximum of {MOST_LAYERS:,}"
            )
