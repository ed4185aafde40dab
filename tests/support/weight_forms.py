"""Folders of small random models whose weights are stored in one format each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from penstock.recall import MODEL_PATH
from support.small_models import BASE, build

SIZES = {
    **BASE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "vocab_size": 512,
}
"""Widths that every group size divides."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
MODES: dict[str, dict[str, Any]] = {
    "affine": {"group_size": 64, "bits": 4, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
LAYERS = {
    "model.embed_tokens": MODES["mxfp8"],
    "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 6, "mode": "affine"},
    "model.layers.1.self_attn.o_proj": MODES["nvfp4"],
    "model.layers.2.self_attn.v_proj": {"group_size": 128, "bits": 3, "mode": "affine"},
    "model.layers.3.self_attn.k_proj": False,
}
"""Matrices with a format of their own; False for one that is not quantized."""
FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
BLOCK = 128


def write_quantized(
    folder: Path, family: str, mode: str, *, by_layer: bool = False, dtype: str = "float32"
) -> Path:
    """Write a model in one of MLX's formats; `by_layer` adds those of `LAYERS`."""
    model, config = _model(family, dtype)
    quantization = {**MODES[mode], **(LAYERS if by_layer else {})}

    def form(name: str, module: nn.Module) -> Any:
        return quantization.get(name, hasattr(module, "to_quantized"))

    nn.quantize(model, **MODES[mode], class_predicate=form)
    return _write(folder, {**config, "quantization": quantization}, _weights(model))


def write_float8(folder: Path, family: str, dtype: str = "bfloat16") -> Path:
    """Write a model as vendors do: 8-bit floats, and a scale for each block of 128 x 128."""
    model, config = _model(family, dtype)
    weights: dict[str, mx.array] = {}
    for name, weight in _by_expert(_weights(model)).items():
        if weight.ndim != 2 or "embed" in name or "mlp.gate." in name:
            weights[name] = weight
            continue
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        scales = mx.random.uniform(0.5, 2.0, (rows, columns)) / 256
        by_number = mx.repeat(mx.repeat(scales, BLOCK, 0), BLOCK, 1)
        by_number = by_number[: weight.shape[0], : weight.shape[1]]
        weights[name] = mx.to_fp8(weight.astype(mx.float32) / by_number)
        weights[f"{name}_scale_inv"] = scales
    return _write(folder, {**config, "quantization_config": FLOAT8}, weights)


def _model(family: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    mx.random.seed(5)
    config = {**SIZES, **FAMILIES[family], "torch_dtype": dtype}
    return build(config), config


def _weights(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _by_expert(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the matrices of experts one by one, as vendors publish them."""
    published: dict[str, mx.array] = {}
    for name, weight in weights.items():
        stem, switch, part = name.partition(".switch_mlp.")
        if switch:
            numbered = enumerate(weight)
            published |= {f"{stem}.experts.{number}.{part}": one for number, one in numbered}
        else:
            published[name] = weight
    return published


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    if "quantization_config" in config:
        _name_float8(file)
    for part in MODEL_PATH.glob("tokenizer*"):
        (folder / part.name).write_bytes(part.read_bytes())
    return folder


def _name_float8(file: Path) -> None:
    """Give bytes their dtype in the header; MLX has no 8-bit floats, and writes them as U8."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"U8"', b'"F8_E4M3"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
