"""Recognition of encoders, which compute embeddings or scores instead of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.models import named
from penstock.models.source import find_file, read_object
from penstock.regular_files import read_text

ENCODER_TYPES = frozenset({"bert", "camembert", "modernbert", "roberta", "xlm-roberta"})
"""Model types that `penstock.encoders` supports."""
MODULES = "modules.json"
"""File in which sentence-transformers lists a model's modules."""
ENCODER_NOTE = "it is an encoder, which writes no text"
WRITING = ("chat", "completion")
"""Kinds of requests that a text-generating model answers."""
EMBEDDING = ("embedding",)
RERANK = ("rerank",)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of an encoder.

    >>> is_encoder({"model_type": "bert"}), is_encoder({"model_type": "bert", "is_decoder": True})
    (True, False)
    """
    return config.get("model_type") in ENCODER_TYPES and not config.get("is_decoder")


def scores_pairs(config: Mapping[str, Any]) -> bool:
    """Return whether an encoder's config is that of a reranker, which scores pairs of texts."""
    classes = config.get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in classes)


def embeds_by_decoder(path_or_name: str | Path) -> bool:
    """Return whether a model is a decoder with the pooling module of sentence-transformers."""
    config = read_object(path_or_name, "config.json")
    file = None if not config or is_encoder(config) else find_file(path_or_name, MODULES)
    if file is None:
        return False
    try:
        return "Pooling" in read_text(file)
    except (OSError, ValueError):
        return False


def kinds_of(path_or_name: str | Path) -> tuple[str, ...]:
    """Return the kinds of requests that a model answers, given a folder, short name or hub name."""
    name = str(path_or_name)
    if name in named.MODELS and not Path(name).exists():
        return EMBEDDING if named.MODELS[name].embeds else WRITING
    config = read_object(path_or_name, "config.json")
    if not is_encoder(config):
        return EMBEDDING if embeds_by_decoder(path_or_name) else WRITING
    return RERANK if scores_pairs(config) else EMBEDDING
