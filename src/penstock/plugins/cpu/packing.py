"""Packing of all quantized weights of a model; see `penstock.models.weight_packer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.memory import ModelSpec
from penstock.models.weight_packer import Packing
from penstock.plugins.cpu.attention_tiles import LANES, converts_halves
from penstock.plugins.cpu.compiled_jobs import board_loops
from penstock.plugins.cpu.packed_experts import are_experts, packed_experts
from penstock.plugins.cpu.packed_layers import (
    PackedDecoderLayer,
    compute_together,
    form_of,
    packed_layer,
)
from penstock.plugins.cpu.packed_products import (
    PackedEmbedding,
    PackedHead,
    PackedLinear,
    PackedModule,
    can_multiply,
    packed_matrix,
)
from penstock.plugins.cpu.packed_products import packed_bytes as bytes_of

# Without Numba this plug-in is not there; it is imported only if it has to compile.
if find_spec("numba") is None:
    raise ModuleNotFoundError("No module named 'numba'", name="numba")
board_loops()


PACKED = ("affine", "mxfp4")
"""Quantization modes whose codes are multiplied."""
TOGETHER = frozenset(
    {"llama", "mistral", "smollm3", "qwen2", "qwen3", "granite", "phi3", "gemma3_text"}
)
"""Model types of mlx-lm whose layers are all computed together."""


def takes(module: nn.Module) -> bool:
    """See `WeightPacker`; codes of linear layers, embeddings and experts."""
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return can_multiply(module)
    return are_experts(module)


def packed_bytes(module: Any) -> int:
    """See `WeightPacker`: codes in 4, 5, 6 or 8 bits, a scale and an offset a group."""
    return bytes_of(module)


def packing(module: nn.Module) -> Packing | None:
    """See `WeightPacker`."""
    if isinstance(module, PackedModule):
        return "layer" if isinstance(module, PackedDecoderLayer) else "product"
    return None


def pack(model: nn.Module, *, exact: bool) -> None:
    """See `WeightPacker`; decoder layers of known classes whole, others one by one.

    Embeddings and the head, the largest matrices, come first, while the rest is not yet read.
    """
    _pack_each(model, lambda name, module: takes(module) and not _is_in_layer(name), exact=exact)
    for name in _names(model, lambda _, module: form_of(module) is not None):
        layer = packed_layer(_at(model, name), exact=exact)
        if layer is not None:
            _put(model, name, layer)
    for layers in _in_turn(model):
        compute_together(layers)
    _pack_each(model, lambda _, module: takes(module), exact=exact)
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]


def kv_dtype(model: nn.Module) -> mx.Dtype | None:
    """See `WeightPacker`; float16 if all layers attend together, with activations in 16 bits.

    Keys and values then have a relative error of 2^-12, and activations one of 2^-16.
    """
    layers = getattr(model, "layers", None) or []
    return mx.float16 if _in_turn(model) == [layers] and all(map(_halves, layers)) else None


def planned_kv_dtype(spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
    """See `WeightPacker`."""
    dims = {dim for layer in spec.layers for dim in (layer.key_dim, layer.value_dim)}
    whole = all(dim % LANES == 0 for dim in dims) and converts_halves()
    # Settings of single layers may leave some in half precision, which are not packed.
    quantization = config.get("quantization") or {}
    alike = all(value is not False for value in quantization.values())
    packs = alike and quantization.get("mode", "affine") in PACKED
    return "float16" if packs and whole and spec.model_type in TOGETHER else None


def _halves(layer: PackedDecoderLayer) -> bool:
    whole = all(dim % LANES == 0 for dim in layer.parts.dims)
    return whole and not layer.exact and converts_halves()


def _is_in_layer(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


def _pack_each(model: nn.Module, wanted: Callable[[str, nn.Module], bool], *, exact: bool) -> None:
    """Replace modules one by one."""
    for name in _names(model, wanted):
        replacement = _packed(name, _at(model, name), exact=exact)
        if replacement is not None:
            _put(model, name, replacement)


def _in_turn(model: nn.Module) -> list[list[PackedDecoderLayer]]:
    """Return lists of packed layers that are called in turn: all, or each alone."""
    layers = getattr(model, "layers", None) or []
    packed = [layer for layer in layers if isinstance(layer, PackedDecoderLayer)]
    able = [layer for layer in packed if layer.attends_together]
    return [able] if able and len(able) == len(layers) else [[layer] for layer in able]


def _packed(name: str, module: Any, *, exact: bool) -> nn.Module | None:
    """Return the packed replacement of a module; None to keep the module."""
    if are_experts(module):
        return packed_experts(module, exact=exact)
    matrix = packed_matrix(module)
    if matrix is None:
        return None
    if isinstance(module, nn.QuantizedEmbedding):
        return PackedEmbedding(matrix, exact=exact)
    kind = PackedHead if name == "lm_head" else PackedLinear
    return kind(matrix, module.get("bias"), exact=exact)


def _names(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> list[str]:
    """Return the names of modules; keeps no references, so that replaced modules are freed."""
    modules: list[tuple[str, nn.Module]] = model.named_modules()  # type: ignore[no-untyped-call]
    return [name for name, module in modules if wanted(name, module)]


def _at(model: nn.Module, name: str) -> Any:
    module: Any = model
    for step in name.split("."):
        module = module[int(step)] if isinstance(module, list) else module[step]
    return module


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    holder = _at(model, parent) if parent else model
    holder[int(last) if isinstance(holder, list) else last] = module
