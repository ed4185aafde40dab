"""Hidden states of a model for what drafts from them: its layers' outputs, and the last token's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class _Tapped:
    """A layer that notes its outputs; all else is the layer's."""

    def __init__(self, layer: Any, number: int, outputs: dict[int, mx.array]) -> None:
        self._layer, self._number, self._outputs = layer, number, outputs

    def __call__(self, *args: Any, **more: Any) -> Any:
        output = self._layer(*args, **more)
        self._outputs[self._number] = output[0] if isinstance(output, tuple) else output
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@contextmanager
def outputs_of(model: Any, numbers: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Yield the outputs of some of a model's layers, by number, of calls within the block."""
    layers, outputs = model.layers, dict[int, mx.array]()
    model.layers = [
        _Tapped(layer, number, outputs) if number in numbers else layer
        for number, layer in enumerate(layers)
    ]
    try:
        yield outputs
    finally:
        model.layers = layers


def caches_of(model: Any, parent: Any, make_kv: Callable[[], Any]) -> list[Any]:
    """Return the caches of a model without those of its head or drafter.

    Args:
        parent: `super()` of the model, which may have `make_cache`.
        make_kv: makes mlx-lm's cache of a layer that reads all tokens.
    """
    if hasattr(parent, "make_cache"):
        caches: list[Any] = parent.make_cache()
        return caches
    return [make_kv() for _ in model.layers]


def shifted(hidden: mx.array, state: Any) -> mx.array:
    """Return for each token the hidden state of the token before it, and store the next pass's.

    The first token of a text gets zeros.

    Args:
        hidden: hidden states of tokens, (b, n, width).
        state: mlx-lm's cache with the hidden state of the token before these, or None at the start
            of a text. Afterwards it has that of the last token; with `lengths`, of each row's last
            token without padding; with `by_token`, of every token, to choose one of after a
            rejection.
    """
    before = mx.zeros_like(hidden[:, :1]) if state[0] is None else state[0]
    if getattr(state, "by_token", False):
        state[0] = hidden
    elif state.lengths is None:
        state[0] = hidden[:, -1:]
    else:
        state[0] = mx.take_along_axis(hidden, (state.lengths - 1)[:, None, None], axis=1)
    return mx.concatenate([before, hidden[:, :-1]], axis=1)


def text_model(model: Any) -> Any:
    """Return the part of a model that has the layers and the output layer."""
    return getattr(model, "language_model", model)


def logits_of(text: Any, hidden: mx.array) -> mx.array:
    """Apply the output layer of a text model to normed hidden states, (b, n, vocabulary)."""
    head = text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear
    logits: mx.array = head(hidden)
    return logits
