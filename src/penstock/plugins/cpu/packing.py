"""Packing of all quantized weights of a model; see `penstock.models.weight_packer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import onnxruntime  # noqa: F401 - where it is not installed, this plug-in is not there

from penstock.memory.sizes import packed_matrix_bytes
from penstock.models.weight_packer import Packing
from penstock.plugins.cpu.compiled import has_numba
from penstock.plugins.cpu.packed_layers import PackedDecoderLayer, form_of, packed_layer
from penstock.plugins.cpu.packed_products import (
    BLOCKS,
    WIDER,
    PackedEmbedding,
    PackedHead,
    PackedLinear,
    PackedModule,
    packed_codes,
)


def takes(module: nn.Module) -> bool:
    """See `WeightPacker`; affine codes of linear layers and embeddings."""
    return (
        isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        and module.mode == "affine"
        and module.bits in WIDER
        and module.group_size in BLOCKS
    )


def packed_bytes(module: Any, *, tied: bool) -> int:
    """See `WeightPacker`: codes in 4 or 8 bits, a scale and an offset a group, in float32."""
    numbers, groups = module.weight.size * 32 // module.bits, module.scales.size
    packed = packed_matrix_bytes(numbers, module.bits, groups)
    if not isinstance(module, nn.QuantizedEmbedding):
        return packed
    rows: int = numbers * module.bits // 8 + groups * 4 * 2  # read as MLX's codes
    return rows + (packed if tied else 0)


def packing(module: nn.Module) -> Packing | None:
    """See `WeightPacker`."""
    if isinstance(module, PackedModule):
        return "graphs" if isinstance(module, PackedDecoderLayer) else "product"
    return None


def keeps_order() -> bool:
    """See `WeightPacker`; True if Numba is available."""
    return has_numba()


def pack(model: nn.Module, *, exact: bool) -> None:
    """See `WeightPacker`; decoder layers of known classes as two graphs, others one by one."""
    for name in _names(model, lambda module: form_of(module) is not None):
        layer = packed_layer(_at(model, name), exact=exact)
        if layer is not None:
            _put(model, name, layer)
    has_head = "lm_head" in model
    for name in _names(model, takes):
        replacement = _packed(name, _at(model, name), has_head=has_head, exact=exact)
        if replacement is not None:
            _put(model, name, replacement)
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]


def _packed(name: str, module: Any, *, has_head: bool, exact: bool) -> nn.Module | None:
    """Return the packed replacement of a module; None to keep the module."""
    matrix = packed_codes(module)
    if matrix is None:
        return None
    if isinstance(module, nn.QuantizedEmbedding):
        return None if has_head else PackedEmbedding(module, matrix, exact=exact)
    kind = PackedHead if name == "lm_head" else PackedLinear
    return kind(matrix, module.get("bias"), exact=exact)


def _names(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of modules; keeps no references, so that replaced modules are freed."""
    modules: list[tuple[str, nn.Module]] = model.named_modules()  # type: ignore[no-untyped-call]
    return [name for name, module in modules if wanted(module)]


def _at(model: nn.Module, name: str) -> Any:
    module: Any = model
    for step in name.split("."):
        module = module[int(step)] if isinstance(module, list) else module[step]
    return module


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    holder = _at(model, parent) if parent else model
    holder[int(last) if isinstance(holder, list) else last] = module
