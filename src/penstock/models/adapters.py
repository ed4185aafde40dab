"""LoRA and DoRA adapters in mlx-lm's format, several of which share one copy of the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import xxhash

from penstock.errors import ModelError
from penstock.models.adapted_layers import (
    AdaptedEmbedding,
    AdaptedLinear,
    AdaptedModule,
    AdaptedSwitch,
    Adapters,
    BareSwitch,
    Pair,
    with_combined_indices,
)
from penstock.models.adapter_names import AdapterNames
from penstock.regular_files import check_regular, read_text

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"
KINDS = ("lora", "dora")
MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, read from its folder."""

    name: str
    scale: float
    pairs: Mapping[str, Pair]
    """Matrices by name of the layer."""
    fingerprint: str
    """Hash of the matrices and settings."""


NONE = Adapters()
SWITCH_LAYERS = "mlx_lm.models.switch_layers"
"""Module of mlx-lm with the classes of experts."""
EXPERTS = ("SwitchGLU", "SwitchMLP")
EXPERT_LAYERS = ("SwitchLinear", "QuantizedSwitchLinear")


def adapters_of(model: Any) -> Adapters:
    """Return the adapters that `put_adapters` added to a model; `NONE` without any."""
    modules: list[nn.Module] = model.modules()
    adapted = (module for module in modules if isinstance(module, AdaptedModule))
    first = next(adapted, None)
    return NONE if first is None else first.adapters


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read an adapter in mlx-lm's format; raises ModelError if it cannot be used."""
    where = f"adapter {name}"
    settings, weights = folder / CONFIG, folder / WEIGHTS
    for file in (settings, weights):
        if not file.is_file():
            raise ModelError(f"{where}: {folder} has no {file.name}; mlx_lm.lora writes both files")
        check_regular(file)
    try:
        text = read_text(settings)
        config = json.loads(text)
        kind = config.get("fine_tune_type", "lora")
        scale = float(config["lora_parameters"]["scale"])
        arrays: dict[str, mx.array] = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    if kind not in KINDS:
        raise ModelError(
            f"{where} has type {str(kind)[:40]}; only lora and dora are supported. Use mlx_lm.fuse "
            f"to make a model folder of a full fine-tune"
        )
    fingerprint = xxhash.xxh3_128(text.encode())
    for key in sorted(arrays):
        fingerprint.update(f"{key}:{arrays[key].dtype}{arrays[key].shape}".encode())
        fingerprint.update(memoryview(arrays[key].astype(mx.float32)))  # type: ignore[arg-type]
    return Adapter(name, scale, _pairs(where, arrays), fingerprint.hexdigest())


def _pairs(where: str, arrays: Mapping[str, mx.array]) -> dict[str, Pair]:
    sides: dict[str, dict[str, mx.array]] = {}
    for key, array in arrays.items():
        module, _, side = key.rpartition(".")
        sides.setdefault(module, {})[side] = array
    pairs = {}
    for module, matrices in sides.items():
        a, b = matrices.get("lora_a"), matrices.get("lora_b")
        known = not set(matrices) - {"lora_a", "lora_b", "m"}
        if not known or a is None or b is None or not a.ndim == b.ndim:
            raise ModelError(
                f"{where} changes {module} otherwise than by LoRA or DoRA; use mlx_lm.fuse to make "
                f"a model folder with it"
            )
        pairs[module] = (a, b, matrices.get("m"))
    if not pairs:
        raise ModelError(f"{where} changes nothing")
    return pairs


def _at(model: nn.Module, name: str) -> Any:
    module: Any = model
    for part in name.split(".") if name else ():
        module = module[int(part)] if isinstance(module, list) else getattr(module, part, None)
    return module


def _layer_class(model: nn.Module, name: str) -> type[AdaptedModule]:
    """Return the class that applies adapters to a layer; raises ModelError for unknown layers."""
    module = _at(model, name)
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        return AdaptedLinear
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return AdaptedEmbedding
    if _is_switch(module, EXPERT_LAYERS):
        return AdaptedSwitch
    raise ModelError(
        f"an adapter changes {name}, which is no linear layer, embedding or experts of this model: "
        f"it is another model's"
    )


def _is_switch(module: object, names: Sequence[str]) -> bool:
    """Return whether a module has one of these classes of mlx-lm's experts."""
    return type(module).__module__ == SWITCH_LAYERS and type(module).__name__ in names


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(_at(model, parent), last, module)


def _combine_indices(model: nn.Module, names: Iterable[str], kinds: int) -> None:
    """Prepare the experts whose linear layers of these names have adapters.

    Raises:
        ModelError: experts of an unknown class.
    """
    for parent in sorted({name.rpartition(".")[0] for name in names}):
        experts = _at(model, parent)
        if not _is_switch(experts, EXPERTS):
            raise ModelError(
                f"an adapter changes {parent}, whose experts are not computed by mlx-lm's common "
                f"classes; use mlx_lm.fuse to make a model folder with it"
            )
        for name, child in list(experts.children().items()):
            if _is_switch(child, EXPERT_LAYERS):
                setattr(experts, name, BareSwitch(child, kinds))
        with_combined_indices(experts, kinds)


def put_adapters(model: nn.Module, folders: Mapping[str, Path]) -> None:
    """Add adapters, given by name and folder, to a model with native weights, in place.

    Raises:
        ModelError: an adapter cannot be read, or does not fit the model.
    """
    read = [read_adapter(name, folder) for name, folder in folders.items()]
    adapters = Adapters(AdapterNames({adapter.name: adapter.fingerprint for adapter in read}))
    scales = [adapter.scale for adapter in read]
    classes = {n: _layer_class(model, n) for adapter in read for n in adapter.pairs}
    for name, adapted_class in sorted(classes.items()):
        pairs = [adapter.pairs.get(name) for adapter in read]
        adapted = adapted_class(_at(model, name), adapters, name, pairs, scales)
        adapters.nbytes += adapted.adapter_bytes
        _put(model, name, adapted)
    switches = [name for name, of in classes.items() if of is AdaptedSwitch]
    _combine_indices(model, switches, 1 + len(read))


def adapter_bytes(folders: Mapping[str, Path]) -> int:
    """Return an upper bound of the bytes of stacked adapters, from the sizes of their files."""
    files = [folder / WEIGHTS for folder in folders.values()]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return (1 + len(folders)) * max(sizes, default=0)
