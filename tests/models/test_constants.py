"""Models whose RoPE has frequencies of its own answer in the engine's thread."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from penstock import Engine
from penstock.engine.request import Request
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH
from support.gguf_files import MODELS, SIZES
from support.small_models import build

SCALED: dict[str, dict[str, Any]] = {
    "llama3": MODELS["llama3"],
    "proportional": {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"] * (SIZES["num_hidden_layers"] // 2),
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
    },
    "yarn": {
        "model_type": "qwen3",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [2.0] * 8,
            "short_factor": [1.0] * 8,
        },
    },
}
TOKENS = 8
PROMPT = [5, 260, 17, 301, 9, 33, 250, 8, 111, 64, 65, 66]


def scaled(rope: str, folder: Path) -> list[int]:
    """Write a random model's folder, and return the tokens of mlx-lm's loop."""
    mx.random.seed(4)
    config = {**SIZES, **SCALED[rope], "tie_word_embeddings": True, "eos_token_id": 2}
    model = build(config)
    shutil.copytree(MODEL_PATH, folder, copy_function=shutil.copyfile)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return [int(t) for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=TOKENS)]


def answer(model: Any, tokenizer: Any) -> list[int]:
    with Engine(model, tokenizer, memory_limit="200MB", block_size=16) as engine:
        request = Request(prompt=tuple(PROMPT), max_tokens=TOKENS, ignore_eos=True)
        return list(engine.submit(request).result()[0].tokens)


@pytest.mark.parametrize("rope", SCALED)
def test_folder_with_scaled_rope_matches_mlx_lm(rope: str, tmp_path: Path) -> None:
    expected = scaled(rope, tmp_path / "model")
    loaded = load_all(tmp_path / "model", weights_dtype="float32")
    assert answer(loaded.model, loaded.tokenizer) == expected


@pytest.mark.parametrize("lazy", [False, True])
def test_engine_evaluates_model_loaded_by_mlx_lm(lazy: bool, tmp_path: Path) -> None:
    expected = scaled("llama3", tmp_path / "model")
    model, tokenizer = mlx_lm.load(str(tmp_path / "model"), lazy=lazy)
    assert answer(model, tokenizer) == expected
