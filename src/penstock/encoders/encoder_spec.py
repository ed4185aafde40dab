"""Facts about an encoder, read from its folder: sizes, pooling, maximum length. No arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from penstock.errors import ModelError
from penstock.memory.model_config import read_config
from penstock.models.encoder_types import ENCODER_TYPES, scores_pairs
from penstock.regular_files import read_text

Pooling: TypeAlias = Literal["mean", "cls", "lasttoken", "max"]
POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
}
"""Pooling modes by their keys in the config of a sentence-transformers pooling module."""
ACTIVATIONS = ("gelu", "gelu_new", "relu")
MODERN_BERT = "modernbert"
MODERN_QUERIES = 512
"""`EncoderSpec.most_queries` of ModernBERT, whose texts may have 8,192 tokens."""
SLIDING = "sliding_attention"
SHIFTED = ("camembert", "roberta", "xlm-roberta")
"""Model types whose positions start at the padding token's id plus one."""
MODULES = ("Transformer", "Pooling", "Normalize")
"""Supported classes of sentence-transformers modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Architecture, sizes and pooling of an encoder."""

    folder: Path
    model_type: str
    layers: int
    heads: int
    width: int
    """Size of the hidden states and embeddings."""
    hidden: int
    """Intermediate size of the MLP."""
    vocabulary_size: int
    first_position: int
    """Index of the first token's position embedding."""
    most_tokens: int
    """Maximum length of a text in tokens, special tokens included."""
    epsilon: float
    activation: str
    pooling: Pooling
    normalizes: bool
    """Whether embeddings are scaled to unit length."""
    labels: int
    """Number of scores of a pair of texts; 0 for an embedder."""
    windows: Sequence[int | None] = ()
    """Tokens on each side that each layer attends to, None means all; ModernBERT only, as below."""
    thetas: Sequence[float] = ()
    """Base of each layer's rotary position embedding."""
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    head_activation: str = "gelu"
    """Activation of the head that scores pairs."""
    most_queries: int | None = None
    """Maximum number of tokens whose attention is computed at once in a row; None means all."""

    @property
    def embeds(self) -> bool:
        return not self.labels


def read_encoder_spec(folder: Path) -> EncoderSpec:
    """Read the spec from a folder in the format of transformers or sentence-transformers.

    Raises:
        ModelError: a file is missing or damaged, or the encoder is not supported.
    """
    config = read_config(folder / "config.json")
    model_type = str(config.get("model_type"))
    if model_type not in ENCODER_TYPES:
        raise ModelError(f"{folder}: encoders of type {model_type} are not supported")
    if model_type == MODERN_BERT:
        return _modern_spec(folder, config)
    activation = str(config.get("hidden_act", "gelu"))
    kind = config.get("position_embedding_type") or "absolute"
    if activation not in ACTIVATIONS or kind != "absolute":
        raise ModelError(
            f"{folder}: encoders with {activation} and {kind} positions are not supported"
        )
    modules = _modules(folder)
    pooling = next((m for m in modules if m["class"] == "Pooling"), None)
    shift = _whole(config, "pad_token_id", folder) + 1 if model_type in SHIFTED else 0
    positions = _whole(config, "max_position_embeddings", folder) - shift
    width, heads = (
        _whole(config, "hidden_size", folder),
        _whole(config, "num_attention_heads", folder),
    )
    if not heads or width % heads:
        raise ModelError(f"{folder}: hidden_size {width} is not divisible by {heads} heads")
    return EncoderSpec(
        folder=folder,
        model_type=model_type,
        layers=_whole(config, "num_hidden_layers", folder),
        heads=heads,
        width=width,
        hidden=_whole(config, "intermediate_size", folder),
        vocabulary_size=_whole(config, "vocab_size", folder),
        first_position=shift,
        most_tokens=min([positions, *_lengths(folder)]),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        activation=activation,
        pooling="mean" if pooling is None else _pooling(folder / str(pooling["path"])),
        normalizes=any(module["class"] == "Normalize" for module in modules),
        labels=_labels(config),
    )


