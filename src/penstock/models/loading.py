"""Loading of models, given a folder, a file or a name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.nn as nn

from penstock.attention import devices
from penstock.config import MTP, ModelSource, WeightsDtype
from penstock.errors import ModelError
from penstock.memory.heads import HEADED_BY_SOURCE, no_head, not_beside_file
from penstock.memory.reading import has_head
from penstock.memory.sizes import parse_bytes
from penstock.models import named, recommended
from penstock.models.adapters import adapter_bytes
from penstock.models.drafted_reader import drafted_reader
from penstock.models.head_source import head_folder, is_split_for, state_drafter
from penstock.models.mlx_lm import (
    Loaded,
    ModelReader,
    TokenizerWrapper,
    folder_widening,
    load_folder,
)
from penstock.models.model_files import open_model_file
from penstock.models.source import SourceChoice, checked_source, read_object
from penstock.models.source_choice import choose_source, refuse_drafter
from penstock.models.widening import Widening


def load(
    path_or_name: str | Path,
    *,
    weights_dtype: WeightsDtype = "auto",
    model_source: ModelSource = "auto",
    adapters: Mapping[str, Path] | None = None,
    mtp: bool | str | Path = False,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer from a folder, a GGUF file or by its Hugging Face name.

    Args:
        path_or_name: a folder, a file, `owner/model`, or a short name of `penstock.models.named`.
        weights_dtype: `native` keeps the weights as stored. `float32` converts them. `packed` and
            `packed-exact` multiply by the quantized codes directly, with activations in 16 or 24
            bits. `auto` is `native`, except on a CPU, where MLX is slow with other dtypes than
            float32: there it packs quantized weights, and converts others to float32.
        model_source: library of the model's classes; `auto` uses mlx-lm, or mlx-vlm if only that
            supports the model type.
        adapters: folders of LoRA and DoRA adapters by name, in mlx-lm's format; requests select
            one with `Request.adapter`.
        mtp: True to keep the multi-token head in the model's folder, for an engine with
            `draft_model="mtp"`; or a folder that mlx-vlm has split such a head off to, or of a
            drafter that reads hidden states (DFlash, EAGLE-3).

    Raises:
        ModelError: The model or an adapter does not exist, is incomplete or damaged, or has an
            unsupported type.
    """
    loaded = load_all(
        path_or_name,
        weights_dtype=weights_dtype,
        model_source=model_source,
        adapters=adapters,
        mtp=MTP if mtp is True else mtp or None,
    )
    return loaded.model, loaded.tokenizer


def load_all(
    path_or_name: str | Path,
    *,
    weights_dtype: WeightsDtype = "auto",
    model_source: ModelSource = "auto",
    limit_bytes: int | None = None,
    adapters: Mapping[str, Path] | None = None,
    mtp: str | Path | None = None,
) -> Loaded:
    """Load like `load`; with `limit_bytes`, `auto` converts only if that leaves enough memory."""
    if not isinstance(path_or_name, str | Path):
        kind = type(path_or_name).__name__
        raise ModelError(f"a model is a folder, a .gguf file or a name, not a {kind}")
    path_or_name = _fetched(path_or_name)
    file = open_model_file(path_or_name)
    if file is not None:
        if adapters:
            raise ModelError(
                f"adapters are not supported with a {Path(path_or_name).suffix} file, which orders "
                f"weights differently; use a model folder, or fuse them first: mlx_lm.fuse"
            )
        if mtp is not None:
            raise not_beside_file(path_or_name)
        return file.load(weights_dtype, limit_bytes)
    if Path(path_or_name).is_dir():  # a drafter's lacks other files
        refuse_drafter(str(path_or_name))
    source = checked_source(path_or_name)
    choice, reader = choose_source(source, model_source)
    if mtp is not None:
        source = source if Path(source).is_dir() else str(recommended.pull(source))
        reader = _headed(source, choice, reader, mtp)
    return load_folder(source, weights_dtype, limit_bytes, reader, choice, adapters or {})


def load_within(
    path_or_name: str | Path,
    weights_dtype: WeightsDtype,
    memory_limit: str | int | None = None,
    model_source: ModelSource = "auto",
    adapters: Mapping[str, Path] | None = None,
    *,
    mtp: str | Path | None = None,
) -> Loaded:
    """Load a model for an engine with a memory limit, which defaults to the machine's."""
    return load_all(
        path_or_name,
        weights_dtype=weights_dtype,
        model_source=model_source,
        limit_bytes=_limit(memory_limit),
        adapters=adapters,
        mtp=mtp,
    )


