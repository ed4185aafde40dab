"""Weights of a GGUF file with mlx-lm's names, each tensor read when it is needed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from penstock.errors import ModelError
from penstock.models.unread_weights import UnreadTensor
from penstock.plugins.gguf import architectures, blocks
from penstock.plugins.gguf.header import FLOAT4, GROUP, Header, TensorInfo
from penstock.plugins.gguf.loaded_bytes import model_tensors
from penstock.plurals import counted

Weight: TypeAlias = mx.array | blocks.AffineCodes | blocks.FloatCodes

NORM = "norm.weight"
FLOAT32 = ".A_log"
"""Suffix of the names of arrays that stay in float32."""
MEASURED_TENSORS = 2
"""Number of tensors per format whose conversion error is measured."""


def write_config(header: Header, folder: Path, *, float32: bool, dtype: str) -> None:
    """Write the config of a model folder for mlx-lm's loaders."""
    config = architectures.config(header)
    config["torch_dtype"] = dtype
    if architectures.architecture(header).nested:
        outer = {key: config[key] for key in ("model_type", "torch_dtype", "eos_token_id")}
        config = {**outer, "text_config": config}
    if not float32 and (quantization := _quantization(header)):
        config["quantization"] = quantization
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def tensors(
    header: Header, *, float32: bool, dtype: str, half_scales: bool = False
) -> Iterator[UnreadTensor]:
    """Yield the tensors with mlx-lm's names, to be read later.

    Args:
        header: header of the file.
        float32: whether to dequantize quantized tensors.
        dtype: name of the dtype of dense weights, scales and offsets.
        half_scales: whether to use float16 for scales and offsets if that is exact.
    """
    kind = architectures.architecture(header)
    config = architectures.config(header)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    number_type: mx.Dtype = getattr(mx, dtype)

    def read(tensor: TensorInfo, name: str, part: blocks.Rows | None) -> list[mx.array]:
        value = blocks.read(tensor, float32=float32)
        if part is not None:
            value = _in_rows(value, part)
        rotated = heads.get(tensor.name.split(".")[-2]) if kind.interleaved else None
        if rotated is not None:
            if tensor.shape[0] % (2 * rotated):
                raise ModelError(
                    f"{header.name}: {counted(tensor.shape[0], 'row')} of "
                    f"{tensor.name} cannot be divided into pairs for "
                    f"{rotated} heads"
                )
            value = _straightened(value, rotated)
        if name.endswith(NORM) and kind.norm_offset:
            value = _dense(value) - kind.norm_offset
        if "linear_num_key_heads" in config:
            value = _qwen35(tensor.name, value, config)
        if name.endswith("conv.weight") or name.endswith("conv1d.weight"):
            value = _dense(value)[..., None]  # the shape of MLX's depthwise convolutions
        dense_type = mx.float32 if name.endswith(FLOAT32) else number_type
        weight, *sides = _arrays(value, number_type, dense_type, float32=float32)
        if half_scales:
            sides = [_in_half(side) if side.dtype == number_type else side for side in sides]
        mx.eval(weight, sides)
        return [weight, *sides]

    for tensor in model_tensors(header):
        name = architectures.module_of(kind, tensor.name)
        if name is None:
            raise ModelError(
                f"{header.name} has a tensor {tensor.name[:64]!r}, unlike {kind.model_type}"
            )
        for module, part in _parts(tensor, name):
            names = _names(tensor, module, float32=float32)
            yield UnreadTensor(names, partial(read, tensor, module, part))


def _parts(tensor: TensorInfo, name: str) -> Iterator[tuple[str, blocks.Rows | None]]:
    """Yield the names of the modules that a tensor is the weight of, and the rows of each."""
    stem, joined, suffix = name.rpartition(architectures.GATE_UP)
    if not joined or len(tensor.shape) != 3:
        yield name, None
        return
    half = tensor.shape[1] // 2
    for side, rows in (("gate_proj", slice(None, half)), ("up_proj", slice(half, None))):
        yield f"{stem}{side}{suffix}", (slice(None), rows)