def _modern_spec(folder: Path, config: Mapping[str, Any]) -> EncoderSpec:
    activation = str(config.get("hidden_activation", "gelu"))
    head_activation = str(config.get("classifier_activation", "gelu"))
    for name in (activation, head_activation):
        if name not in ACTIVATIONS:
            raise ModelError(f"{folder}: encoders with {name} are not supported")
    modules, labels = _modules(folder), _labels(config)
    pooling = next((m for m in modules if m["class"] == "Pooling"), None)
    of_folder: Pooling = "mean" if pooling is None else _pooling(folder / pooling["path"])
    of_head: Pooling = "mean" if config.get("classifier_pooling") == "mean" else "cls"
    layers, width = (
        _whole(config, f"{name}", folder) for name in ("num_hidden_layers", "hidden_size")
    )
    heads = _whole(config, "num_attention_heads", folder)
    if not heads or width % heads:
        raise ModelError(f"{folder}: hidden_size {width} is not divisible by {heads} heads")
    every = int(config.get("global_attn_every_n_layers", 3))
    kinds = config.get("layer_types") or [
        SLIDING if number % every else "full_attention" for number in range(layers)
    ]
    if len(kinds) != layers:
        raise ModelError(f"{folder}: layer_types has {len(kinds)} entries for {layers} layers")
    window = int(config.get("local_attention", 128)) // 2
    return EncoderSpec(
        folder=folder,
        model_type=MODERN_BERT,
        layers=layers,
        heads=heads,
        width=width,
        hidden=_whole(config, "intermediate_size", folder),
        vocabulary_size=_whole(config, "vocab_size", folder),
        first_position=0,
        most_tokens=min([_whole(config, "max_position_embeddings", folder), *_lengths(folder)]),
        epsilon=float(config.get("norm_eps", 1e-5)),
        activation=activation,
        pooling=of_head if labels else of_folder,
        normalizes=any(module["class"] == "Normalize" for module in modules),
        labels=labels,
        windows=[window if kind == SLIDING else None for kind in kinds],
        thetas=[_theta(config, str(kind)) for kind in kinds],
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_bias=bool(config.get("norm_bias", False)),
        head_bias=bool(config.get("classifier_bias", False)),
        head_activation=head_activation,
        most_queries=MODERN_QUERIES,
    )


def _theta(config: Mapping[str, Any], kind: str) -> float:
    """Return the base of a kind of layers, by the key of old or new releases of transformers."""
    by_kind = config.get("rope_parameters")
    parameters = by_kind.get(kind) if isinstance(by_kind, Mapping) else None
    if isinstance(parameters, Mapping) and "rope_theta" in parameters:
        return float(parameters["rope_theta"])
    if kind == SLIDING:
        return float(config.get("local_rope_theta") or config.get("global_rope_theta") or 10_000.0)
    return float(config.get("global_rope_theta", 160_000.0))


def read_decoder_spec(folder: Path) -> EncoderSpec:
    """Read the spec of a decoder that embeds, such as Qwen3-Embedding.

    Raises:
        ModelError: a file is missing or damaged, or the pooling or attention is not supported.
    """
    config = read_config(folder / "config.json")
    pooling = next((m for m in _modules(folder) if m["class"] == "Pooling"), None)
    if pooling is None or _pooling(folder / pooling["path"]) != "lasttoken":
        raise ModelError(f"{folder}: decoders embed by their last token, not by other pooling")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ModelError(f"{folder}: decoders whose attention is not causal are not supported")
    epsilon = config.get("rms_norm_eps", config.get("layer_norm_eps", 1e-6))
    return EncoderSpec(
        folder=folder,
        model_type=str(config.get("model_type")),
        layers=_whole(config, "num_hidden_layers", folder),
        heads=_whole(config, "num_attention_heads", folder),
        width=_whole(config, "hidden_size", folder),
        hidden=_whole(config, "intermediate_size", folder),
        vocabulary_size=_whole(config, "vocab_size", folder),
        first_position=0,
        most_tokens=min([_whole(config, "max_position_embeddings", folder), *_lengths(folder)]),
        epsilon=float(epsilon),
        activation=str(config.get("hidden_act", "silu")),
        pooling="lasttoken",
        normalizes=any(module["class"] == "Normalize" for module in _modules(folder)),
        labels=0,
    )


def _whole(config: Mapping[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{folder}: config.json has {value!r} as {name}, not a whole number")
    return value


def _labels(config: Mapping[str, Any]) -> int:
    if not scores_pairs(config):
        return 0
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(config.get("num_labels", 2))


def _modules(folder: Path) -> list[dict[str, str]]:
    """Return class and path of each module in `modules.json`; empty without that file."""
    listed = _json(folder / "modules.json")
    if not isinstance(listed, list):
        return []
    modules = [
        {"class": str(entry.get("type")).rpartition(".")[2], "path": str(entry.get("path", ""))}
        for entry in listed
        if isinstance(entry, dict)
    ]
    for module in modules:
        if module["class"] not in MODULES:
            raise ModelError(f"{folder}: modules of class {module['class']} are not supported")
        if Path(module["path"]).is_absolute() or ".." in Path(module["path"]).parts:
            raise ModelError(f"{folder}: modules.json names a path outside the folder")
    return modules


def _pooling(folder: Path) -> Pooling:
    content = _json(folder / "config.json")
    config = content if isinstance(content, dict) else {}
    if (mode := config.get("pooling_mode")) in POOLINGS.values():  # the key of newer releases
        return cast(Pooling, mode)
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise ModelError(f"{folder}: pooling by {', '.join(chosen) or 'nothing'} is not supported")
    return POOLINGS[chosen[0]]


def _lengths(folder: Path) -> list[int]:
    """Return the maximum lengths that files other than `config.json` state."""
    named = [
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ]
    contents = [(_json(folder / file), key) for file, key in named]
    values = [content.get(key) for content, key in contents if isinstance(content, dict)]
    return [int(value) for value in values if isinstance(value, int) and 2 < value < 10**9]


def _json(file: Path) -> Any:
    try:
        return json.loads(read_text(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON") from error