def check_model(path_or_name: str | Path) -> None:
    """Raise ModelError for a model that cannot exist, or lacks files; the weights are not read.

    Names of models that are not downloaded yet are accepted, and nothing is downloaded.
    """
    if str(path_or_name) in named.MODELS and not Path(path_or_name).exists():
        return
    path = _fetched(path_or_name)
    if open_model_file(path) is None:
        checked_source(path)


def check_fits(
    path_or_name: str | Path,
    weights_dtype: WeightsDtype,
    memory_limit: str | int | None = None,
    parts: int = 1,
    model_source: ModelSource = "auto",
    *,
    mtp: str | Path | None = None,
) -> None:
    """Raise NeverFits if the weights, divided into equal parts, exceed the memory limit.

    The weights are not read. A model that is not downloaded yet is not checked.
    """
    path = _fetched(path_or_name)
    widening = _widening(path, weights_dtype, _limit(memory_limit), model_source, mtp=mtp)
    if widening is not None:
        widening.part(parts).check_limit(Path(path).name)


def expected_bytes(
    path_or_name: str | Path,
    weights_dtype: WeightsDtype,
    limit_bytes: int,
    model_source: ModelSource = "auto",
    adapters: Mapping[str, Path] | None = None,
    *,
    mtp: str | Path | None = None,
) -> int:
    """Return the bytes of a model's weights once loaded; 0 if it is not downloaded yet.

    The weights are not read.

    Raises:
        ModelError: as for `load`, if the header or config is sufficient to detect it.
        NeverFits: the weights alone exceed the limit.
    """
    path = _fetched(path_or_name)
    widening = _widening(path, weights_dtype, limit_bytes, model_source, mtp=mtp)
    if widening is None:
        return 0
    widening.check_limit(Path(path).name)
    return widening.loaded_bytes + adapter_bytes(adapters or {})


def _widening(
    path: str | Path,
    weights_dtype: WeightsDtype,
    limit_bytes: int,
    model_source: ModelSource,
    *,
    mtp: str | Path | None,
) -> Widening | None:
    file = open_model_file(path)
    if file is not None:
        return file.widening(weights_dtype, limit_bytes)
    if not Path(path).is_dir():
        return None
    source = checked_source(path)
    choice, reader = choose_source(source, model_source)
    if mtp is not None:
        reader = _headed(source, choice, reader, mtp)
    return folder_widening(source, weights_dtype, limit_bytes, reader)


def _headed(source: str, choice: SourceChoice, reader: ModelReader, mtp: str | Path) -> ModelReader:
    """Return the reader of a folder with a head or a drafter; ModelError if none is read."""
    model_type = read_object(source, "config.json").get("model_type")
    head = head_folder(mtp, Path(source))
    drafter, is_known = state_drafter(head), model_type in HEADED_BY_SOURCE[choice.name]
    if choice.name != "mlx-lm" and (drafter is not None or not is_known):
        part = f"multi-token heads of {model_type}" if drafter is None else "DFlash and EAGLE-3"
        raise ModelError(
            f"{source}: {part} work only with mlx-lm's classes; add --model-source mlx-lm"
        )
    if drafter is not None:
        if not has_head(head):
            raise ModelError(f"{head} has no weights in model*.safetensors files")
        return drafted_reader(head, drafter)
    is_split = is_split_for(head, model_type)
    is_own = head.is_dir() and head.samefile(source)
    if not is_known or not (is_split or is_own) or not has_head(head):
        raise no_head(head)
    return reader.headed(head)


def _limit(memory_limit: str | int | None) -> int:
    if memory_limit is None:
        return devices.machine_memory().default_limit_bytes
    return parse_bytes(memory_limit)


def _fetched(path_or_name: str | Path) -> str | Path:
    """Resolve a short name to its downloaded file or hub name; return others unchanged."""
    if str(path_or_name) in named.MODELS and not Path(path_or_name).exists():
        return named.fetch(str(path_or_name))
    return recommended.source_of(path_or_name) if isinstance(path_or_name, str) else path_or_name
