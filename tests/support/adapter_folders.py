"""Random LoRA and DoRA adapters, written as mlx-lm's training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from parity_models import model_of


def fresh(family: str) -> Any:
    """Return a model that is not shared."""
    return model_of.__wrapped__(family)


def write_adapter(
    family: str,
    folder: Path,
    seed: int,
    *,
    dora: bool = False,
    rank: int = 4,
    kinds: tuple[str, ...] = ("Linear",),
    outside: bool = False,
) -> Path:
    """Write a random adapter as mlx-lm's training does.

    Args:
        kinds: names of the classes of the layers that it changes in decoder layers.
        outside: whether it also changes the embedding and the output layer.
    """
    model = fresh(family)
    parameters: dict[str, Any] = {"rank": rank, "scale": 5.0, "dropout": 0.0}
    keys = {
        name
        for layer in model.layers
        for name, module in layer.named_modules()
        if type(module).__name__ in kinds
    }
    if outside:
        keys |= {"model.embed_tokens", "lm_head"}
    parameters["keys"] = sorted(keys)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=dora)
    mx.random.seed(seed)
    weights = {
        name: array + 0.1 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.trainable_parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": len(model.layers),
        "lora_parameters": parameters,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
