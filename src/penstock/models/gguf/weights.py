"""The weights of a GGUF file under mlx-lm's names, tensor by tensor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from penstock.errors import ModelError
from penstock.models.gguf import architectures, blocks
from penstock.models.gguf.header import GROUP, Header
from penstock.models.gguf.loaded_bytes import activation_dtype, held
from penstock.models.gguf.template_trial import check_template
from penstock.models.gguf.tokenizer import write_tokenizer

Weight: TypeAlias = mx.array | blocks.AffineCodes

NORM = "norm.weight"
MEASURED_TENSORS = 2
"""Tensors of a form whose error is measured."""


def write_folder(header: Header, folder: Path, *, wide: bool) -> None:
    """Write the files that mlx-lm's loaders read of a model folder, except for the weights.

    Args:
        header: of the model.
        folder: an empty one.
        wide: whether the model shall have dense matrices in float32.
    """
    config = architectures.config(header)
    config["torch_dtype"] = "float32" if wide else activation_dtype(header)
    if not wide and (quantization := _quantization(header)):
        config["quantization"] = quantization
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    check_template(header)
    write_tokenizer(header, folder)


def weights(header: Header, *, wide: bool) -> Iterator[tuple[str, mx.array]]:
    """Yield the weights by mlx-lm's names, evaluated; one tensor of the file is held at a time.

    Args:
        header: of the model.
        wide: whether all of them become float32. Else codes stay codes, and float32 numbers beside
            them (norms, biases) get the dtype of `activation_dtype`.

    Raises:
        ModelError: a tensor that the architecture does not have.
    """
    kind = architectures.architecture(header)
    config = architectures.config(header)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    dtype: mx.Dtype = getattr(mx, "float32" if wide else activation_dtype(header))
    for tensor in held(header):
        name = architectures.module_of(kind, tensor.name)
        if name is None:
            raise ModelError(
                f"{header.name} has a tensor {tensor.name[:64]!r}, which {kind.model_type} has not"
            )
        value = blocks.read(tensor, wide=wide)
        rotated = heads.get(tensor.name.split(".")[-2]) if kind.interleaved else None
        if rotated is not None:
            if tensor.shape[0] % (2 * rotated):
                raise ModelError(
                    f"{header.name}: {tensor.shape[0]:,} rows of {tensor.name} are no pairs for "
                    f"{rotated} heads"
                )
            value = _straightened(value, rotated)
        if name.endswith(NORM) and kind.norm_offset:
            value = _dense(value) - kind.norm_offset
        for suffix, array in _parts(value, name, dtype, wide=wide):
            mx.eval(array)
            yield suffix, array


def nearest_errors(header: Header) -> dict[str, float]:
    """Return the relative error of MLX's nearest codes, by form, for forms that it does not have.

    It is the largest of a few tensors, which are read.
    """
    errors: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        form = tensor.form
        if not form.is_exact and counts[form.name] < MEASURED_TENSORS:
            counts[form.name] += 1
            errors[form.name] = max(errors.get(form.name, 0.0), blocks.nearest_error(tensor))
    return errors


def _quantization(header: Header) -> dict[str, Any]:
    """Return mlx-lm's `quantization`: the bits of each module that has codes; empty without any."""
    kind = architectures.architecture(header)
    forms = {
        str(architectures.module_of(kind, tensor.name)).removesuffix(".weight"): bits
        for tensor in header.tensors.values()
        if (bits := tensor.form.bits) is not None
    }
    if not forms:
        return {}
    common = {"group_size": GROUP, "bits": min(forms.values()), "mode": "affine"}
    return {**common, **{name: {**common, "bits": bits} for name, bits in forms.items()}}


def _straightened(value: Weight, heads: int) -> Weight:
    """Return rows of queries or keys in the order of Hugging Face's models.

    The file has each head's rows as pairs that RoPE turns; there the first halves of all pairs come
    first.
    """
    rows = (value.weight if isinstance(value, blocks.AffineCodes) else value).shape[0]
    order = mx.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return value.rows(order) if isinstance(value, blocks.AffineCodes) else value[order]


def _dense(value: Weight) -> mx.array:
    """Return numbers as they are, or codes as float32."""
    return value.dequantized() if isinstance(value, blocks.AffineCodes) else value


def _parts(
    value: Weight, name: str, dtype: mx.Dtype, *, wide: bool
) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of one weight with their names."""
    if wide or not isinstance(value, blocks.AffineCodes):
        yield name, _dense(value).astype(dtype)
        return
    stem = name.removesuffix(".weight")
    coded = replace(value, scales=value.scales.astype(dtype), biases=value.biases.astype(dtype))
    yield f"{stem}.weight", coded.weight
    yield f"{stem}.scales", coded.scales
    yield f"{stem}.biases", coded.biases
