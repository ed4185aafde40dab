"""Model that generates a scripted text at the cost of its normal computation.

Allows timing answers that repeat their prompt, on any model and on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

CERTAIN = 1e4
"""Logit of the script's next token; representable in every dtype."""


class Script:
    """Text that a model follows, by position; initially empty."""

    def __init__(self) -> None:
        self._tokens: mx.array | None = None

    def set(self, tokens: Sequence[int] | None) -> None:
        """Follow a text, prompt and answer; None to stop."""
        self._tokens = None if tokens is None else mx.array(list(tokens))

    def forced(self, logits: mx.array, offset: Any) -> mx.array:
        """Return logits, (rows, width, vocabulary), whose maximum is the script's next token.

        Args:
            logits: the model's logits.
            offset: position of the first token, of all rows or of each.
        """
        if self._tokens is None:
            return logits
        starts = mx.array(offset).reshape(-1, 1)
        following = mx.minimum(starts + mx.arange(logits.shape[1]) + 1, self._tokens.size - 1)
        following = mx.broadcast_to(self._tokens[following], logits.shape[:2])
        certain = mx.array(CERTAIN, logits.dtype)
        return mx.put_along_axis(logits, following[..., None], certain, axis=-1)


@contextmanager
def scripted(model: Any, script: Script) -> Iterator[Any]:
    """Make a model follow a script; all of its caches have the positions of the first layer's."""
    plain = type(model)

    def call(self: Any, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        offset = 0 if cache is None else cache[0].offset
        if isinstance(offset, mx.array):
            offset = mx.array(offset)  # before the step moves it on
        return script.forced(plain.__call__(self, inputs, cache=cache, **more), offset)

    namespace = {"__call__": call, "__module__": plain.__module__}
    model.__class__ = type(plain.__name__, (plain,), namespace)
    try:
        yield model
    finally:
        model.__class__ = plain
