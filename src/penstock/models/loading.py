"""Loading of models by folder, file or name."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from penstock.attention import devices
from penstock.config import WeightsDtype
from penstock.errors import ModelError
from penstock.memory.sizes import parse_bytes
from penstock.models import named
from penstock.models.mlx_lm import Loaded, TokenizerWrapper, folder_widening, load_folder
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
    path_or_name = _fetched(path_or_name)
    file = open_model_file(path_or_name)
    if file is not None:
        return file.load(weights_dtype, limit_bytes)
    return load_folder(path_or_name, weights_dtype, limit_bytes)


def load_within(
    path_or_name: str | Path, weights_dtype: WeightsDtype, memory_limit: str | int | None = None
) -> Loaded:
    """Load a model for an engine with a memory limit, which defaults to the machine's."""
    limit = _limit(memory_limit)
    return load_all(path_or_name, weights_dtype=weights_dtype, limit_bytes=limit)


def check_fits(
    path_or_name: str | Path,
    weights_dtype: WeightsDtype,
    memory_limit: str | int | None = None,
    parts: int = 1,
) -> None:
    """Raise NeverFits if one of equal parts of the weights alone exceeds the memory limit.

    The weights are not read. A name whose folder is not here yet is not checked.
    """
    path = _fetched(path_or_name)
    file, limit = open_model_file(path), _limit(memory_limit)
    if file is not None:
        widening = file.widening(weights_dtype, limit)
    elif Path(path).is_dir():
        widening = folder_widening(path, weights_dtype, limit)
    else:
        return
    widening.part(parts).check_limit(Path(path).name)


def _limit(memory_limit: str | int | None) -> int:
    if memory_limit is None:
        return devices.machine_memory().default_limit_bytes
    return parse_bytes(memory_limit)


def _fetched(path_or_name: str | Path) -> str | Path:
    """Return the folder or file of a short name, which is fetched once; else what was passed."""
    if str(path_or_name) in named.MODELS and not Path(path_or_name).exists():
        return named.fetch(str(path_or_name))
    return path_or_name
