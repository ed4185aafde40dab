"""Folders of tiny random encoders in transformers' format, and their NumPy embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "of", "a", "gate", "river", "holds", "back"),
    *("water", "amber", "falcon", "code", "is", "what", "why", "1", "2", "3", "4", "##s", "."),
]
CLS, SEP, UNKNOWN = 2, 3, 1
WIDTH, HEADS, HIDDEN, LAYERS, POSITIONS = 16, 4, 24, 2, 24


@dataclass(frozen=True)
class TinyEncoder:
    """A folder, and its weights."""

    folder: Path
    weights: dict[str, np.ndarray]
    config: dict[str, Any]
    pooling: str
    normalizes: bool

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text of known words."""
        return [CLS, *(WORDS.index(word) for word in text.split()), SEP]

    def states(self, tokens: Sequence[int], first: int | None = None) -> np.ndarray:
        """Return the last layer's state (tokens, width) in float64."""
        w, eps = self.weights, float(self.config["layer_norm_eps"])

        def linear(x: np.ndarray, name: str) -> np.ndarray:
            result: np.ndarray = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
            return result

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            spread = np.sqrt(x.var(-1, keepdims=True) + eps)
            result: np.ndarray = (x - x.mean(-1, keepdims=True)) / spread
            return result * w[f"{name}.weight"] + w[f"{name}.bias"]

        shift = self.config["pad_token_id"] + 1 if self.config["model_type"] != "bert" else 0
        count = len(tokens)
        kinds = np.arange(count) >= (count if first is None else first)
        x = w["embeddings.word_embeddings.weight"][list(tokens)]
        x = x + w["embeddings.position_embeddings.weight"][shift : shift + count]
        x = x + w["embeddings.token_type_embeddings.weight"][kinds.astype(int)]
        x = norm(x, "embeddings.LayerNorm")
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            q, k, v = (
                linear(x, f"{name}.attention.self.{part}").reshape(count, HEADS, -1)
                for part in ("query", "key", "value")
            )
            mixed = np.empty_like(q)
            for head in range(HEADS):
                scores = q[:, head] @ k[:, head].T / math.sqrt(WIDTH // HEADS)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head]
            out = linear(mixed.reshape(count, WIDTH), f"{name}.attention.output.dense")
            x = norm(x + out, f"{name}.attention.output.LayerNorm")
            up = linear(x, f"{name}.intermediate.dense")
            up = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
            x = norm(x + linear(up, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return x

    def vector(self, tokens: Sequence[int]) -> np.ndarray:
        x = self.states(tokens)
        by_name = {"mean": x.mean(0), "cls": x[0], "lasttoken": x[-1], "max": x.max(0)}
        pooled: np.ndarray = by_name[self.pooling]
        return pooled / np.linalg.norm(pooled) if self.normalizes else pooled

    def score(self, query: str, text: str) -> float:
        """Return a reranker's probability for a pair of texts."""
        first = self.tokens(query)
        tokens = [*first, *self.tokens(text)[1:]]
        state = self.states(tokens, len(first))[0]
        w = self.weights
        dense = np.tanh(state @ w["pooler.dense.weight"].T + w["pooler.dense.bias"])
        logit = float(dense @ w["classifier.weight"][0] + w["classifier.bias"][0])
        return 1 / (1 + math.exp(-logit))


def write_encoder(
    folder: Path,
    *,
    pooling: str = "mean",
    normalizes: bool = True,
    reranks: bool = False,
    model_type: str = "bert",
    prefix: str = "",
    seed: int = 5,
    dtype: Any = mx.float32,
    **config: Any,
) -> TinyEncoder:
    """Write a random encoder with the vocabulary `WORDS` into a new folder."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    shift = 1 if model_type != "bert" else 0
    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS + shift, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    linears = {f"encoder.layer.{n}.attention.self.{p}": (WIDTH, WIDTH)
               for n in range(LAYERS) for p in ("query", "key", "value")}  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        linears[f"{name}.attention.output.dense"] = (WIDTH, WIDTH)
        linears[f"{name}.intermediate.dense"] = (HIDDEN, WIDTH)
        linears[f"{name}.output.dense"] = (WIDTH, HIDDEN)
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    if reranks:
        linears["pooler.dense"], linears["classifier"] = (WIDTH, WIDTH), (1, WIDTH)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights = {name: random.normal(0, 0.4, shape) for name, shape in shapes.items()}
    for name in norms:
        weights[f"{name}.weight"] = random.normal(1, 0.2, WIDTH)
        weights[f"{name}.bias"] = random.normal(0, 0.2, WIDTH)
    named = {
        name if name.startswith("classifier") else prefix + name: mx.array(value).astype(dtype)
        for name, value in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    config = {
        "model_type": model_type,
        "architectures": ["BertForSequenceClassification" if reranks else "BertModel"],
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": len(WORDS),
        "max_position_embeddings": POSITIONS + shift,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        **({"id2label": {"0": "LABEL_0"}} if reranks else {}),
        **config,
    }
    _write(folder / "config.json", config)
    _write_tokenizer(folder)
    if not reranks:
        _write_modules(folder, pooling, normalizes)
    exact = {name: np.array(a.astype(mx.float32), np.float64) for name, a in named.items()}
    plain = {name.removeprefix(prefix): value for name, value in exact.items()}
    return TinyEncoder(folder, plain, config, pooling, normalizes)


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.enable_truncation(4)  # as a folder may have it, and which is not ours
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_modules(folder: Path, pooling: str, normalizes: bool) -> None:
    of = "sentence_transformers.models"
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{of}.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{of}.Pooling"}]
    if normalizes:
        modules += [{"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{of}.Normalize"}]
    _write(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    names = {
        "mean": "mean_tokens",
        "cls": "cls_token",
        "lasttoken": "lasttoken",
        "max": "max_tokens",
    }
    chosen = {f"pooling_mode_{text}": name == pooling for name, text in names.items()}
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **chosen})


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))
