"""Fingerprint of a model: a hash of everything except tokens that its KV depends on.

It depends on the weights themselves, not on the model's name or path.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from mlx.utils import tree_flatten


def fingerprint(model: Any, **settings: object) -> str:
    """Hash a model's weights, layers and arguments, and the version of mlx-lm.

    This covers quantization, RoPE and adapters. Reads all weights, which takes about a second per
    5 GB. `settings` are further settings that KV depends on.
    """
    hashed = xxhash.xxh3_128()
    arguments = getattr(model, "args", None)
    config = asdict(arguments) if is_dataclass(arguments) else repr(arguments)  # type: ignore[arg-type]
    words = {
        "mlx_lm": version("mlx-lm"),
        "arguments": config,
        "layers": repr(model),
        "settings": settings,
    }
    _add(hashed, json.dumps(words, sort_keys=True, default=repr).encode())
    weights: Any = tree_flatten(model.parameters())
    for name, array in sorted(weights):
        _add(hashed, f"{name}:{array.dtype}{array.shape}".encode())
        _add(hashed, _bytes(array))
    return str(hashed.hexdigest())


def with_settings(name: str, **settings: object) -> str:
    """Hash a fingerprint together with further settings that KV depends on."""
    hashed = xxhash.xxh3_128()
    _add(hashed, json.dumps([name, settings], sort_keys=True, default=repr).encode())
    return str(hashed.hexdigest())


def _add(hashed: xxhash.xxh3_128, raw: Any) -> None:
    hashed.update(len(raw).to_bytes(8, "little"))
    hashed.update(raw)


def _bytes(array: mx.array) -> Any:
    """Return an array's bytes, without a copy if possible."""
    seen = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    return np.ascontiguousarray(seen).reshape(-1).view(np.uint8)
