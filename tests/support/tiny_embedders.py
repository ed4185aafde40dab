"""Folders of tiny random decoders in Qwen3-Embedding's form, and their NumPy embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [
    *("[UNK]", "[END]", "Instruct", ":", "find", "what", "answers", "Query", "gate", "river"),
    *("water", "amber", "falcon", "code", "is", "the", "of", "holds", "back", "."),
]
END = 1
INSTRUCTION = "Instruct : find what answers the code of the river . " * 3 + "Query : "
WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS, POSITIONS = 32, 4, 2, 16, 48, 2, 128
THETA, EPSILON = 1e6, 1e-6


@dataclass(frozen=True)
class TinyEmbedder:
    folder: Path
    weights: dict[str, np.ndarray]

    def tokens(self, text: str) -> list[int]:
        return [*(WORDS.index(word) for word in text.split()), END]

    def vector(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the normalized last hidden state of the last token, in float64."""
        w, count = self.weights, len(tokens)
        x = w["embed_tokens.weight"][list(tokens)]
        angles = np.arange(count)[:, None] / THETA ** (np.arange(0, HEAD, 2) / HEAD)
        ahead = np.triu(np.full((count, count), -np.inf), 1)

        def rotated(of: np.ndarray) -> np.ndarray:
            first, second = np.split(of, 2, axis=-1)
            cos, sin = np.cos(angles), np.sin(angles)
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

        for layer in range(LAYERS):
            name = f"layers.{layer}"

            def linear(x: np.ndarray, part: str, name: str = name) -> np.ndarray:
                return x @ w[f"{name}.{part}.weight"].T

            normed = _norm(x, w[f"{name}.input_layernorm.weight"])
            q, k, v = (
                linear(normed, f"self_attn.{part}_proj").reshape(count, -1, HEAD).swapaxes(0, 1)
                for part in "qkv"
            )
            q = rotated(_norm(q, w[f"{name}.self_attn.q_norm.weight"]))
            k = rotated(_norm(k, w[f"{name}.self_attn.k_norm.weight"]))
            k, v = (np.repeat(part, HEADS // KV_HEADS, axis=0) for part in (k, v))
            scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(HEAD) + ahead)
            mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(count, -1)
            x = x + linear(mixed, "self_attn.o_proj")
            normed = _norm(x, w[f"{name}.post_attention_layernorm.weight"])
            gate, up = linear(normed, "mlp.gate_proj"), linear(normed, "mlp.up_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
        last = _norm(x, w["norm.weight"])[-1]
        unit: np.ndarray = last / np.linalg.norm(last)
        return unit


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight
    return normed


def write_embedder(
    folder: Path, *, prefix: str = "", pooling: str = "lasttoken", seed: int = 3, **config: Any
) -> TinyEmbedder:
    """Write a random decoder with the vocabulary `WORDS` into a new folder."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (len(WORDS), WIDTH)}
    norms: dict[str, int] = {"norm.weight": WIDTH}
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (heads * HEAD, WIDTH)
        shapes[f"{name}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        shapes |= {f"{name}.mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        norms |= {f"{name}.self_attn.{part}_norm.weight": HEAD for part in "qk"}
        norms |= {f"{name}.{part}_layernorm.weight": WIDTH for part in ("input", "post_attention")}
    weights = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    weights |= {name: random.normal(1, 0.2, size) for name, size in norms.items()}
    named = {prefix + name: mx.array(value.astype(np.float32)) for name, value in weights.items()}
    if not config.get("tie_word_embeddings", True):
        named["lm_head.weight"] = mx.zeros((len(WORDS), WIDTH))
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    _write(
        folder / "config.json",
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "vocab_size": len(WORDS),
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "tie_word_embeddings": True,
            "eos_token_id": END,
            **config,
        },
    )
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [END]", pair="$A $B [END]", special_tokens=[("[END]", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[END]", "unk_token": "[UNK]"},
    )
    of = "sentence_transformers.models"
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [{"path": path, "type": f"{of}.{kind}"} for path, kind in kinds]
    _write(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    _write(folder / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    return TinyEmbedder(folder, {name: value.astype(np.float64) for name, value in weights.items()})


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))
