"""Loading of models by folder, file or name."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from penstock.attention import devices
from penstock.config import ModelSource, WeightsDtype
from penstock.errors import ModelError
from penstock.memory.sizes import parse_bytes
from penstock.models import named, recommended
from penstock.models.mlx_lm import Loaded, TokenizerWrapper, folder_widening, load_folder
from penstock.models.model_files import open_model_file
from penstock.models.source import checked_source
from penstock.models.source_choice import choose_source


def load(
    path_or_name: str | Path,
    *,
    weights_dtype: WeightsDtype = "auto",
    model_source: ModelSource = "auto",
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer from a folder, a GGUF file or by its Hugging Face name.

    Args:
        path_or_name: a folder, a file, `owner/model`, or a short name of `penstock.models.named`.
        weights_dtype: on a CPU, where MLX multiplies other dtypes than float32 on one core, `auto`
            packs quantized weights and converts others to float32; `native` keeps them; `float32`
            always converts them; `packed` and `packed-exact` multiply by codes as they are stored,
            with activations in 16 or 24 bits.
        model_source: library of the model's classes; `auto` takes mlx-lm, and mlx-vlm for a model
            type that only that has.

    Raises:
        ModelError: The model is unknown, or its folder is incomplete, damaged or of a type
            that is not supported.
    """
    loaded = load_all(path_or_name, weights_dtype=weights_dtype, model_source=model_source)
    return loaded.model, loaded.tokenizer


def load_all(
    path_or_name: str | Path,
    *,
    weights_dtype: WeightsDtype = "auto",
    model_source: ModelSource = "auto",
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
    source = checked_source(path_or_name)
    choice, reader = choose_source(source, model_source)
    return load_folder(source, weights_dtype, limit_bytes, reader, choice)


def load_within(
    path_or_name: str | Path,
    weights_dtype: WeightsDtype,
    memory_limit: str | int | None = None,
    model_source: ModelSource = "auto",
) -> Loaded:
    """Load a model for an engine with a memory limit, which defaults to the machine's."""
    return load_all(
        path_or_name,
        weights_dtype=weights_dtype,
        model_source=model_source,
        limit_bytes=_limit(memory_limit),
    )


def check_fits(
    path_or_name: str | Path,
    weights_dtype: WeightsDtype,
    memory_limit: str | int | None = None,
    parts: int = 1,
    model_source: ModelSource = "auto",
) -> None:
    """Raise NeverFits if one of equal parts of the weights alone exceeds the memory limit.

    The weights are not read. A name whose folder is not here yet is not checked.
    """
    path = _fetched(path_or_name)
    file, limit = open_model_file(path), _limit(memory_limit)
    if file is not None:
        widening = file.widening(weights_dtype, limit)
    elif Path(path).is_dir():
        source = checked_source(path)
        _, reader = choose_source(source, model_source)
        widening = folder_widening(source, weights_dtype, limit, reader)
    else:
        return
    widening.part(parts).check_limit(Path(path).name)


def _limit(memory_limit: str | int | None) -> int:
    if memory_limit is None:
        return devices.machine_memory().default_limit_bytes
    return parse_bytes(memory_limit)


def _fetched(path_or_name: str | Path) -> str | Path:
    """Return the file of a short name, which is fetched once, or its hub's name."""
    if str(path_or_name) in named.MODELS and not Path(path_or_name).exists():
        return named.fetch(str(path_or_name))
    return recommended.source_of(path_or_name) if isinstance(path_or_name, str) else path_or_name