def _qwen35(name: str, value: Weight, config: dict[str, Any]) -> Weight:
    """Return a tensor of a recurrent layer with its value heads in mlx-lm's order.

    The file has the first value head of each key head, then the second ones; mlx-lm has all value
    heads of a key head together. `ssm_a` is minus the exponential of mlx-lm's array.
    """
    part = name.split(".")[2] if name.startswith("blk.") else ""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    heads = mx.arange(values).reshape(-1, keys).swapaxes(0, 1).reshape(-1)
    numbers = (heads[:, None] * size + mx.arange(size)).reshape(-1)
    before = 2 * keys * config["linear_key_head_dim"]
    if part in ("attn_qkv", "ssm_conv1d"):
        return _in_rows(value, mx.concatenate([mx.arange(before), before + numbers]))
    if part == "attn_gate":
        return _in_rows(value, numbers)
    if part in ("ssm_alpha", "ssm_beta", "ssm_dt"):
        return _in_rows(value, heads)
    if part == "ssm_a":
        return mx.log(-_dense(value))[heads]
    if part == "ffn_gate_inp_shexp":
        return _dense(value).reshape(1, -1)
    if part != "ssm_out":
        return value
    if isinstance(value, mx.array):
        return value[:, numbers]
    if size % GROUP or isinstance(value, blocks.FloatCodes):
        raise ModelError(f"{name}: heads of {size:,} numbers are not supported in this format")
    return value.groups(numbers[::GROUP] // GROUP)


def _in_half(numbers: mx.array) -> mx.array:
    """Convert an array to float16 if that is exact; otherwise return it unchanged."""
    wide = np.asarray(numbers)  # with MLX's operations, each array would take a millisecond
    half = wide.astype(np.float16)
    return mx.array(half) if np.array_equal(half, wide) else numbers


def nearest_errors(header: Header) -> dict[str, float]:
    """Return the maximum relative error of requantizing a few tensors, by format."""
    errors: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        form = tensor.form
        if not form.is_exact and counts[form.name] < MEASURED_TENSORS:
            counts[form.name] += 1
            errors[form.name] = max(errors.get(form.name, 0.0), blocks.nearest_error(tensor))
    return errors


def _quantization(header: Header) -> dict[str, Any]:
    """Return mlx-lm's `quantization` config; empty if no module is quantized."""
    kind = architectures.architecture(header)
    forms = {
        module.removesuffix(".weight"): tensor.form
        for tensor in model_tensors(header)
        if tensor.form.bits is not None
        for module, _ in _parts(tensor, str(architectures.module_of(kind, tensor.name)))
    }
    if not forms:
        return {}
    codings = {
        name: {
            "group_size": GROUP,
            "bits": form.bits,
            "mode": "mxfp4" if form.name == FLOAT4 else "affine",
        }
        for name, form in forms.items()
    }
    return {**min(codings.values(), key=lambda coding: str(coding)), **codings}


def _straightened(value: Weight, heads: int) -> Weight:
    """Return the rows of queries or keys in the order of Hugging Face's models.

    The file interleaves the pairs that RoPE rotates; Hugging Face stores the first elements of all
    pairs, then the second ones.
    """
    rows = (value if isinstance(value, mx.array) else value.weight).shape[0]
    return _in_rows(value, mx.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))


def _in_rows(value: Weight, order: blocks.Rows) -> Weight:
    return value[order] if isinstance(value, mx.array) else value.rows(order)


def _dense(value: Weight) -> mx.array:
    return value if isinstance(value, mx.array) else value.dequantized()


def _names(tensor: TensorInfo, name: str, *, float32: bool) -> list[str]:
    """Return the names of a tensor's parameters."""
    if float32 or tensor.form.bits is None:
        return [name]
    stem = name.removesuffix(".weight")
    sides = ("scales",) if tensor.form.name == FLOAT4 else ("scales", "biases")
    return [f"{stem}.{part}" for part in ("weight", *sides)]


def _arrays(
    value: Weight, side_dtype: mx.Dtype, dense_dtype: mx.Dtype, *, float32: bool
) -> list[mx.array]:
    """Return a tensor's parameters, in the order of their names."""
    if float32 or isinstance(value, mx.array):
        return [_dense(value).astype(dense_dtype)]
    if isinstance(value, blocks.FloatCodes):
        return [value.weight, value.scales]
    return [value.weight, value.scales.astype(side_dtype), value.biases.astype(side_dtype)]
