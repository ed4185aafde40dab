"""Loading of models by folder, file or name."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from penstock.attention import devices
from penstock.config import WeightsDtype
from penstock.errors import ModelError
from penstock.memory.sizes import parse_bytes
from penstock.models import named
from penstock.models.mlx_lm import Loaded, TokenizerWrapper, load_folder
from penstock.models.model_files import open_model_file


def load(
    path_or_name: str | Path, *, weights_dtype: WeightsDtype = "auto"
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer from a folder, a GGUF file or by its Hugging Face name.

    Args:
        path_or_name: a folder, a file, `owner/model`, or a short name of `penstock.models.named`.
        weights_dtype: on a CPU, where MLX multiplies other dtypes than float32 on one core, `auto`
            packs quantized weights and converts others to float32; `native` keeps them; `float32`
            always converts them; `packed` and `packed-exact` multiply by codes as they are stored,
            with activations in 16 or 24 bits.

    Raises:
        ModelError: The model is unknown, or its folder is incomplete, damaged or of a type
            that mlx-lm does not support.
    """
    loaded = load_all(path_or_name, weights_dtype=weights_dtype)
    return loaded.model, loaded.tokenizer


def load_all(
    path_or_name: str | Path,
    *,
    weights_dtype: WeightsDtype = "auto",
    limit_bytes: int | None = None,
) -> Loaded:
    """Load like `load`; with `limit_bytes`, `auto` converts only if enough memory is left."""
    if not isinstance(path_or_name, str | Path):
        kind = type(path_or_name).__name__
        raise ModelError(f"a model is a folder, a .gguf file or a name, not a {kind}")
    if str(path_or_name) in named.MODELS and not Path(path_or_name).exists():
        path_or_name = named.fetch(str(path_or_name))
    file = open_model_file(path_or_name)
    if file is not None:
        return file.load(weights_dtype, limit_bytes)
    return load_folder(path_or_name, weights_dtype, limit_bytes)


def load_within(
    path_or_name: str | Path, weights_dtype: WeightsDtype, memory_limit: str | int | None = None
) -> Loaded:
    """Load a model for an engine with a memory limit, which defaults to the machine's."""
    limit = devices.machine_memory().default_limit_bytes
    if memory_limit is not None:
        limit = parse_bytes(memory_limit)
    return load_all(path_or_name, weights_dtype=weights_dtype, limit_bytes=limit)
