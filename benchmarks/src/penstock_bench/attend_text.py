"""Teacher forcing of a text with full attention, selected tokens, or a window."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.attention import devices
from penstock.attention.selection.key_index import KeyIndex
from penstock.caches import SelectiveKVCache, make_kv_cache
from penstock.engine.model.runner import Runner
from penstock.kv.numpy_arrays import Floats
from penstock.kv.tails import LayerShape, token_bytes
from penstock.plurals import counted
from penstock_bench.eval_texts import EvalPiece
from penstock_bench.forcing import Forced, PieceFigures, log_probabilities

STEP_TOKENS = 64
"""Tokens at the end of each piece that are decoded one by one."""
KEPT_TOKENS = 64
"""First tokens that a window keeps; without them its loss is ten times as large."""
PROMPT_TOKENS = 512
"""Prefill chunk, in tokens."""


class AttendText:
    """Prefilled pieces of a text, and the predictions of their last tokens.

    Args:
        model: must be attached by `penstock.attach`.
        text: pieces, each longer than `STEP_TOKENS` + 1.
        step: called with a description before each prefill or measurement.
        rest: whether steps approximate the other tokens by the index.
    """

    def __init__(
        self,
        model: Any,
        text: Sequence[EvalPiece],
        step: Callable[[str], None] = lambda _: None,
        *,
        rest: bool = False,
    ) -> None:
        self._model = model
        self._rest = rest
        self._text = text
        self._step = step
        self._read: list[list[Any]] = []
        self._all: list[Floats] = []
        max_tokens = max(len(piece.tokens) for piece in text)
        self._shapes = Runner(model, devices.current(), max_kv_size=max_tokens, keep=0).shapes
        for piece in text:
            step("reading all")
            self._read.append(self._prompt(piece, self._caches(max_tokens)))
            self._all.append(self._steps(piece, copy.deepcopy(self._read[-1])))
        self.whole = self._figures(self._all)
        """Figures of full attention."""

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that support selection."""
        caches = self._read[0]
        return [n for n, cache in enumerate(caches) if isinstance(cache, SelectiveKVCache)]

    def choice(self, tokens: int, whole: Collection[int] = ()) -> Forced:
        """Return the figures of steps that read `tokens` tokens in each layer.

        Args:
            tokens: number of tokens read.
            whole: indices of the layers with full attention.
        """
        logs = []
        for piece, read in zip(self._text, self._read, strict=True):
            self._step(f"{counted(tokens, 'token')} read")
            caches = copy.deepcopy(read)
            for layer in self.layers:
                if layer not in whole:
                    caches[layer].attend_tokens = tokens
            logs.append(self._steps(piece, caches))
        return self._figures(logs)

    def kl(self, tokens: int, whole: Collection[int] = ()) -> float:
        """Return the mean KL of `choice` against full attention."""
        return mean(self.choice(tokens, whole).kl)

    def window(self, tokens: int) -> Forced:
        """Return the figures of a window that takes the bytes of `tokens` tokens and the index.

        The whole piece is prefilled in the window, which keeps its first tokens.
        """
        logs = []
        for piece, size in zip(self._text, self.window_tokens(tokens), strict=True):
            self._step(f"window of {counted(size, 'token')}")
            caches = make_kv_cache(self._model, size, KEPT_TOKENS)
            logs.append(self._steps(piece, self._prompt(piece, caches)))
        return self._figures(logs)

    def window_tokens(self, tokens: int) -> list[int]:
        """Return the size of that window for each piece, in tokens."""
        return [
            window_tokens(self._shapes, self.layers, tokens, len(piece.tokens), rest=self._rest)
            for piece in self._text
        ]

    def _caches(self, attend: int) -> list[Any]:
        return make_kv_cache(self._model, attend, attend=attend, attend_rest=self._rest)

    def _prompt(self, piece: EvalPiece, caches: list[Any]) -> list[Any]:
        """Prefill a piece up to its last `STEP_TOKENS` tokens; return the caches."""
        prompt = list(piece.tokens[: -STEP_TOKENS - 1])
        for start in range(0, len(prompt), PROMPT_TOKENS):
            self._model(mx.array([prompt[start : start + PROMPT_TOKENS]]), cache=caches)
            mx.eval([cache.state for cache in caches])  # the head is not computed
        return caches

    def _steps(self, piece: EvalPiece, caches: list[Any]) -> Floats:
        """Return the log-probabilities after each decoded token."""
        steps = (
            self._model(mx.array([[token]]), cache=caches)[0]
            for token in piece.tokens[-STEP_TOKENS - 1 : -1]
        )
        return np.concatenate([log_probabilities(logits) for logits in steps])

    def _figures(self, logs: Sequence[Floats]) -> Forced:
        forced = Forced()
        for piece, ours, whole in zip(self._text, logs, self._all, strict=True):
            figures = PieceFigures()
            figures.note(ours, whole, np.exp(whole), piece.tokens[-STEP_TOKENS:])
            forced.add(figures, (0, 0))
        return forced


def window_tokens(
    shapes: Sequence[LayerShape],
    layers: Sequence[int],
    attend: int,
    length: int,
    *,
    rest: bool = False,
) -> int:
    """Return the window size, in tokens, that takes the bytes of the selection and its index.

    Args:
        shapes: shape of one token in each layer.
        layers: indices of the layers with selection.
        attend: tokens that a step reads.
        length: tokens with an index.
        rest: whether the index has values.
    """
    index = KeyIndex(frozenset(layers), rest).token_bytes(shapes)
    return attend + length * index // token_bytes([shapes[layer] for layer in layers])


def mean(groups: Sequence[Sequence[float]]) -> float:
    """Return the mean over all values of all groups."""
    values = [value for group in groups for value in group]
    return math.fsum(values) / len(values)
