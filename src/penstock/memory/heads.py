"""Multi-token heads (MTP) in folders: their weights by name, and the model types that have them."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import ModelError

HEADED_TYPES = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next"})
"""Model types whose heads are read."""
SPLIT_TYPES = frozenset({"qwen3_5_mtp"})
"""Model types of folders that have a head alone, as mlx-vlm splits them off."""
PREFIX = "mtp."
_HEAD = re.compile(r"(?:^|\.)mtp\.")


def is_of_head(name: str) -> bool:
    """Return whether a weight belongs to a multi-token head; mlx-lm's classes leave it out.

    >>> is_of_head("mtp.layers.0.mlp.up_proj.weight")
    True
    >>> is_of_head("model.layers.0.mlp.up_proj.weight")
    False
    """
    return _HEAD.search(name) is not None


def no_head(source: str | Path) -> ModelError:
    known = ", ".join(sorted(HEADED_TYPES))
    return ModelError(
        f"{source} has no multi-token head (mtp) that is read; folders of {known} have one as "
        f"their makers published them, and most conversions leave it out"
    )
