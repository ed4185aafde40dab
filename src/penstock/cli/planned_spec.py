"""Model specs for `penstock plan`, read without loading weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import config, memory
from penstock.errors import ModelError, SettingError
from penstock.memory import ModelSpec
from penstock.memory.heads import not_beside_file
from penstock.memory.model_config import read_config
from penstock.models import named, recommended
from penstock.models.head_source import head_folder
from penstock.models.source import is_hub_name, unknown_model


def limit_or_usual(given_bytes: int | None) -> int:
    if given_bytes is None:
        return _default_limit()
    if given_bytes == 0:
        raise SettingError(
            "--memory-limit is 0; set it to the memory for weights and caches, such as 16GB"
        )
    return given_bytes


def _default_limit() -> int:
    """Return the default memory limit, which `penstock doctor` shows; MLX queries the device."""
    try:
        from penstock.attention import devices  # a plan does not require that MLX has a back end
    except ImportError:
        return memory.read_machine_memory({}).default_limit_bytes
    return devices.machine_memory().default_limit_bytes


def read_spec(
    model: str,
    weights_dtype: config.WeightsDtype,
    limit_bytes: int,
    *,
    head: str | None = None,
) -> ModelSpec:
    """Return a model's spec with the weights' size once loaded; reads only headers.

    Args:
        head: multi-token head that is loaded, too: `MTP` for the model's own, or a folder.
    """
    path = find_model(model)
    mtp = None if head is None else head_folder(head, path)
    # numpy takes a while to import, which --help need not wait for.
    from penstock.models.model_files import open_model_file

    def read(*, float32: bool) -> ModelSpec:
        if file is None:
            return memory.read_model_spec(path, float32=float32, mtp=mtp)
        return memory.read_model_spec(
            file.config, files=file.bytes_by_kind(float32=float32), float32=float32, mtp=mtp
        )

    file = open_model_file(path)
    if file is not None and head is not None:
        raise not_beside_file(path)
    native, float32_spec = read(float32=False), read(float32=True)
    try:
        from penstock.models.weight_packer import can_pack, planned_kv_dtype
        from penstock.models.widening import Widening
    except ImportError:  # MLX has no back end, so nothing is converted
        return native
    packed = memory.packed_weight_bytes(path, mtp=mtp) if file is None else file.packed_bytes()
    sizes = native.weight_bytes or 0, float32_spec.weight_bytes or 0
    if packed == 0:  # there are no weight files; estimate slightly more than needed
        packed = sizes[0] * 5 // 4
    if packed is not None and weights_dtype == "auto" and not can_pack():
        packed = None
    choice = Widening(weights_dtype, *sizes, limit_bytes, packed)
    if choice.packs:
        settings = _config(path) if file is None else file.config
        raw_dtype = None if choice.exact else planned_kv_dtype(native, settings)
        return replace(float32_spec, weight_bytes=choice.loaded_bytes, raw_dtype=raw_dtype)
    return float32_spec if choice.widens else native


def _config(path: Path) -> dict[str, Any]:
    return read_config(path / "config.json" if path.is_dir() else path)


def find_model(model: str) -> Path:
    """Return the path of a model; ModelError if it is not downloaded."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    file = named.find(model) if model in named.MODELS else None
    if file is not None:
        return file
    source = recommended.source_of(model)
    # The hub client takes 0.2 s to import, and a folder does not need it. It is installed as a
    # dependency of mlx-lm (via transformers).
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    if model in named.MODELS or model in recommended.RECOMMENDED:
        raise ModelError(f"{model} is not downloaded yet; run penstock pull {model} first")
    if not is_hub_name(model):
        raise unknown_model(model)
    raise ModelError(
        f"there is no folder {model}, and no downloaded model of that name; run penstock pull "
        f"{model} first, or pass a model folder or its config.json"
    )
