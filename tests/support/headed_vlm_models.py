"""Folders of tiny random models of mlx-vlm with multi-token heads, as their makers publish them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx_vlm.utils
import tiny_vlm_families
from headed_models import write_published
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.speculative.drafters.qwen4_exp_mtp import Qwen4ExpMTPDraftModel
from mlx_vlm.speculative.drafters.qwen4_exp_mtp.config import Qwen4ExpMTPConfig
from tiny_families import randomize
from tiny_image_families import QWEN_TOWER

from penstock.models.loading import load
from penstock.recall import MODEL_PATH

FAMILIES = ("glm_moe_dsa", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
ROPE = {
    "type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}


def write_headed(family: str, folder: Path) -> Path:
    """Write a random model with its head as its makers publish it, for mlx-vlm's classes.

    Those with the weights of a vision tower have no processor, so they read text alone.
    """
    writers = {"glm_moe_dsa": _write_with_shared_index, "qwen4_exp": _write_streams}
    writers.get(family, _write_with_tower)(family, folder)
    return folder


def _write_with_shared_index(family: str, folder: Path) -> None:
    write_published(family, folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["shared" if number % 2 else "full" for number in range(config["num_hidden_layers"])]
    (folder / "config.json").write_text(json.dumps({**config, "indexer_types": kinds}))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    shared = tuple(f"model.layers.{i}.self_attn.indexer." for i in range(1, len(kinds), 2))
    repeated = ("embed_tokens.weight", "shared_head.head.weight")
    kept = {
        name: weight
        for name, weight in weights.items()
        if not name.startswith(shared)
        and not (name.startswith(f"model.layers.{len(kinds)}.") and name.endswith(repeated))
    }
    mx.save_safetensors(str(folder / "model.safetensors"), kept)


def _write_with_tower(family: str, folder: Path) -> None:
    write_published(family, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] = ROPE
    config["vision_config"] = {**QWEN_TOWER, "model_type": family}
    (folder / "config.json").write_text(json.dumps(config))
    model = _whole_model(folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    for name, weight in tree_flatten(model.vision_tower.parameters()):
        weights[f"model.visual.{name}"] = weight
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def _write_streams(family: str, folder: Path) -> None:
    shutil.copytree(MODEL_PATH, folder, copy_function=shutil.copyfile)
    _, (text, _) = tiny_vlm_families.arguments_of(family)
    text.layer_types = None  # made from the interval, as published
    fields = {**dataclasses.asdict(text), "mtp_num_hidden_layers": 1}
    config = {"model_type": family, "text_config": fields, "eos_token_id": 2}
    config["vision_config"] = {**QWEN_TOWER, "model_type": family}
    (folder / "config.json").write_text(json.dumps(config))
    model = _whole_model(folder)
    head = Qwen4ExpMTPDraftModel(Qwen4ExpMTPConfig.from_dict({"text_config": fields}))
    randomize(head)
    named = tree_flatten({**model.parameters(), "mtp": head.parameters()})
    weights = dict(_published(name, weight) for name, weight in named)
    mx.save_safetensors(str(folder / "model.safetensors"), _with_joined_experts(weights))


def _whole_model(folder: Path) -> Any:
    config = mlx_vlm.utils.load_config(folder)
    model_class, _ = mlx_vlm.utils.get_model_and_args(config)
    mx.random.seed(11)
    model = model_class.Model(model_class.ModelConfig.from_dict(config))
    randomize(model)
    return model


@functools.cache
def headed_vlm(family: str) -> Any:
    """Return the loaded model of `write_headed`; always the same."""
    return _loaded(family, mtp=True)


@functools.cache
def headless_vlm(family: str) -> Any:
    """Return the loaded model of `write_headed` without its head."""
    return _loaded(family, mtp=False)


def _loaded(family: str, *, mtp: bool) -> Any:
    with TemporaryDirectory() as folder:
        published = write_headed(family, Path(folder) / "model")
        model, _ = load(published, weights_dtype="native", mtp=mtp, model_source="mlx-vlm")
    return model


@functools.cache
def right_headed_vlm(family: str) -> Any:
    """Return a model that chooses by its last token alone, whose head chooses the same."""
    model = _loaded(family, mtp=True)
    text = model.language_model
    width = text.args.hidden_size
    weights = dict(tree_flatten(model.parameters()))
    changed = {
        name: mx.zeros_like(weight)  # a layer then adds nothing
        for name, weight in weights.items()
        if re.search(r"\.(o_proj|out_proj|down_proj|value_proj)\.weight$", name)
    }
    if family == "glm_moe_dsa":
        joint = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
        changed["mtp.mtp.eh_proj.weight"] = joint
        changed["mtp.mtp.enorm.weight"] = mx.ones(width)
        changed["mtp.mtp.shared_head_norm.weight"] = weights["language_model.model.norm.weight"]
        last = "none"
    elif family == "qwen4_exp":
        changed["mtp.fc_embedding.weight"] = mx.eye(width)
        changed["mtp.fc_hidden.weight"] = mx.zeros((width, width))
        changed["mtp.pre_fc_norm_embedding.weight"] = mx.zeros(width)  # factors minus one
        last = "hyper_connection_mixer."
    else:
        changed["mtp.fc.weight"] = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
        changed["mtp.pre_fc_norm_embedding.weight"] = mx.ones(width)
        last = "norm.weight"
    for name in weights:
        if name.startswith(f"mtp.{last}"):
            changed[name] = weights[f"language_model.model.{name.removeprefix('mtp.')}"]
    model.update(tree_unflatten(list(changed.items())))
    mx.eval(model.parameters())
    return model


def write_head(family: str, model: Path, folder: Path) -> Path:
    """Write a random head for a model of Qwen3.5 in a folder of its own, as mlx-vlm does."""
    fields = json.loads((model / "config.json").read_text())["text_config"]
    config = {"model_type": "qwen3_5_mtp", "text_config": fields, "block_size": 2}
    drafter, _ = mlx_vlm.utils.get_model_and_args(config)
    head = drafter.Model(drafter.ModelConfig.from_dict(json.loads(json.dumps(config))))
    mx.random.seed(5)
    randomize(head)
    folder.mkdir()
    weights = dict(tree_flatten(head.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _published(name: str, weight: mx.array) -> tuple[str, mx.array]:
    name = name.replace("language_model.model.", "model.language_model.")
    name = name.replace("language_model.lm_head", "lm_head").replace("vision_tower", "model.visual")
    if "conv1d.weight" in name:
        weight = weight.moveaxis(1, 2)
    return name.replace("ngram_embedding.shards.", "ngram_embedding.shard_"), weight


def _with_joined_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    joined = {name: weight for name, weight in weights.items() if ".switch_mlp." not in name}
    for name, gate in weights.items():
        stem, found, _ = name.partition(".switch_mlp.gate_proj.weight")
        if found:
            up = weights[f"{stem}.switch_mlp.up_proj.weight"]
            joined[f"{stem}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
            down = weights[f"{stem}.switch_mlp.down_proj.weight"]
            joined[f"{stem}.experts.down_proj"] = down
    return joined
