"""Folders of tiny random ModernBERT models, and their NumPy embeddings and scores."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tiny_encoders import WORDS, write_encoder

WIDTH, HEADS, HIDDEN, LAYERS, WINDOW, POSITIONS = 16, 2, 24, 4, 6, 1200
GLOBAL_THETA, LOCAL_THETA, EPSILON = 160_000.0, 10_000.0, 1e-5
EVERY = 3
"""One layer of so many attends to all tokens."""


@dataclass(frozen=True)
class TinyModern:
    folder: Path
    weights: dict[str, np.ndarray]
    pooling: str

    def states(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the last hidden states (tokens, width) in float64."""
        w, count = self.weights, len(tokens)
        x = _norm(w["embeddings.tok_embeddings.weight"][list(tokens)], w["embeddings.norm.weight"])
        places, size = np.arange(count), WIDTH // HEADS
        far = np.abs(places[:, None] - places) > WINDOW // 2
        for layer in range(LAYERS):
            name, is_local = f"layers.{layer}", layer % EVERY != 0
            theta = LOCAL_THETA if is_local else GLOBAL_THETA
            angles = places[:, None] / theta ** (np.arange(0, size, 2) / size)
            normed = _norm(x, w[f"{name}.attn_norm.weight"]) if layer else x
            parts = (normed @ w[f"{name}.attn.Wqkv.weight"].T).reshape(count, 3, HEADS, size)
            q, k, v = parts.transpose(1, 2, 0, 3)
            scores = _rotated(q, angles) @ _rotated(k, angles).swapaxes(1, 2) / math.sqrt(size)
            if is_local:
                scores = np.where(far, -np.inf, scores)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1)
            x = x + mixed.reshape(count, WIDTH) @ w[f"{name}.attn.Wo.weight"].T
            normed = _norm(x, w[f"{name}.mlp_norm.weight"])
            up, gate = np.split(normed @ w[f"{name}.mlp.Wi.weight"].T, 2, axis=-1)
            x = x + (_gelu(up) * gate) @ w[f"{name}.mlp.Wo.weight"].T
        return _norm(x, w["final_norm.weight"])

    def vector(self, tokens: Sequence[int]) -> np.ndarray:
        x = self.states(tokens)
        pooled: np.ndarray = x[0] if self.pooling == "cls" else x.mean(0)
        return pooled / np.linalg.norm(pooled)

    def logit(self, tokens: Sequence[int]) -> float:
        """Return a reranker's score of a pair's tokens."""
        x, w = self.states(tokens), self.weights
        pooled = x[0] if self.pooling == "cls" else x.mean(0)
        dense = _norm(_gelu(pooled @ w["head.dense.weight"].T), w["head.norm.weight"])
        return float(dense @ w["classifier.weight"][0] + w["classifier.bias"][0])


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    spread = np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    normed: np.ndarray = (x - x.mean(-1, keepdims=True)) / spread * weight
    return normed


def _gelu(x: np.ndarray) -> np.ndarray:
    activated: np.ndarray = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return activated


def _rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def write_modern(
    folder: Path, *, pooling: str = "mean", reranks: bool = False, prefix: str = "", **config: Any
) -> TinyModern:
    """Write a random ModernBERT with the vocabulary `WORDS` into a new folder."""
    write_encoder(folder, pooling=pooling, reranks=reranks)  # for its tokenizer and modules
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings.weight": (len(WORDS), WIDTH)}
    norms = ["embeddings.norm", "final_norm"]
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        shapes[f"{name}.attn.Wqkv.weight"] = (3 * WIDTH, WIDTH)
        shapes[f"{name}.attn.Wo.weight"] = (WIDTH, WIDTH)
        shapes[f"{name}.mlp.Wi.weight"] = (2 * HIDDEN, WIDTH)
        shapes[f"{name}.mlp.Wo.weight"] = (WIDTH, HIDDEN)
        norms += [f"{name}.mlp_norm", *([f"{name}.attn_norm"] if layer else [])]
    heads: dict[str, tuple[int, ...]] = {}
    if reranks:
        heads = {"head.dense.weight": (WIDTH, WIDTH), "classifier.weight": (1, WIDTH)}
        heads["classifier.bias"] = (1,)
        norms.append("head.norm")
    weights = {name: random.normal(0, 0.4, shape) for name, shape in (shapes | heads).items()}
    weights |= {f"{name}.weight": random.normal(1, 0.2, WIDTH) for name in norms}
    named = {
        name if name.startswith(("head.", "classifier.")) else prefix + name: mx.array(
            value.astype(np.float32)
        )
        for name, value in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    written = {
        "model_type": "modernbert",
        "architectures": [f"ModernBert{'ForSequenceClassification' if reranks else 'Model'}"],
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": len(WORDS),
        "max_position_embeddings": POSITIONS,
        "norm_eps": EPSILON,
        "local_attention": WINDOW,
        "global_attn_every_n_layers": EVERY,
        "global_rope_theta": GLOBAL_THETA,
        "local_rope_theta": LOCAL_THETA,
        "classifier_pooling": pooling,
        **({"id2label": {"0": "LABEL_0"}} if reranks else {}),
        **config,
    }
    (folder / "config.json").write_text(json.dumps(written))
    return TinyModern(folder, weights, pooling)
