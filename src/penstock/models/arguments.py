"""Hyperparameters of a loaded model, read from its arguments by the names that mlx-lm uses."""

from __future__ import annotations

import mlx.nn as nn


def query_heads(model: nn.Module) -> int:
    """Return the maximum number of query heads of any layer, also a drafter's; 64 if unknown."""
    layers = [getattr(layer, "self_attn", None) for layer in getattr(model, "layers", [])]
    names = ("num_attention_heads", "n_heads", "n_head", "num_heads")
    heads = max(_figures(model, layers, names), default=64)
    spec = getattr(getattr(model, "drafter", None), "spec", None)
    return heads if spec is None else max(heads, spec.sizes.heads)


def expanded_numbers(model: nn.Module) -> int:
    """Return the numbers per head and token that latent attention expands; 0 without it."""
    parts = (_figures(model, [], (name,)) for name in ("qk_nope_head_dim", "v_head_dim"))
    keys, values = (max(part, default=0) for part in parts)
    return keys + values if keys and values else 0


def absorbs(model: nn.Module) -> bool:
    """Return whether a model with latent attention absorbs the latents' products, as MLA does."""
    named: list[tuple[str, nn.Module]] = model.named_modules()  # type: ignore[no-untyped-call]
    return any(name.rpartition(".")[2] == "embed_q" for name, _ in named)


def positions(model: nn.Module) -> int | None:
    """Return the context length of a model in tokens; None if unknown."""
    return min(
        _figures(model, [], ("max_position_embeddings", "n_positions", "n_ctx")), default=None
    )


def _figures(model: nn.Module, layers: list[object], names: tuple[str, ...]) -> list[int]:
    arguments = getattr(model, "args", None)
    places = [arguments, getattr(arguments, "text_config", None), *layers]
    figures = (getattr(place, name, None) for place in places for name in names)
    return [figure for figure in figures if isinstance(figure, int)]
