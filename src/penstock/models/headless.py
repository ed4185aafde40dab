"""Decoders that embed: models without an output layer, and the reader of their folders.

Such a model returns the last hidden states, after the final norm, in place of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.models.layer_seams import HEAD, IS_HEAD, read_rows

VOCABULARY = "penstock_vocabulary"
"""Attribute of a model without an output layer: the number of tokens that it knows."""
STACK = "model."
"""Prefix of a model's decoder in mlx-lm, which folders of embedders often omit."""


class HiddenOutput(nn.Module):
    """Replacement of an output layer that returns its input."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        setattr(self, IS_HEAD, True)

    def __call__(self, x: mx.array) -> mx.array:
        return read_rows(x, self)


class InputEmbedding(nn.Module):
    """Embedding of input tokens; as the output layer, it returns its input."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = embedding

    def __call__(self, x: mx.array) -> mx.array:
        embedded: mx.array = self.embedding(x)
        return embedded

    def as_linear(self, x: mx.array) -> mx.array:
        return read_rows(x)


def drop_head(model: Any) -> None:
    """Let a model of mlx-lm return hidden states in place of logits, in place.

    Raises:
        ModelError: the model's embedding or output layer is not where mlx-lm's models have it.
    """
    text = getattr(model, "language_model", model)
    stack = getattr(text, "model", None)
    embedding = getattr(stack, "embed_tokens", None)
    if stack is None or embedding is None:
        raise ModelError(f"embeddings are not supported with the model type {model.model_type}")
    setattr(model, VOCABULARY, embedding.weight.shape[0])
    if HEAD in text:
        text.lm_head = HiddenOutput()
    else:
        stack.embed_tokens = InputEmbedding(embedding)


def named_as_written(model_class: type[nn.Module]) -> type[nn.Module]:
    """Return a model class that also reads weights whose names lack the decoder's prefix."""

    def sanitize(self: Any, weights: Mapping[str, mx.array]) -> Mapping[str, mx.array]:
        if not any(name.startswith(STACK) for name in weights):
            weights = {
                name if name.startswith(HEAD) else STACK + name: array
                for name, array in weights.items()
            }
        theirs: Callable[..., Any] | None = getattr(model_class, "sanitize", None)
        return weights if theirs is None else theirs(self, dict(weights))

    return type(
        model_class.__name__,
        (model_class,),
        {"sanitize": sanitize, "__module__": model_class.__module__},
    )


def vocabulary_of(model: nn.Module, logits_width: int) -> int:
    """Return the number of tokens that a model knows."""
    size: int = getattr(model, VOCABULARY, logits_width)
    return size
