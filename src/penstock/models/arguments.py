"""Figures read from a loaded model's arguments, under the names that mlx-lm's models use."""

from __future__ import annotations

import mlx.nn as nn


def query_heads(model: nn.Module) -> int:
    """Return the most query heads of any layer; 64 if the model does not tell.

    Read from the layer's attention or its arguments, under one of the names mlx-lm's models use.
    """
    places = [getattr(model, "args", None)]
    places.append(getattr(places[0], "text_config", None))
    places += [getattr(layer, "self_attn", None) for layer in getattr(model, "layers", [])]
    counts = [
        value
        for place in places
        for name in ("num_attention_heads", "n_heads", "n_head", "num_heads")
        if isinstance(value := getattr(place, name, None), int)
    ]
    return max(counts, default=64)


def positions(model: nn.Module) -> int | None:
    """Return how many positions a model is made for, of its arguments; None if they do not tell."""
    places = [getattr(model, "args", None)]
    places.append(getattr(places[0], "text_config", None))
    limits = [
        value
        for place in places
        for name in ("max_position_embeddings", "n_positions", "n_ctx")
        if isinstance(value := getattr(place, name, None), int)
    ]
    return min(limits, default=None)
