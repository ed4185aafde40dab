"""Facts about an encoder, read from its folder: sizes, pooling, maximum length. No arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
