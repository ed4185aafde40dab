"""Random small models of mlx-lm's own classes, for tests."""

from __future__ import annotations

import importlib
import json
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}
PACKED: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 16,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
    },
}
"""Changes of `BASE` by model type, for layers that packed weights compute in one job."""


def build(config: dict[str, Any]) -> Any:
    """Return the random model that mlx-lm builds from a config; A_log stays float32."""
    dtype = getattr(mx, config["torch_dtype"])
    model_type = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))

    def cast(path: str, weights: mx.array) -> mx.array:
        return weights if path.endswith("A_log") else weights.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())
    return model
