"""Tiny models with multi-token heads, without them, and as folders in the form of their makers."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny_families
from mlx.utils import tree_flatten, tree_unflatten

from penstock.models.mlx_lm import head_cache, kv_cache
from penstock.models.mtp import with_head
from penstock.recall import MODEL_PATH

QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
LAYERED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
"""Families whose heads are published as the layer after the last."""
FAMILIES = (*QWEN, *LAYERED, "mimo")
_LAYER = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_PUBLISHED = {
    **dict.fromkeys(LAYERED, _LAYER),
    "mimo": {
        "fc": "input_proj",
        "pre_fc_norm_embedding": "token_layernorm",
        "pre_fc_norm_hidden": "hidden_layernorm",
        "norm": "final_layernorm",
    },
}
"""Names of parts of heads that are published as a further layer."""


@functools.cache
def headed(family: str) -> Any:
    """Return a random model of a family with a random head; always the same."""
    return tiny_families.build(family, derived=_derived)


@functools.cache
def headless(family: str) -> Any:
    """Return mlx-lm's own model with the weights of `headed`, but for the head's."""
    model = tiny_families.build(family)
    weights = [(name, w) for name, w in parameters(headed(family)) if not name.startswith("mtp.")]
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


@functools.cache
def right_headed(family: str) -> Any:
    """Return a model that chooses by its last token alone, whose head chooses the same."""
    model = tiny_families.build(
        family, derived=lambda model: with_head(model, kv_cache, head_cache)
    )
    text = getattr(model, "language_model", model)
    width = text.args.hidden_size
    changed = {
        "mtp.fc.weight": mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1),
        "mtp.pre_fc_norm_embedding.weight": mx.ones(width),
    }
    for name, weight in parameters(model):
        if re.search(r"\.(o_proj|out_proj|down_proj)\.weight$", name):
            changed[name] = mx.zeros_like(weight)  # a layer then adds nothing
        elif name == "mtp.norm.weight":
            changed[name] = text.model.norm.weight
    model.update(tree_unflatten(list(changed.items())))
    mx.eval(model.parameters())
    return model


def _derived(model_class: type[Any]) -> type[Any]:
    return with_head(model_class, kv_cache, head_cache)


def parameters(model: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())


def write_published(
    family: str, folder: Path, *, ships: bool = True, vocabulary: int | None = None
) -> Path:
    """Write a headed model as its makers publish it; norms multiply by 1 + weight there.

    Args:
        family: of `FAMILIES`.
        folder: written with the embedded model's tokenizer.
        ships: whether the weights of the head are written, too.
        vocabulary: number of tokens, up to which the model's are repeated; None for its own.
    """
    model = headed(family)
    text = getattr(model, "language_model", model)
    shutil.copytree(MODEL_PATH, folder, copy_function=shutil.copyfile)
    weights: dict[str, mx.array] = {}
    for name, weight in parameters(model):
        published = name.replace("language_model.model.", "model.language_model.")
        published = published.replace("language_model.lm_head", "lm_head")
        if "conv1d.weight" in name:
            weight = weight.moveaxis(1, 2)
        elif weight.ndim == 1 and _is_shifted(name) and family in QWEN:
            weight = weight - 1.0
        if family in _PUBLISHED and name.startswith("mtp."):
            published, weight = _as_layer(family, name, weight)
        if vocabulary is not None and name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weight = mx.concatenate([weight] * (1 + vocabulary // len(weight)))[:vocabulary]
        if ships or not name.startswith("mtp."):
            weights[published] = weight
    if ships and family in _PUBLISHED:  # what repeats the model's
        prefix = _as_layer(family, "mtp.norm.weight", mx.zeros(1))[0].rpartition(".")[0]
        prefix = prefix.removesuffix(_PUBLISHED[family]["norm"])
        weights[f"{prefix}embed_tokens.weight"] = mx.zeros((2, 2))
        weights[f"{prefix}shared_head.head.weight"] = mx.zeros((2, 2))
    weights = _experts_as_published(weights, fused=family == "qwen3_5_moe")
    weights = _latents_as_published(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    arguments = tiny_families.arguments_of(family)
    config = dataclasses.asdict(text.args) | {"model_type": family, "eos_token_id": 2}
    config["vocab_size"] = vocabulary or config["vocab_size"]
    if family == "mimo":
        del config["rope_scaling"]  # transformers, which does not know the family, warns of it
    if "text_config" in arguments:
        config = {"model_type": family, "text_config": config, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_split(family: str, folder: Path, *, bits: int | None = None) -> Path:
    """Write the head of `headed` alone, as mlx-vlm splits it off.

    Args:
        bits: bits of its matrices; None for float32.
    """
    folder.mkdir()
    head = {n.removeprefix("mtp."): w for n, w in parameters(headed(family)) if "mtp." in n}
    config: dict[str, Any] = {"model_type": "qwen3_5_mtp"}
    if bits is not None:
        coding = config["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
        for name, weight in list(head.items()):
            if weight.ndim > 1 and "gate.weight" not in name:
                stem = name.removesuffix(".weight")
                head[name], head[f"{stem}.scales"], head[f"{stem}.biases"] = mx.quantize(
                    weight, **coding
                )
    mx.save_safetensors(str(folder / "model.safetensors"), head)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _as_layer(family: str, name: str, weight: mx.array) -> tuple[str, mx.array]:
    """Return name and form of a head's weight as a part of a further layer."""
    prefix = "model.mtp_layers.0." if family == "mimo" else f"model.layers.{tiny_families.LAYERS}."
    stem, _, last = name.removeprefix("mtp.").rpartition(".")
    if family == "mimo" and stem == "fc":  # the hidden state comes first
        half = weight.shape[1] // 2
        weight = mx.concatenate([weight[:, half:], weight[:, :half]], axis=1)
    part = _PUBLISHED[family].get(stem, stem.removeprefix("layers.0."))
    return f"{prefix}{part}.{last}", weight


def _is_shifted(name: str) -> bool:
    return name.startswith("mtp.") or bool(
        re.search(r"(input_layernorm|post_attention_layernorm|model\.norm|[qk]_norm)\.weight", name)
    )


def _latents_as_published(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Join the two matrices that latent attention is split into, per head."""
    published = {n: w for n, w in weights.items() if ".embed_q." not in n and ".unembed_" not in n}
    for name, keys in weights.items():
        if name.endswith(".embed_q.weight"):
            stem = name.removesuffix(".embed_q.weight")
            both = [keys.swapaxes(1, 2), weights[f"{stem}.unembed_out.weight"]]
            published[f"{stem}.kv_b_proj.weight"] = mx.concatenate(both, axis=1).flatten(0, 1)
    return published


def _experts_as_published(weights: dict[str, mx.array], *, fused: bool) -> dict[str, mx.array]:
    published = {name: w for name, w in weights.items() if ".switch_mlp." not in name}
    for name, weight in weights.items():
        stem, switch, part = name.partition(".switch_mlp.")
        if not switch:
            continue
        if not fused:
            for number in range(len(weight)):
                published[f"{stem}.experts.{number}.{part}"] = weight[number]
        elif part == "gate_proj.weight":
            sides = [weight, weights[f"{stem}.switch_mlp.up_proj.weight"]]
            published[f"{stem}.experts.gate_up_proj"] = mx.concatenate(sides, axis=1)
        elif part == "down_proj.weight":
            published[f"{stem}.experts.down_proj"] = weight
    return published
