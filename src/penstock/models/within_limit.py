"""Loading a model inside a memory limit, which decides whether its weights become float32."""

from __future__ import annotations

from pathlib import Path

from penstock.config import WeightsDtype
from penstock.kv import backend
from penstock.memory import parse_bytes
from penstock.models.mlx_lm import Loaded, load_all


def load_within(
    path_or_name: str | Path, weights_dtype: WeightsDtype, memory_limit: str | int | None = None
) -> Loaded:
    """Load a model as `load_all` does, for an engine of this memory limit.

    Args:
        path_or_name: as `load_all`.
        weights_dtype: as `load_all`.
        memory_limit: bytes, or a text like "16GB"; None takes the machine's default.

    Raises:
        ModelError: as `load_all`.
        SettingError: the limit is not a size.
    """
    limit = backend.machine_memory().default_limit_bytes
    if memory_limit is not None:
        limit = parse_bytes(memory_limit)
    return load_all(path_or_name, weights_dtype=weights_dtype, limit_bytes=limit)
