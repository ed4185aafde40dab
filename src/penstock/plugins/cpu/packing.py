"""Packing of all quantized weights of a model; see `penstock.models.weight_packer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.memory import ModelSpec
from penstock.models.layer_seams import HEAD
from penstock.models.weight_packer import Packing
from penstock.plugins.cpu.attention_tiles import LANES, converts_halves
from penstock.plugins.cpu.compiled_jobs import board_loops
from penstock.plugins.cpu.packed_layers import (
    PackedDecoderLayer,
    compute_together,
    form_of,
    packed_layer,
)
from penstock.plugins.cpu.packed_output import OutputParts, PackedNorm
from penstock.plugins.cpu.packed_products import (
    PackedEmbedding,
    PackedHead,
    PackedLinear,
    PackedModule,
    are_experts,
    can_multiply,
    packed_experts,
    packed_matrix,
)
from penstock.plugins.cpu.packed_products import packed_bytes as bytes_of
from penstock.plugins.cpu.packed_steps import LayersTogether

# Without Numba this plug-in is unavailable. Numba itself is imported only to compile.
if find_spec("numba") is None:
    raise ModuleNotFoundError("No module named 'numba'", name="numba")
board_loops()


RMS_NORM = "RMSNorm"
"""Class of a final norm, MLX's or mlx-lm's own."""
PACKED = ("affine", "mxfp4")
"""Supported quantization modes."""
TOGETHER = frozenset(
    {"llama", "mistral", "smollm3", "qwen2", "qwen3", "granite", "phi3", "gemma3_text"}
)
"""Model types of mlx-lm whose layers are computed in one job."""


def _gemma_factor(model: Any) -> float:
    return float(mx.array(model.args.hidden_size**0.5, mx.bfloat16))


EMBEDDING_FACTORS: Mapping[str, Callable[[Any], float]] = {
    "mlx_lm.models.llama.Model": lambda model: 1.0,
    "mlx_lm.models.qwen2.Model": lambda model: 1.0,
    "mlx_lm.models.qwen3.Model": lambda model: 1.0,
    "mlx_lm.models.smollm3.Model": lambda model: 1.0,
    "mlx_lm.models.phi3.Model": lambda model: 1.0,
    "mlx_lm.models.gemma3_text.Model": _gemma_factor,
}
"""Classes of models that compute embeddings times a factor, layers, norm and output layer, only."""


def takes(module: nn.Module) -> bool:
    """See `WeightPacker`; takes quantized linear layers, embeddings and experts."""
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return can_multiply(module)
    return are_experts(module)


def packed_bytes(module: Any) -> int:
    """See `WeightPacker`; counts codes of 4, 5, 6 or 8 bits, scales and offsets."""
    return bytes_of(module)


def packing(module: nn.Module) -> Packing | None:
    """See `WeightPacker`."""
    if isinstance(module, PackedModule):
        return "layer" if isinstance(module, PackedDecoderLayer) else "product"
    return None


def pack(model: nn.Module, *, exact: bool, read: Callable[[str], None]) -> None:
    """See `WeightPacker`; packs decoder layers of known classes whole, other modules one by one.

    Embeddings and the head, the largest matrices, come first, before others are loaded.
    """

    def pack_each(wanted: Callable[[str], bool]) -> None:
        for name in _names(model, lambda name, module: wanted(name) and takes(module)):
            read(name)
            _put(model, name, _packed(name, _at(model, name), exact=exact))

    pack_each(lambda name: not _is_in_layer(name))
    for name in _names(model, lambda _, module: form_of(module) is not None):
        layer = packed_layer(_at(model, name), exact=exact, read=partial(_read_part, read, name))
        if layer is not None:
            _put(model, name, layer)
    output = _pack_norm(model)
    runs = _in_turn(model)
    for layers in runs:
        together = compute_together(layers, output if layers is runs[-1] else None)
        if len(runs) == 1:
            _repeat_steps(model, together)
    pack_each(lambda name: True)
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]


def kv_dtype(model: nn.Module) -> mx.Dtype | None:
    """See `WeightPacker`; float16 if all layers run in one job, with activations in 16 bits.

    Keys and values then have a relative error of 2^-12, and activations one of 2^-16.
    """
    layers = getattr(model, "layers", None) or []
    together = [layer for run in _in_turn(model) for layer in run]
    whole = bool(together) and together == layers
    return mx.float16 if whole and all(map(_halves, layers)) else None


def planned_kv_dtype(spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
    """See `WeightPacker`."""
    dims = {dim for layer in spec.layers for dim in (layer.key_dim, layer.value_dim)}
    whole = all(dim % LANES == 0 for dim in dims) and converts_halves()
    # Settings of single layers may exclude some from quantization, which are then not packed.
    quantization = config.get("quantization") or {}
    alike = all(value is not False for value in quantization.values())
    packs = alike and quantization.get("mode", "affine") in PACKED
    return "float16" if packs and whole and spec.model_type in TOGETHER else None


def _halves(layer: PackedDecoderLayer) -> bool:
    whole = all(dim % LANES == 0 for dim in layer.parts.dims)
    return whole and not layer.exact and converts_halves()


def _is_in_layer(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


def _read_part(read: Callable[[str], None], name: str, part: str) -> None:
    """Read the codes of a module within another."""
    read(f"{name}.{part}")


def _in_turn(model: nn.Module) -> list[list[PackedDecoderLayer]]:
    """Return lists of packed layers to compute in one job.

    If all layers are able, a list ends with each layer whose output a drafter reads, and with the
    last; otherwise each layer is a list.
    """
    layers = getattr(model, "layers", None) or []
    packed = [layer for layer in layers if isinstance(layer, PackedDecoderLayer)]
    able = [layer for layer in packed if layer.attends_together]
    if not able or len(able) < len(layers):
        return [[layer] for layer in able]
    ends = sorted({*(number + 1 for number in getattr(model, "read_layers", ())), len(layers)})
    return [layers[start:end] for start, end in pairwise([0, *ends])]


def _pack_norm(model: nn.Module) -> OutputParts | None:
    """Replace the final norm if all layers and the output layer are packed; return both."""
    names = _names(model, lambda _, module: isinstance(module, PackedDecoderLayer))
    layers = getattr(model, "layers", None) or []
    if not names or len(names) < len(layers):
        return None
    stack = _at(model, names[0].rpartition(".layers.")[0])
    norm, head = stack.get("norm"), stack.get("embed_tokens")
    holders = [module for module in (model, model.get("language_model")) if module is not None]
    for holder in holders:
        head = holder.get(HEAD, head)
    if not isinstance(head, PackedHead | PackedEmbedding) or type(norm).__name__ != RMS_NORM:
        return None
    output = OutputParts(norm, head.product, from_one=layers[0].form.from_one)
    stack.norm = PackedNorm(norm, output)
    return output


def _repeat_steps(model: Any, together: LayersTogether) -> None:
    """Let a model of a known class repeat decode steps; see `Runner.decode_again`."""
    factor_of = EMBEDDING_FACTORS.get(f"{type(model).__module__}.{type(model).__name__}")
    embedding = None if factor_of is None else model.model.embed_tokens
    if factor_of is None or not isinstance(embedding, PackedEmbedding) or together.output is None:
        return
    factor, matrix = np.float32(factor_of(model)), embedding.product.matrix
    together.embed = lambda tokens: matrix.rows_of(tokens) * factor
    model.decode_again = together.decode_again


def _packed(name: str, module: Any, *, exact: bool) -> nn.Module:
    """Return the packed replacement of a module that `takes` holds for."""
    if are_experts(module):
        return packed_experts(module, exact=exact)
    matrix = packed_matrix(module)
    if isinstance(module, nn.QuantizedEmbedding):
        return PackedEmbedding(matrix, exact=exact)
    kind = PackedHead if name == HEAD else PackedLinear
    return kind(matrix, module.get("bias"), exact=exact)


def _names(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> list[str]:
    """Return the names of modules, not the modules, so that replaced modules are freed."""
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
